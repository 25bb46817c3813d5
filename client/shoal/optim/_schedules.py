"""Learning rates as functions of a shard's version, and the named, ranged numbers that optimizers share with them."""

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
class Allowed:
    """Which finite numbers a hyperparameter may be: `test` decides, `words` say it."""

    words: str
    test: Callable[[float], bool]


_MAX_COUNT = 2**53  # numbers travel as doubles, which hold whole numbers up to here
_TINY = 2.0**-126  # float32's smallest normal number; less could round to 0 in a kernel that divides by it

NonNegative = Annotated[float, Allowed("at least 0", lambda x: x >= 0)]
NonPositive = Annotated[float, Allowed("at most 0", lambda x: x <= 0)]
Positive = Annotated[float, Allowed("at least 2**-126", lambda x: x >= _TINY)]
Fraction = Annotated[float, Allowed("at least 0 and below 1", lambda x: 0 <= x < 1)]
Factor = Annotated[float, Allowed("above 0 and at most 1", lambda x: 0 < x <= 1)]
Count = Annotated[int, Allowed("a whole number from 0 to 2**53", lambda x: 0 <= x <= _MAX_COUNT)]
PositiveCount = Annotated[int, Allowed("a whole number from 1 to 2**53", lambda x: 1 <= x <= _MAX_COUNT)]
Flag = Annotated[bool, Allowed("true or false (1 or 0)", lambda x: x in {0, 1})]


@dataclass(frozen=True)
class Specification:
    """Something that is chosen by name and described by numbers: a schedule, an optimizer.

    A subclass given a `name` enters its kind's registry. Its fields of the `Annotated` types above are checked, and
    made plain Python numbers, when it is constructed; those not in `apart` are the map of numbers that travels.

    Attributes:
        kind: what the registry holds, for error messages.
        known: the registry: name to class. Each kind has its own.
        apart: fields that have a place of their own in the kind's message.
        name: the class's name in the registry and on the wire.
    """

    kind: ClassVar[str]
    known: ClassVar[dict[str, type[Any]]]
    apart: ClassVar[frozenset[str]] = frozenset()
    name: ClassVar[str]

    def __init_subclass__(cls, *, name: str = "") -> None:
        super().__init_subclass__()
        if name:
            cls.name = name
            cls.known[name] = cls

    def __post_init__(self) -> None:
        for key, (kind, allowed) in _ranges(type(self)).items():
            object.__setattr__(self, key, _checked(f"{self.name}: {key}", getattr(self, key), kind, allowed))

    def numbers(self) -> dict[str, float]:
        """The numbers that travel, by field name."""
        return {key: float(getattr(self, key)) for key in _ranges(type(self)) if key not in self.apart}

    @classmethod
    def decoded(cls, name: str, values: Mapping[str, float], **apart: Any) -> Self:
        """The member of this kind called `name`, with `values` from the wire; those left out take their defaults.

        Raises:
            InvalidOptimizer: the name or a number is unknown, a required number is missing, or one is out of range.
        """
        if name not in cls.known:
            raise InvalidOptimizer(f"unknown {cls.kind} {name!r}; choose one of {', '.join(sorted(cls.known))}")
        member = cls.known[name]
        keys = [key for key in _ranges(member) if key not in cls.apart]
        if unknown := sorted(set(values) - set(keys)):
            raise InvalidOptimizer(f"{name}: unknown {', '.join(unknown)}; it takes {', '.join(keys) or 'no numbers'}")
        required = {item.name for item in dataclasses.fields(member) if item.default is dataclasses.MISSING}
        if missing := sorted(required.intersection(keys).difference(values)):
            raise InvalidOptimizer(f"{name}: {', '.join(missing)} is missing; give it a value")
        return typing.cast(Self, member(**values, **apart))


def _ranges(cls: type[Specification]) -> dict[str, tuple[type, Allowed]]:
    """The fields that are ranged numbers: name to (float, int or bool) and what is allowed, in field order."""
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {item.name: typing.get_args(hints[item.name]) for item in dataclasses.fields(cls)}
    return {key: (args[0], args[1]) for key, args in found.items() if len(args) == 2 and isinstance(args[1], Allowed)}


def _checked(where: str, value: object, kind: type, allowed: Allowed) -> float:
    """`value` as a plain float, int or bool; InvalidOptimizer if it is none or not allowed."""
    fits = isinstance(value, numbers.Real) and math.isfinite(value) and allowed.test(float(value))
    if not fits or (kind is not float and kind(value) != value):
        raise InvalidOptimizer(f"{where} is {value!r}; it must be finite and {allowed.words}")
    return typing.cast(float, kind(value))


@dataclass(frozen=True)
class Schedule(Specification, ABC):
    """A learning rate as a function of the version, the number of updates that the shard has applied before.

    With `warmup_steps` w > 0 the first w updates rise linearly (Goyal et al., 2017, arXiv:1706.02677):
    rate(v) = learning_rate * (v + 1) / w for v < w. The schedule proper starts at v = w, as if that were its 0.

    Args:
        learning_rate: where the schedule starts, >= 0.
        warmup_steps: updates, >= 0.

    Raises:
        InvalidOptimizer: a number is out of its range or not finite.
    """

    kind: ClassVar[str] = "schedule"
    known: ClassVar[dict[str, type[Any]]] = {}
    apart: ClassVar[frozenset[str]] = frozenset({"warmup_steps"})

    learning_rate: NonNegative
    warmup_steps: Count = field(default=0, kw_only=True)

    def rate(self, version: int) -> float:
        """The learning rate of the update that makes version + 1 of `version`."""
        if version < self.warmup_steps:
            return self.learning_rate * (version + 1) / self.warmup_steps
        return self._after_warmup(version - self.warmup_steps)

    @abstractmethod
    def _after_warmup(self, version: int, /) -> float:
        """The rate at `version`, counted from the end of the warm-up."""

    def to_proto(self) -> job_pb2.Schedule:
        """The schedule as it travels."""
        return job_pb2.Schedule(name=self.name, parameters=self.numbers(), warmup_steps=self.warmup_steps)

    @staticmethod
    def from_proto(message: job_pb2.Schedule) -> "Schedule":
        """The reverse of `to_proto`; InvalidOptimizer where the message is none of ours."""
        return Schedule.decoded(message.name, message.parameters, warmup_steps=message.warmup_steps)


@dataclass(frozen=True)
class ConstantLR(Schedule, name="constant"):
    """rate(v) = learning_rate: with a warm-up the only schedule that many jobs need.

    Args:
        learning_rate: >= 0.
        warmup_steps: see `Schedule`.
    """

    def _after_warmup(self, _version: int, /) -> float:
        return self.learning_rate


@dataclass(frozen=True)
class StepLR(Schedule, name="step"):
    """rate(v) = learning_rate * gamma ** floor(v / step_size), as PyTorch's StepLR.

    Args:
        learning_rate: >= 0.
        step_size: updates between two drops, >= 1.
        gamma: the factor of each drop, in (0, 1].
        warmup_steps: see `Schedule`.
    """

    step_size: PositiveCount
    gamma: Factor = 0.1

    def _after_warmup(self, version: int, /) -> float:
        return self.learning_rate * self.gamma ** (version // self.step_size)


@dataclass(frozen=True)
class ExponentialLR(Schedule, name="exponential"):
    """rate(v) = learning_rate * gamma ** v, as PyTorch's ExponentialLR.

    Args:
        learning_rate: >= 0.
        gamma: the factor of each update, in (0, 1].
        warmup_steps: see `Schedule`.
    """

    gamma: Factor

    def _after_warmup(self, version: int, /) -> float:
        return self.learning_rate * self.gamma**version


@dataclass(frozen=True)
class CosineLR(Schedule, name="cosine"):
    """rate(v) = minimum + (learning_rate - minimum) * (1 + cos(pi * v / steps)) / 2, and `minimum` from v = steps on.

    SGDR without its restarts (Loshchilov and Hutter, ICLR 2017, arXiv:1608.03983). PyTorch's CosineAnnealingLR is
    equal up to v = steps, and then rises again.

    Args:
        learning_rate: >= minimum.
        steps: updates to fall over, >= 1.
        minimum: where it ends, >= 0.
        warmup_steps: see `Schedule`; not counted in `steps`.
    """

    steps: PositiveCount
    minimum: NonNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.minimum > self.learning_rate:
            raise InvalidOptimizer(
                f"cosine: minimum {self.minimum} is above learning_rate {self.learning_rate}; the rate can only fall"
            )

    def _after_warmup(self, version: int, /) -> float:
        fallen = min(version / self.steps, 1.0)
        return self.minimum + (self.learning_rate - self.minimum) * (1 + math.cos(math.pi * fallen)) / 2
