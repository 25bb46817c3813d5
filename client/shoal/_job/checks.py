"""Checks of single fields. Each raises InvalidJob with what is wrong, where, and what is allowed."""

from collections.abc import Collection
from dataclasses import dataclass

from shoal import errors

# The widths of the wire.
UINT32, UINT64 = 2**32 - 1, 2**64 - 1


@dataclass(frozen=True)
class Number:
    """A whole number.

    Attributes:
        least, most: the smallest and the largest one that is allowed.
        words: says so. Empty: "a whole number from ... to ...".
    """

    least: int
    most: int
    words: str = ""

    def __call__(self, field: str, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            words = self.words or f"a whole number from {self.least} to {self.most}"
            raise errors.InvalidJob(f"{field} is {value!r}; it must be {words}", **_detail(field, value))


@dataclass(frozen=True)
class OneOf:
    """One of some names."""

    names: Collection[str]

    def __call__(self, field: str, value: object) -> None:
        if not isinstance(value, str) or value not in self.names:
            raise errors.InvalidJob(
                f"{field} is {value!r}; it must be one of {', '.join(self.names)}", **_detail(field, value)
            )


@dataclass(frozen=True)
class Instance:
    """An object of a class.

    Attributes:
        kind: the class.
        cure: what to give instead, as the message says it.
        optional: None is allowed, too.
        verb: "are" where the field's name is a plural.
    """

    kind: type
    cure: str
    optional: bool = False
    verb: str = "is"

    def __call__(self, field: str, value: object) -> None:
        if not isinstance(value, self.kind) and not (self.optional and value is None):
            raise errors.InvalidJob(f"{field} {self.verb} {value!r}; {self.cure}")


def flag(field: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise errors.InvalidJob(f"{field} is {value!r}; it must be True or False", **_detail(field, value))


def program_name(field: str, value: object) -> None:
    """The name of a program's factory, or nothing."""
    if not isinstance(value, str):
        raise errors.InvalidJob(f"{field} is {value!r}; give its name as text, package.module:factory")
    module, colon, factory = value.partition(":")
    named = bool(colon) and all(part.isidentifier() for part in [*module.split("."), factory])
    if value and not named:
        raise errors.InvalidJob(
            f"{field} {value!r} does not name a factory; write package.module:factory", program=value
        )


def _detail(field: str, value: object) -> dict[str, object]:
    """The error's details: the value, under the field's name without its owner's."""
    return {field.partition(" ")[0]: value}


__all__ = ["UINT32", "UINT64", "Instance", "Number", "OneOf", "flag", "program_name"]
