"""Imported when any Hydra app of this environment starts: keep it free of other imports."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class EquipoiseSearchPath(SearchPathPlugin):
    """Makes ``+equipoise=default`` resolve without ``hydra.searchpath``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the package's configuration folder, after the application's own."""
        search_path.append(provider="equipoise", path="pkg://equipoise.conf")
