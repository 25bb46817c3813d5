"""Descriptions of the fields of a job and of its policies, and what is derived from them.

A field of a dataclass carries one in its metadata:

    epochs: int = field(
        default=1,
        metadata=described(Number(1, UINT32), Option("Passes over the data set."), Scalar(zero_is_default=True)),
    )

`check`, `encode`, `decode` and `told` below read descriptions, as does `shoal._cli.job_options`; none of them names a
field. A description says nothing about what a field does.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shoal._job.codecs import Codec, Scalar

_KEY = "shoal.description"
_Message = TypeVar("_Message")

# Raises InvalidJob if a value is not allowed. The first argument names the field in the message.
Check = Callable[[str, object], None]


@dataclass(frozen=True)
class Option:
    """An option of `shoal submit` that sets a field.

    Attributes:
        help: what the option does, and its unit. The command line adds the default.
        flags: its long name and perhaps a short one. Empty: the field's name, with dashes. A name without dashes is
            that of an argument.
        metavar: what stands for its value in the help. Empty: the name of its type.
        takes: the type of what is given. None: the field's own.
        read: makes the field's value of what is given, as `takes` has it. None: it is the value.
        default: what is given if the option is left out. None: the field's default.
        turns_off: the option is a switch that makes the field False.
    """

    help: str
    flags: Sequence[str] = ()
    metavar: str = ""
    takes: Any = None
    read: Callable[[Any], Any] | None = None
    default: Any = None
    turns_off: bool = False


@dataclass(frozen=True)
class OptionGroup:
    """Options of `shoal submit` for a field that holds a policy: those of the policy's own fields.

    Attributes:
        kind: the policy, a dataclass with descriptions.
        made: makes the policy of the options that were given, by field, or None if they ask for none.
    """

    kind: type[Any]
    made: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class JsonField:
    """How a field appears in the JSON of a job.

    Attributes:
        key: its name there. Empty: the field's.
        value: makes the JSON value of the field's owner. None: the field's value, as it is.
        label: what the page calls it. Empty: the field's name, in words. None: the page does not show it.
        shown: makes what the page shows, if not the JSON value, of the field's owner.
    """

    key: str = ""
    value: Callable[[Any], Any] | None = None
    label: str | None = ""
    shown: Callable[[Any], Any] | None = None

    def of(self, name: str, owner: Any) -> Any:
        """Returns the JSON value of the field `name`."""
        return self.value(owner) if self.value else getattr(owner, name)


@dataclass(frozen=True)
class FieldDescription:
    """What is said about one field.

    Attributes:
        check: which values the field may have. None: whatever its owner's own checks allow.
        option: how `shoal submit` sets it. None: only Python can.
        codec: how it travels.
        told: how it appears in JSON. None: it does not.
    """

    check: Check | None
    option: Option | OptionGroup | None
    codec: Codec
    told: JsonField | None


# Most fields travel and are told as they are.
_PLAIN, _AS_IT_IS = Scalar(), JsonField()


def described(
    check: Check | None,
    option: Option | OptionGroup | None,
    codec: Codec = _PLAIN,
    *,
    told: JsonField | None = _AS_IT_IS,
) -> Mapping[str, FieldDescription]:
    """Returns the metadata of a field with this description; see `FieldDescription`."""
    return {_KEY: FieldDescription(check, option, codec, told)}


def descriptions(kind: type[Any]) -> Mapping[str, FieldDescription]:
    """Returns the descriptions of a dataclass's fields by name, in the order of the fields.

    Raises:
        TypeError: a field has none.
    """
    fields = dataclasses.fields(kind)
    if bare := [field.name for field in fields if _KEY not in field.metadata]:
        raise TypeError(f"{kind.__name__} does not describe {', '.join(bare)}: set metadata=described(...)")
    return {field.name: field.metadata[_KEY] for field in fields}


def check(owner: Any, of: str = "") -> None:
    """Checks each field of `owner` by its description.

    Args:
        owner: a dataclass with descriptions.
        of: what the owner is to its job, for the message: "checkpoints".

    Raises:
        InvalidJob: a value is not allowed; the message names the field.
    """
    for name, each in descriptions(type(owner)).items():
        if each.check is not None:
            each.check(f"{name} of {of}" if of else name, getattr(owner, name))


def encode(owner: Any, message: Callable[..., _Message]) -> _Message:
    """Returns the message that carries all fields of `owner`."""
    values: dict[str, Any] = {}
    for name, each in descriptions(type(owner)).items():
        values.update(each.codec.encode(name, owner))
    return message(**values)


def decode(kind: type[Any], message: Any) -> dict[str, Any]:
    """Returns the fields of a `kind` that a message carries, by name; those left out have their defaults.

    Raises:
        InvalidJob, InvalidOptimizer: a value on the wire has no meaning.
    """
    values: dict[str, Any] = {}
    for name, each in descriptions(kind).items():
        values.update(each.codec.decode(name, message))
    return values


def told(owner: Any) -> dict[str, Any]:
    """Returns the JSON of the fields of `owner` that have one, in the order of the fields."""
    found = {}
    for name, each in descriptions(type(owner)).items():
        if each.told is not None:
            found[each.told.key or name] = each.told.of(name, owner)
    return found


def shown(owner: Any) -> list[tuple[str, Any]]:
    """Returns the labels and values that a page shows of `owner`, in the order of the fields."""
    return [
        (
            each.told.label or name.replace("_", " ").capitalize(),
            (each.told.shown or partial(each.told.of, name))(owner),
        )
        for name, each in descriptions(type(owner)).items()
        if each.told is not None and each.told.label is not None
    ]


__all__ = [
    "Check",
    "FieldDescription",
    "JsonField",
    "Option",
    "OptionGroup",
    "check",
    "decode",
    "described",
    "descriptions",
    "encode",
    "shown",
    "told",
]
