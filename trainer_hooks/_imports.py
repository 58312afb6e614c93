"""Run a hook right after a module has been imported, without importing it now.

A plugin is loaded in every process of a framework; importing the framework's trainer there would cost seconds in
processes that never train. So a hook waits for the module it is about. ``wrapt`` does the waiting.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` each time that module ``name`` has been run: now if it is loaded, and after each import.

    A module is run again where its first import failed (in its body or in a hook), where it is reloaded, and where it
    was dropped from ``sys.modules``. Each run makes new functions, which the hook has not seen.

    Args:
        name: absolute module name.
        hook: receives the module after its body has run. What it raises reaches whoever imports ``name``.
    """
    importer: Any = importlib.import_module("wrapt.importer")  # has no stubs

    def run(module: ModuleType) -> None:
        # wrapt forgets a hook once it has called it, whatever came of the call
        importer._post_import_hooks.setdefault(name, []).append(run)
        hook(module)

    wrapt.register_post_import_hook(run, name)
