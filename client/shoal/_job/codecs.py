"""Codecs of single fields: a dataclass's field to and from the fields of the message that carries it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import errors


class Codec(Protocol):
    """How a field travels. Most have one field of the message; the two ends may also differ in number."""

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        """Returns the message's fields that carry the field `name` of `owner`."""

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        """Returns the owner's fields that a message carries; one that is left out has its default.

        Raises:
            InvalidJob, InvalidOptimizer: the value on the wire has no meaning.
        """


@dataclass(frozen=True)
class Scalar:
    """A number, a string or a bool, which travels as it is, under its own name.

    Attributes:
        zero_is_default: 0 on the wire, which is also a field that is not set, means the default.
    """

    zero_is_default: bool = False

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        return {name: getattr(owner, name)}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        value = getattr(message, name)
        return {name: value} if value or not self.zero_is_default else {}


@dataclass(frozen=True)
class Negated:
    """A bool that is True by default, and travels as its opposite so that False on the wire is the default.

    Attributes:
        under: the message's field.
    """

    under: str

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        return {self.under: not getattr(owner, name)}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        return {name: not getattr(message, self.under)}


@dataclass(frozen=True)
class Named:
    """A name in Python, a number of an enum on the wire.

    Attributes:
        numbers: by name.
        refusal: the message of the error for another number, in which {} is the number.
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
    """A value with a message of its own, which its `to_proto` makes. None travels as a message that is not set.

    Attributes:
        read: makes the value of the message.
        needed: the message is read also if it is not set, so that `read` refuses it. Otherwise the default holds.
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
    """A value that travels as text.

    Attributes:
        under: the message's field.
        write, read: to and from text.
    """

    under: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:
        return {self.under: self.write(getattr(owner, name))}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        return {name: self.read(getattr(message, self.under))}


@dataclass(frozen=True)
class Carried:
    """A field that another field's codec carries with it.

    Attributes:
        by: that field.
    """

    by: str

    def encode(self, name: str, owner: Any) -> Mapping[str, Any]:  # noqa: ARG002 - see the class
        return {}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:  # noqa: ARG002 - see the class
        return {}


__all__ = ["Carried", "Codec", "Named", "Negated", "Nested", "Scalar", "Text"]
