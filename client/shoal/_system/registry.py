"""Registries of named factories, to which installed packages and running programs add.

A package declares what it adds as an entry point in its pyproject.toml, so that every process finds it without an
import. See "Entry points" in the packaging specifications of PyPA.
"""

import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from shoal import errors


class Named(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str:
        """Unique in its registry."""
        ...


T = TypeVar("T", bound=Named)


class Registry(Generic[T]):
    """Factories of one kind, by name. Safe for use by several threads.

    Entry points are read when the registry is first asked, not when it is made: the modules that they name import the
    package of the registry.

    Args:
        group: of the entry points; each names a class whose constructor takes no arguments.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._lock = threading.Lock()  # guards the next two; entry points are loaded under it
        self._items: dict[str, T] = {}
        self._loaded = False

    def register(self, item: T) -> None:
        """Adds a factory; one of the same name is replaced.

        Args:
            item: in use from the next `items` on.
        """
        with self._lock:
            self._load()
            self._items[item.name] = item

    def unregister(self, name: str) -> None:
        """Removes the factory of this name, if there is one."""
        with self._lock:
            self._load()
            self._items.pop(name, None)

    def items(self) -> list[T]:
        """Returns all factories, in no particular order.

        Raises:
            StartFailed: an entry point cannot be loaded.
        """
        with self._lock:
            self._load()
            return [*self._items.values()]

    def _load(self) -> None:
        if self._loaded:
            return
        for entry in entry_points(group=self._group):
            item = self._made(entry)
            self._items[item.name] = item
        self._loaded = True

    def _made(self, entry: EntryPoint) -> T:
        try:
            made: T = entry.load()()
        except Exception as error:
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
            raise errors.StartFailed(
                f"{entry.name} of {package} ({self._group}: {entry.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}; repair or uninstall {package}"
            ) from error
        return made


__all__ = ["Named", "Registry"]
