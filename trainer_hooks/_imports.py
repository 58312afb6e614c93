"""Run a hook right after a module has been imported, without importing it now.

A plugin is loaded in every process of a framework; importing the framework's trainer there would cost seconds in
processes that never train. So a hook waits for its module, using ``wrapt``.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` each time module ``name`` has run: now if it is loaded, and after each import.

    A module runs again if its first import failed (in its body or in a hook), if it is reloaded, or if it was dropped
    from ``sys.modules``. Each run creates new functions that the hook has not seen.

    Args:
        name: absolute module name.
        hook: receives the module after its body has run. If it raises, the import of ``name`` raises.
    """
    importer: Any = importlib.import_module("wrapt.importer")  # has no stubs

    def run(module: ModuleType) -> None:
        # wrapt drops a hook after calling it, even if it raised
        importer._post_import_hooks.setdefault(name, []).append(run)
        hook(module)

    wrapt.register_post_import_hook(run, name)
