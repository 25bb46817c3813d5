"""Specifications of optimizers and schedules: classes that a job selects by name, with checked numeric parameters."""

import dataclasses
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from shoal._job.names import check_names
from shoal.errors import InvalidOptimizer


@dataclass(frozen=True)
class ValueRange:
    """The range of a hyperparameter.

    Attributes:
        description: description of the range for messages.
        test: returns whether a finite number is in the range.
    """

    description: str
    test: Callable[[float], bool]


_MAX_COUNT = 2**53  # numbers travel as doubles, which represent all whole numbers up to here
_TINY = 2.0**-126  # smallest normal float32; a kernel could round a smaller divisor to 0

NonNegative = Annotated[float, ValueRange("at least 0", lambda x: x >= 0)]
NonPositive = Annotated[float, ValueRange("at most 0", lambda x: x <= 0)]
Positive = Annotated[float, ValueRange("at least 2**-126", lambda x: x >= _TINY)]
Fraction = Annotated[float, ValueRange("at least 0 and below 1", lambda x: 0 <= x < 1)]
Factor = Annotated[float, ValueRange("above 0 and at most 1", lambda x: 0 < x <= 1)]
AtLeastOne = Annotated[float, ValueRange("at least 1", lambda x: x >= 1)]
Count = Annotated[int, ValueRange("a whole number from 0 to 2**53", lambda x: 0 <= x <= _MAX_COUNT)]
PositiveCount = Annotated[int, ValueRange("a whole number from 1 to 2**53", lambda x: 1 <= x <= _MAX_COUNT)]
Flag = Annotated[bool, ValueRange("true or false (1 or 0)", lambda x: x in {0, 1})]


@dataclass(frozen=True)
class Specification:
    """A schedule or an optimizer: a class that is selected by name and has numbers as parameters.

    A subclass with a `name` is registered with its kind. The constructor checks the fields with an `Annotated` type of
    this module, and converts them to Python numbers. The message carries them in a map, except for the fields in
    `separate_fields`.

    Attributes:
        kind: name of the kind, for error messages.
        registry: registered classes of the kind, by name.
        separate_fields: names of the fields that have their own field in the message.
        later_fields: names of flags that the message leaves out while they are off, so that earlier versions read it.
        advice: what to do instead of giving arguments that other libraries have, by name.
        name: name of the class in the registry and in messages.
    """

    kind: ClassVar[str]
    registry: ClassVar[dict[str, type[Any]]]
    separate_fields: ClassVar[frozenset[str]] = frozenset()
    later_fields: ClassVar[frozenset[str]] = frozenset()
    advice: ClassVar[dict[str, str]] = {}
    name: ClassVar[str]

    def __new__(cls, *_arguments: object, **options: object) -> Self:
        """Raises TypeError if an argument is unknown: see `check_names`."""
        check_names(f"shoal.optim.{cls.__name__}", options, inspect.signature(cls).parameters, advice=cls.advice)
        return super().__new__(cls)

    def __init_subclass__(cls, *, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            cls.name = name
            cls.registry[name] = cls

    def __post_init__(self) -> None:
        for key, number in self.checked(vars(self), self.name).items():
            object.__setattr__(self, key, number)

    @classmethod
    def checked(cls, values: Mapping[str, object], owner: str) -> dict[str, float]:
        """Checks values for this class, and converts them.

        Args:
            values: values of fields, by name. Those of fields that are no numbers are left out.
            owner: what the user gave the values to, for messages: the name of an optimizer or a schedule.

        Returns:
            The values as Python numbers.

        Raises:
            InvalidOptimizer: a value is no number, or is out of range.
        """
        return {
            key: _checked(f"{owner}: {key}", values[key], kind, value_range)
            for key, (kind, value_range) in _ranges(cls).items()
            if key in values
        }

    def numbers(self) -> dict[str, float]:
        """Returns the numbers in the message's map, by field name."""
        keys = [key for key in _ranges(type(self)) if key not in self.separate_fields]
        return {key: float(getattr(self, key)) for key in keys if key not in self.later_fields or getattr(self, key)}

    @classmethod
    def decoded(cls, name: str, values: Mapping[str, float], **separate_fields: Any) -> Self:
        """Creates the schedule or optimizer that a message describes.

        Args:
            name: name of the class.
            values: the message's map of numbers. Missing ones have their defaults.
            separate_fields: the fields that are not in the map.

        Raises:
            InvalidOptimizer: the name or a number is unknown, a required number is missing, or one is out of range.
        """
        if name not in cls.registry:
            raise InvalidOptimizer(f"unknown {cls.kind} {name!r}; choose one of {', '.join(sorted(cls.registry))}")
        member = cls.registry[name]
        keys = [key for key in _ranges(member) if key not in member.separate_fields]
        if unknown := sorted(set(separate_fields) - {item.name for item in dataclasses.fields(member)}):
            raise InvalidOptimizer(f"{name}: it takes no {', '.join(unknown)}; leave this out")
        if unknown := sorted(set(values) - set(keys)):
            raise InvalidOptimizer(f"{name}: unknown {', '.join(unknown)}; it takes {', '.join(keys) or 'no numbers'}")
        required = {item.name for item in dataclasses.fields(member) if item.default is dataclasses.MISSING}
        if missing := sorted(required.intersection(keys).difference(values)):
            raise InvalidOptimizer(f"{name}: {', '.join(missing)} is missing; give it a value")
        return typing.cast(Self, member(**values, **separate_fields))


# Type and range of each checked field of a class. They are slow to read, and each job has several specifications.
_known_ranges: dict[type[Specification], dict[str, tuple[type, ValueRange]]] = {}


def _ranges(cls: type[Specification]) -> dict[str, tuple[type, ValueRange]]:
    """Returns the type and the range of each checked field, by name, in field order."""
    if cls not in _known_ranges:
        _known_ranges[cls] = _read_ranges(cls)
    return _known_ranges[cls]


def _read_ranges(cls: type[Specification]) -> dict[str, tuple[type, ValueRange]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {item.name: typing.get_args(hints[item.name]) for item in dataclasses.fields(cls)}
    return {
        key: (args[0], args[1]) for key, args in found.items() if len(args) == 2 and isinstance(args[1], ValueRange)
    }


def _checked(where: str, value: object, kind: type, value_range: ValueRange) -> float:
    """Returns `value` as a float, int or bool. Raises InvalidOptimizer if it is not a number in the range."""
    try:
        fits = isinstance(value, numbers.Real) and math.isfinite(value) and value_range.test(float(value))
    except OverflowError:  # a whole number beyond all floats
        fits = False
    if (isinstance(value, bool) and kind is not bool) or not fits or (kind is not float and kind(value) != value):
        raise InvalidOptimizer(f"{where} is {value!r}; it must be finite and {value_range.description}")
    return typing.cast(float, kind(value))


def checked_number(where: str, value: object, kind: Any) -> float:
    """Returns a number as a Python number.

    Args:
        where: what the number is, for messages.
        value: the number.
        kind: its type: an `Annotated` type of this module.

    Raises:
        InvalidOptimizer: it is not a number in the range.
    """
    return _checked(where, value, *typing.get_args(kind))


def checked_list(where: str, values: object, kind: Any) -> tuple[Any, ...]:
    """Returns the numbers of a list as Python numbers.

    Args:
        where: what the list is, for messages.
        values: the list.
        kind: the type of each number: an `Annotated` type of this module.

    Raises:
        InvalidOptimizer: it is not a list of numbers in the range.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidOptimizer(f"{where} is {values!r}; give a tuple of numbers")
    return tuple(checked_number(f"a number of {where}", value, kind) for value in values)


__all__ = [
    "AtLeastOne",
    "Count",
    "Factor",
    "Flag",
    "Fraction",
    "NonNegative",
    "NonPositive",
    "Positive",
    "PositiveCount",
    "Specification",
    "checked_list",
    "checked_number",
]
