"""Learning-rate schedules, and the checked parameters that they share with optimizers."""

import dataclasses
import math
import numbers
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from shoal.errors import InvalidOptimizer
from shoal.v1 import job_pb2


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
        name: name of the class in the registry and in messages.
    """

    kind: ClassVar[str]
    registry: ClassVar[dict[str, type[Any]]]
    separate_fields: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str]

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
        return {key: float(getattr(self, key)) for key in _ranges(type(self)) if key not in self.separate_fields}

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
        keys = [key for key in _ranges(member) if key not in cls.separate_fields]
        if unknown := sorted(set(values) - set(keys)):
            raise InvalidOptimizer(f"{name}: unknown {', '.join(unknown)}; it takes {', '.join(keys) or 'no numbers'}")
        required = {item.name for item in dataclasses.fields(member) if item.default is dataclasses.MISSING}
        if missing := sorted(required.intersection(keys).difference(values)):
            raise InvalidOptimizer(f"{name}: {', '.join(missing)} is missing; give it a value")
        return typing.cast(Self, member(**values, **separate_fields))


def _ranges(cls: type[Specification]) -> dict[str, tuple[type, ValueRange]]:
    """Returns the type and the range of each checked field, by name, in field order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {item.name: typing.get_args(hints[item.name]) for item in dataclasses.fields(cls)}
    return {
        key: (args[0], args[1]) for key, args in found.items() if len(args) == 2 and isinstance(args[1], ValueRange)
    }


def _checked(where: str, value: object, kind: type, value_range: ValueRange) -> float:
    """Returns `value` as a float, int or bool. Raises InvalidOptimizer if it is not a number in the range."""
    fits = isinstance(value, numbers.Real) and math.isfinite(value) and value_range.test(float(value))
    if not fits or (kind is not float and kind(value) != value):
        raise InvalidOptimizer(f"{where} is {value!r}; it must be finite and {value_range.description}")
    return typing.cast(float, kind(value))


@dataclass(frozen=True)
class Schedule(Specification, ABC):
    """A learning rate as a function of the version v, the number of updates that the shard has applied so far.

    With `warmup_steps` w > 0, the rate first rises linearly (Goyal et al., 2017, arXiv:1706.02677):
    rate(v) = learning_rate * (v + 1) / w for v < w. After that, the schedule is computed with v - w.

    Args:
        learning_rate: initial rate of the schedule, >= 0.
        warmup_steps: number of updates of the warm-up, >= 0.

    Raises:
        InvalidOptimizer: a number is out of range or not finite.
    """

    kind: ClassVar[str] = "schedule"
    registry: ClassVar[dict[str, type[Any]]] = {}
    separate_fields: ClassVar[frozenset[str]] = frozenset({"warmup_steps"})

    learning_rate: NonNegative
    warmup_steps: Count = field(default=0, kw_only=True)

    def rate(self, version: int) -> float:
        """Returns the learning rate of the update from `version` to `version` + 1."""
        if version < self.warmup_steps:
            return self.learning_rate * (version + 1) / self.warmup_steps
        return self._after_warmup(version - self.warmup_steps)

    @abstractmethod
    def _after_warmup(self, version: int, /) -> float:
        """Returns the rate at `version`, counted from the end of the warm-up."""

    def to_proto(self) -> job_pb2.Schedule:
        """Returns the message that carries this schedule."""
        return job_pb2.Schedule(name=self.name, parameters=self.numbers(), warmup_steps=self.warmup_steps)

    @staticmethod
    def from_proto(message: job_pb2.Schedule) -> "Schedule":
        """Returns the schedule that a message carries.

        Raises:
            InvalidOptimizer: the name or a number is unknown, missing or out of range.
        """
        return Schedule.decoded(message.name, message.parameters, warmup_steps=message.warmup_steps)


@dataclass(frozen=True)
class ConstantLR(Schedule, name="constant"):
    """A constant learning rate: rate(v) = learning_rate.

    Args:
        learning_rate: 0 or more.
        warmup_steps: see `Schedule`.
    """

    def _after_warmup(self, _version: int, /) -> float:
        return self.learning_rate


@dataclass(frozen=True)
class StepLR(Schedule, name="step"):
    """A rate that drops at fixed intervals: learning_rate * gamma ** floor(v / step_size), as PyTorch's StepLR.

    Args:
        learning_rate: 0 or more.
        step_size: number of updates between two drops, >= 1.
        gamma: factor of each drop, in (0, 1].
        warmup_steps: see `Schedule`.
    """

    step_size: PositiveCount
    gamma: Factor = 0.1

    def _after_warmup(self, version: int, /) -> float:
        return self.learning_rate * self.gamma ** (version // self.step_size)


@dataclass(frozen=True)
class ExponentialLR(Schedule, name="exponential"):
    """A rate that decays exponentially: learning_rate * gamma ** v, as PyTorch's ExponentialLR.

    Args:
        learning_rate: 0 or more.
        gamma: factor of each update, in (0, 1].
        warmup_steps: see `Schedule`.
    """

    gamma: Factor

    def _after_warmup(self, version: int, /) -> float:
        return self.learning_rate * self.gamma**version


@dataclass(frozen=True)
class CosineLR(Schedule, name="cosine"):
    """A rate that falls along a cosine: SGDR without restarts (Loshchilov and Hutter, ICLR 2017, arXiv:1608.03983).

    rate(v) = minimum + (learning_rate - minimum) * (1 + cos(pi * v / steps)) / 2 for v < steps, and then `minimum`.
    PyTorch's CosineAnnealingLR is equal up to v = steps, and then rises again.

    Args:
        learning_rate: initial rate, not below `minimum`.
        steps: number of updates until the minimum, >= 1, without the warm-up.
        minimum: final rate, >= 0.
        warmup_steps: see `Schedule`.
    """

    steps: PositiveCount
    minimum: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimum > self.learning_rate:
            raise InvalidOptimizer(
                f"cosine: minimum {self.minimum} is above learning_rate {self.learning_rate}; choose a smaller minimum"
            )

    def _after_warmup(self, version: int, /) -> float:
        fallen = min(version / self.steps, 1.0)
        return self.minimum + (self.learning_rate - self.minimum) * (1 + math.cos(math.pi * fallen)) / 2
