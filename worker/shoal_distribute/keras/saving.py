"""Classes of users that `load_model` knows: `register_keras_serializable`, as in `keras.saving`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shoal import errors
from shoal_distribute.keras.names import advice

C = TypeVar("C", bound=type)

_registered: dict[str, type] = {}  # by "package>name"


def register_keras_serializable(package: str = "Custom", name: str | None = None) -> Callable[[C], C]:
    """Returns a decorator of layers' classes, which makes `load_model` know a class.

    Args:
        package: what its name in files begins with.
        name: its name; None means that of the class.
    """

    def registered(made: C) -> C:
        _registered[f"{package}>{name or made.__name__}"] = made
        return made

    return registered


def get_registered_name(obj: type) -> str:
    """Returns the name of a class in files: "package>name", or its own name if it is not registered."""
    return next((name for name, it in _registered.items() if it is obj), obj.__name__)


def get_registered_object(name: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the class of a name; None if there is none.

    Args:
        name: as `get_registered_name` returns it.
        custom_objects: classes by name, which are asked first.
    """
    given = custom_objects or {}
    return given.get(name, given.get(name.rpartition(">")[2], _registered.get(name)))


def class_of_user(name: str, custom_objects: Mapping[str, Any] | None) -> Any:
    """Returns the class of a name in a file.

    Args:
        name: the name.
        custom_objects: see `get_registered_object`.

    Raises:
        InvalidLayer: there is no such class.
    """
    found = get_registered_object(name, custom_objects)
    if found is None:
        short, known = name.rpartition(">")[2], [*(custom_objects or {}), *_registered]
        raise errors.InvalidLayer(
            f"the file has a layer of the class {name}, which is no class of keras; give load_model "
            f"custom_objects={{{short!r}: {short}}}, or decorate the class with register_keras_serializable"
            + (f" ({advice(name, known)})" if known else "")
        )
    return found


__all__ = ["class_of_user", "get_registered_name", "get_registered_object", "register_keras_serializable"]
