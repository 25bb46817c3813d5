"""Codecs of single fields: each converts a field of a dataclass to fields of a message, and back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import errors


class Codec(Protocol):
    """The conversion of a field to a message and back. Most codecs use one field of the message."""

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        """Returns the fields of the message, by name.

        Args:
            name: name of the field.
            owner: the dataclass that has the field.
        """

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        """Returns the fields of the dataclass, by name. A field that is left out has its default.

        Args:
            name: name of the field.
            message: the message.

        Raises:
            InvalidJob, InvalidOptimizer: the value in the message is not valid.
        """


@dataclass(frozen=True)
class Scalar:
    """The codec of a number, a string or a bool, which travels unchanged under its own name.

    Attributes:
        zero_is_default: whether 0 in the message, which also stands for an unset field, means the default.
        unset: the value that travels as 0, if `zero_is_default`: the default of a field that was added later. None
            means that there is none.
    """

    zero_is_default: bool = False
    unset: int | None = None

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        value = getattr(owner, name)
        return {name: 0 if self.zero_is_default and value == self.unset else value}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        value = getattr(message, name)
        return {name: value} if value or not self.zero_is_default else {}


@dataclass(frozen=True)
class Negated:
    """The codec of a bool that is True by default. It travels negated, so that an unset field means the default.

    Attributes:
        proto_field: name of the message's field.
    """

    proto_field: str

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        return {self.proto_field: not getattr(owner, name)}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        return {name: not getattr(message, self.proto_field)}


@dataclass(frozen=True)
class Named:
    """The codec of a name that travels as the number of an enum.

    Attributes:
        numbers: numbers of the enum by name.
        refusal: message of the error for an unknown number. The number replaces {} in it.
    """

    numbers: Mapping[Any, int]
    refusal: str

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        return {name: self.numbers[getattr(owner, name)]}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        number = getattr(message, name)
        for known, its in self.numbers.items():
            if its == number:
                return {name: known}
        raise errors.InvalidJob(self.refusal.format(number))


@dataclass(frozen=True)
class Nested:
    """The codec of a value with its own message, which `to_proto` returns. None travels as an unset message.

    Attributes:
        read: converts the message to the value.
        needed: whether an unset message is passed to `read`, which refuses it. Otherwise it means the default.
    """

    read: Callable[[Any], Any]
    needed: bool = False

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        value = getattr(owner, name)
        return {} if value is None else {name: value.to_proto()}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        return {name: self.read(getattr(message, name))} if self.needed or message.HasField(name) else {}


@dataclass(frozen=True)
class Text:
    """The codec of a value that travels as text.

    Attributes:
        proto_field: name of the message's field.
        write: converts the value to text.
        read: converts text to the value.
    """

    proto_field: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        return {self.proto_field: self.write(getattr(owner, name))}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        return {name: self.read(getattr(message, self.proto_field))}


@dataclass(frozen=True)
class EncodedElsewhere:
    """The codec of a field that the codec of another field carries.

    Attributes:
        by: name of the other field.
    """

    by: str

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:  # noqa: ARG002 - see the class
        return {}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:  # noqa: ARG002 - see the class
        return {}


__all__ = ["Codec", "EncodedElsewhere", "Named", "Negated", "Nested", "Scalar", "Text"]
