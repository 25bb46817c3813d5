"""Registries of named factories that installed packages and running programs can extend.

A package declares its factories as entry points in its pyproject.toml, so that every process finds them without an
import. See "Entry points" in the packaging specifications of PyPA.
"""

import threading
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from shoal import errors


class HasName(Protocol):
    """An item of a registry."""

    @property
    def name(self) -> str:
        """The name, unique in its registry."""
        ...


T = TypeVar("T", bound=HasName)


class Registry(Generic[T]):
    """Factories of one kind by name. Any thread may use it.

    Entry points are loaded at the first use of the registry, not at its construction, because their modules import the
    package of the registry.

    Args:
        group: group of the entry points. Each names a class whose constructor takes no arguments.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._loading = threading.Lock()  # guards _declared; entry points are loaded under it
        self._declared: dict[str, T] | None = None
        # What the program registered, or None for a name that it removed. `register` takes no lock and loads nothing,
        # so that a module that an entry point names may call it while it is imported.
        self._registered: dict[str, T | None] = {}

    def register(self, item: T) -> None:
        """Adds a factory, or replaces the one of the same name.

        Args:
            item: the factory. The next call of `items` returns it.
        """
        self._registered[item.name] = item

    def unregister(self, name: str) -> None:
        """Removes the factory of this name if there is one."""
        self._registered[name] = None

    def items(self) -> list[T]:
        """Returns all factories, in no particular order.

        Raises:
            StartFailed: an entry point cannot be loaded.
        """
        with self._loading:
            if self._declared is None:
                created = map(self._create, entry_points(group=self._group))
                self._declared = {item.name: item for item in created}
        return [item for item in {**self._declared, **self._registered}.values() if item is not None]

    def _create(self, entry: EntryPoint) -> T:
        try:
            made: T = entry.load()()
        except Exception as error:
            package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
            raise errors.StartFailed(
                f"{entry.name} of {package} ({self._group}: {entry.value}) cannot be loaded: "
                f"{type(error).__name__}: {error}; repair or uninstall {package}"
            ) from error
        return made


__all__ = ["HasName", "Registry"]
