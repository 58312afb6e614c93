"""Run a hook right after a module has been imported, without importing it now.

A plugin is loaded in every process of a framework; importing the framework's trainer there would cost seconds in
processes that never train. So a hook waits for the module it is about.
"""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


class _PostImportFinder(importlib.abc.MetaPathFinder):
    """Wraps the loader of each awaited module; asks the other finders for the real one."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hooks = self.hooks.pop(fullname, None)  # popped first, so that the look-up below does not come back here
        if hooks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for hook in hooks:
                hook(module)

        spec.loader.exec_module = exec_module
        return spec


_FINDER = _PostImportFinder()


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook(module)`` once: now if module ``name`` is loaded, else right after its first import.

    Args:
        name: absolute module name.
        hook: receives the module after its body has run. What it raises reaches whoever imports ``name``.

    """
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
        return
    _FINDER.hooks.setdefault(name, []).append(hook)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
