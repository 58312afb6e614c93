"""A registry of named implementations: duplicates are errors, and a lookup error lists the known names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from equipoise.errors import DuplicateName, UnknownName, must, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to implementations of one kind.

    >>> greet = Registry[str]("greeting")
    >>> greet.register("hi", "hello")
    'hello'
    >>> greet["hi"], sorted(greet)
    ('hello', ['hi'])
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, name: str, item: T) -> T:
        """Add ``item`` under ``name`` and return it.

        Raises:
            DuplicateName: ``name`` is taken.

        """
        if name in self._items:
            raise DuplicateName(must(f"{self.kind} name", "be new", name, "choose another name"))
        self._items[name] = item
        return item

    def decorator(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under ``name``."""
        return lambda item: self.register(name, item)

    def __getitem__(self, name: str) -> T:
        try:
            return self._items[name]
        except KeyError:
            options = ", ".join(sorted(self._items))
            raise UnknownName(
                f"{self.kind} must be one of [{options}], got {name!r}; {nearest(name, self._items)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
