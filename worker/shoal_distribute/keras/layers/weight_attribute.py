"""Attributes of layers for their variables, by Keras' names."""

from typing import Any, Protocol

from shoal_distribute.values import DistributedVariable

# The arguments that leave out a variable.
_SWITCHES = {"bias": "use_bias", "beta": "center", "gamma": "scale"}


class _WithVariables(Protocol):
    name: str
    built: bool

    def arguments(self) -> dict[str, Any]: ...

    def variable_named(self, name: str) -> DistributedVariable | None: ...


class WeightAttribute:
    """Attribute for a variable of a layer. It is None if an argument leaves the variable out, such as `use_bias`.

    A layer that is not built, or never has such a variable, has no such attribute.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: _WithVariables | None, owner: type) -> Any:
        if layer is None:
            return self
        if (found := layer.variable_named(self._name)) is not None:
            return found
        if layer.built and layer.arguments().get(_SWITCHES.get(self._name, ""), True) is False:
            return None
        advised = "" if layer.built else ", because it is not built; give the model an Input, or call build"
        raise AttributeError(f"layer {layer.name} has no variable {self._name}{advised}", name=self._name, obj=layer)


__all__ = ["WeightAttribute"]
