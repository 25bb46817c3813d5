"""Descriptions of the fields of a job and its policies, and the functions that use them.

The metadata of a dataclass field contains its description:

    epochs: int = field(
        default=1,
        metadata=field_metadata(Number(1, UINT32), Option("Passes over the data set."), Scalar(zero_is_default=True)),
    )

`check`, `encode`, `decode`, `to_json` and `labelled_values` read descriptions, and so does `shoal._cli.job_options`.
None of these functions names a field.
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
FieldCheck = Callable[[str, object], None]


@dataclass(frozen=True)
class Option:
    """An option of `shoal submit` that sets a field.

    Attributes:
        help: what the option does, and its unit. The command line adds the default.
        flags: long name of the option, and a short one if it has one. A name without dashes makes it an argument.
            Empty means the field's name, with dashes.
        metavar: placeholder of the value in the help. "" means the name of the type.
        takes: type of the option's value. None means the type of the field.
        read: converts the option's value to the field's value. None means that they are equal.
        default: value of an option that is left out. None means the field's default.
        turns_off: whether the option is a switch that sets the field to False.
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
    """The options of `shoal submit` for a field that holds a policy: the options of the policy's fields.

    Attributes:
        kind: class of the policy, a dataclass with descriptions.
        build: returns the policy for the given options, by field, or None without a policy.
    """

    kind: type[Any]
    build: Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class JsonField:
    """The entry of a field in the JSON of a job.

    Attributes:
        key: key of the entry. "" means the field's name.
        value: returns the JSON value for the field's owner. None means the field's value, unchanged.
        label: label of the field on the page. "" means the field's name in words. None means that the page does not
            show it.
        shown: returns the value that the page shows, for the field's owner. None means the JSON value.
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
    """The description of one field.

    Attributes:
        check: the check of its value. None means that only the owner checks it.
        option: its option of `shoal submit`. None means that it can only be set in Python.
        codec: its conversion to a message and back.
        json: its entry in the JSON. None means that it has no entry.
    """

    check: FieldCheck | None
    option: Option | OptionGroup | None
    codec: Codec
    json: JsonField | None


# Most fields are the same in the message and in the JSON.
_PLAIN, _AS_IT_IS = Scalar(), JsonField()


def field_metadata(
    check: FieldCheck | None,
    option: Option | OptionGroup | None,
    codec: Codec = _PLAIN,
    *,
    json: JsonField | None = _AS_IT_IS,
) -> Mapping[str, FieldDescription]:
    """Returns the metadata of a field with a description.

    Args:
        check: see `FieldDescription`, as for all arguments.
        option: its option.
        codec: its codec.
        json: its entry in the JSON.
    """
    return {_KEY: FieldDescription(check, option, codec, json)}


def descriptions(kind: type[Any]) -> Mapping[str, FieldDescription]:
    """Returns the descriptions of a dataclass's fields by name, in the order of the fields.

    Raises:
        TypeError: a field has no description.
    """
    fields = dataclasses.fields(kind)
    if bare := [field.name for field in fields if _KEY not in field.metadata]:
        raise TypeError(f"{kind.__name__} does not describe {', '.join(bare)}; set metadata=field_metadata(...)")
    return {field.name: field.metadata[_KEY] for field in fields}


def check(owner: Any, of: str = "") -> None:
    """Checks each field of `owner` by its description.

    Args:
        owner: a dataclass with descriptions.
        of: name of the owner's field in the job, for the message, such as "checkpoints".

    Raises:
        InvalidJob: a value is not allowed. The message names the field.
    """
    for name, each in descriptions(type(owner)).items():
        if each.check is not None:
            each.check(f"{name} of {of}" if of else name, getattr(owner, name))


def encode(owner: Any, message: Callable[..., _Message]) -> _Message:
    """Returns the message that carries all fields of `owner`.

    Args:
        owner: a dataclass with descriptions.
        message: class of the message.
    """
    values: dict[str, Any] = {}
    for name, each in descriptions(type(owner)).items():
        values.update(each.codec.encode(name, owner))
    return message(**values)


def decode(kind: type[Any], message: Any) -> dict[str, Any]:
    """Returns the fields that a message carries, by name. A field that is left out has its default.

    Args:
        kind: a dataclass with descriptions.
        message: the message.

    Raises:
        InvalidJob, InvalidOptimizer: a value in the message is not valid.
    """
    values: dict[str, Any] = {}
    for name, each in descriptions(kind).items():
        values.update(each.codec.decode(name, message))
    return values


def to_json(owner: Any) -> dict[str, Any]:
    """Returns the JSON entries of the fields of `owner`, in the order of the fields."""
    found = {}
    for name, each in descriptions(type(owner)).items():
        if each.json is not None:
            found[each.json.key or name] = each.json.of(name, owner)
    return found


def labelled_values(owner: Any) -> list[tuple[str, Any]]:
    """Returns the labels and values of `owner` that the page shows, in the order of the fields."""
    return [
        (
            each.json.label or name.replace("_", " ").capitalize(),
            (each.json.shown or partial(each.json.of, name))(owner),
        )
        for name, each in descriptions(type(owner)).items()
        if each.json is not None and each.json.label is not None
    ]


__all__ = [
    "FieldCheck",
    "FieldDescription",
    "JsonField",
    "Option",
    "OptionGroup",
    "check",
    "decode",
    "descriptions",
    "encode",
    "field_metadata",
    "labelled_values",
    "to_json",
]
