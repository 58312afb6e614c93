"""Engines by model type, backend, device and vendor.

``EQUIPOISE_DEVICE`` and ``EQUIPOISE_VENDOR`` override what is detected on the machine.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from equipoise.errors import DuplicateName, EquipoiseError, InvalidInput, UnknownName, must, nearest
from equipoise.training.engine.base import BaseEngine
from equipoise.training.engine.config import EngineConfig
from equipoise.training.engine.device import device_name, vendor_name

AnyEngine = TypeVar("AnyEngine", bound="type[BaseEngine]")


class MissingPackage(EquipoiseError, ImportError):
    """An optional engine needs a package that is not installed; the text names the extra to install."""


class EngineRegistry:
    """Maps (model type, backend, device, vendor) to engine classes.

    A class is looked up in three steps: for this device and vendor; for the device and any vendor; and, because GPUs of
    other vendors support CUDA too, for "cuda" of "nvidia".

    >>> registry = EngineRegistry()
    >>> registry.register("my_package.engine:MyEngine", model_type="language_model", backend="mine", device="cuda")
    >>> registry.entries()
    [('language_model', 'mine', 'cuda', None, 'my_package.engine:MyEngine')]
    """

    def __init__(self) -> None:
        self._table: dict[tuple[str, str], dict[tuple[str, str | None], type[BaseEngine] | str]] = {}
        self._extras: dict[str, str] = {}

    def register(
        self,
        engine: type[BaseEngine] | str,
        *,
        model_type: str | Sequence[str],
        backend: str | Sequence[str],
        device: str | Sequence[str],
        vendor: str | Sequence[str] | None = None,
        extra: str | None = None,
    ) -> None:
        """Add an engine under every combination of the given names.

        Args:
            engine: the class, or ``"module:Class"``, imported on first use.
            model_type: one or several.
            backend: one or several.
            device: one or several.
            vendor: one or several; None for any.
            extra: what to install if a package is missing, for example ``"equipoise[hf]"``.

        Raises:
            DuplicateName: a combination is taken; nothing is added.
            InvalidInput: it is neither a subclass of :class:`BaseEngine` nor ``"module:Class"``.
        """
        if isinstance(engine, str):
            if engine.count(":") != 1:
                raise InvalidInput(must("engine", 'be a class or "module:Class"', engine, "name both"))
            if extra is not None:
                self._extras[engine] = extra
        else:
            _checked(engine, "engine")
        keys = [
            (kind, name, where, who)
            for kind in _names("model_type", model_type)
            for name in _names("backend", backend)
            for where in _names("device", device)
            for who in ([None] if vendor is None else _names("vendor", vendor))
        ]
        for kind, name, where, who in keys:
            if (where, who) in self._table.get((kind, name), {}):
                raise DuplicateName(must("engine", "be new", (kind, name, where, who), "choose another backend name"))
        for kind, name, where, who in keys:
            self._table.setdefault((kind, name), {})[where, who] = engine

    def decorator(self, **names: Any) -> Callable[[AnyEngine], AnyEngine]:
        """Register the decorated class; arguments as for :meth:`register`."""

        def add(engine: AnyEngine) -> AnyEngine:
            self.register(engine, **names)
            return engine

        return add

    def find(
        self, model_type: str, backend: str, *, device: str | None = None, vendor: str | None = None
    ) -> type[BaseEngine]:
        """The engine class for these names.

        Args:
            model_type: for example "language_model".
            backend: for example "fsdp2".
            device: None for ``EQUIPOISE_DEVICE`` or the detected one.
            vendor: None for ``EQUIPOISE_VENDOR`` or the detected one.

        Raises:
            UnknownName: nothing matches; the text lists the registered names.
            MissingPackage: the engine needs a package that is not installed.
        """
        kinds = {kind for kind, _ in self._table}
        if model_type not in kinds:
            raise _unknown("model_type", model_type, kinds)
        backends = {name for kind, name in self._table if kind == model_type}
        if backend not in backends:
            raise _unknown(f"backend of {model_type!r}", backend, backends)
        table = self._table[model_type, backend]
        where = device or device_name()
        who = vendor or vendor_name(where)
        for key in ((where, who), (where, None), (where, "nvidia") if where == "cuda" else None):
            if key is not None and key in table:
                return self._loaded(table[key])
        known = ", ".join(sorted(f"{d} of {v or 'any vendor'}" for d, v in table))
        rule = f"have an engine for {model_type!r} on {backend!r} (there are: {known})"
        raise UnknownName(
            must("device and vendor", rule, (where, who), "set EQUIPOISE_DEVICE or EQUIPOISE_VENDOR, or register one")
        )

    def create(self, config: EngineConfig, model: Any) -> BaseEngine:
        """Build the engine that the configuration names; call its ``initialize`` next.

        Args:
            config: defines what to look up, and is passed to the engine.
            model: path, configuration or module, as the engine accepts.

        Raises:
            UnknownName, MissingPackage: as for :meth:`find`.
        """
        engine = self.find(config.model_type, config.backend, device=config.device, vendor=config.vendor)
        return engine(config, model)

    def entries(self) -> list[tuple[str, str, str, str | None, str]]:
        """(model type, backend, device, vendor or None, class) of each entry, sorted; nothing is imported."""
        rows = [
            (kind, name, where, who, engine if isinstance(engine, str) else f"{engine.__module__}:{engine.__name__}")
            for (kind, name), table in self._table.items()
            for (where, who), engine in table.items()
        ]
        return sorted(rows, key=lambda row: (*row[:3], row[3] or "", row[4]))

    def _loaded(self, engine: type[BaseEngine] | str) -> type[BaseEngine]:
        if not isinstance(engine, str):
            return engine
        module, _, name = engine.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            extra = self._extras.get(engine)
            remedy = f"pip install '{extra}'" if extra else f"install the package that contains {error.name!r}"
            raise MissingPackage(must(f"engine {engine!r}", "find its packages", f"no {error.name}", remedy)) from error
        except AttributeError as error:
            raise UnknownName(must("engine", f"be a class of {module}", name, "fix the registration")) from error
        return _checked(found, f"engine {engine!r}")


def _checked(engine: Any, field: str) -> type[BaseEngine]:
    if not (isinstance(engine, type) and issubclass(engine, BaseEngine)):
        raise InvalidInput(
            must(field, "be a subclass of BaseEngine", cast(object, engine), "derive it from equipoise.BaseEngine")
        )
    return engine


def _names(field: str, names: str | Sequence[str]) -> list[str]:
    listed = [names] if isinstance(names, str) else list(names)
    if not listed or not all(isinstance(name, str) and name for name in cast("list[Any]", listed)):
        raise InvalidInput(must(field, "be one or more names", names, "pass a string or a list of them"))
    return listed


def _unknown(field: str, got: str, known: set[str]) -> UnknownName:
    return UnknownName(f"{field} must be one of [{', '.join(sorted(known))}], got {got!r}; {nearest(got, known)}")


engines = EngineRegistry()
"""The registry with the package's own engines; ``engines.register`` adds yours."""

for _backend, _target in (
    ("ddp", "equipoise.training.engine.ddp:DDPEngine"),
    ("fsdp2", "equipoise.training.engine.fsdp2:FSDP2Engine"),
):
    engines.register(
        _target,
        model_type=("language_model", "value_model"),
        backend=_backend,
        device=("cpu", "cuda", "npu"),
        extra="equipoise[hf]",
    )
