"""Settings of an optimizer for some variables, which patterns of names select."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from shoal._job.names import advising
from shoal.errors import InvalidOptimizer
from shoal.optim._specifications import Flag, NonNegative, checked_number
from shoal.v1 import job_pb2


@dataclass(frozen=True, slots=True)
class VariableSettings:
    """The settings that apply to one variable.

    Attributes:
        rate: factor of the learning rate. 0 means that the variable is frozen.
        weight_decay: the weight decay.
    """

    rate: float
    weight_decay: float


_AS_FACTOR = "give rate, a factor of the optimizer's learning rate"


@advising("shoal.optim.VariableGroup", advice={"lr": _AS_FACTOR, "learning_rate": _AS_FACTOR})
@dataclass(frozen=True)
class VariableGroup:
    """Settings for the variables whose names match a pattern.

        frozen, fast = VariableGroup("embed/*", frozen=True), VariableGroup("head/*", rate=10)
        optimizer = SGD(0.1, groups=[frozen, fast, VariableGroup("*bias", weight_decay=0)])

    Args:
        pattern: shell-style, case-sensitive pattern of variable names, such as "*bias".
        rate: factor of the learning rate, >= 0. 0 freezes the variables.
        weight_decay: weight decay, >= 0. None means the optimizer's own.
        frozen: whether updates leave the variables and their slots alone, as with the rate 0. Pushes still carry
            gradients for them, which have no effect and do not count in the norm of `clip_norm`.

    Raises:
        InvalidOptimizer: the pattern is not a string, a number is out of range, or a frozen group has a rate.
    """

    pattern: str
    rate: float = 1.0
    weight_decay: float | None = None
    frozen: bool = False

    def __post_init__(self) -> None:
        pattern: object = self.pattern
        if not isinstance(pattern, str) or not pattern:
            raise InvalidOptimizer(f"the pattern of a group is {pattern!r}; give a pattern of names, such as '*bias'")
        self._check("rate", NonNegative)
        if self.weight_decay is not None:
            self._check("weight_decay", NonNegative)
        self._check("frozen", Flag)
        if self.frozen and self.rate not in {0.0, 1.0}:
            raise InvalidOptimizer(f"group {self.pattern!r} is frozen, but has rate {self.rate}; leave one of them out")
        is_frozen = self.frozen or self.rate == 0
        object.__setattr__(self, "frozen", is_frozen)
        if is_frozen:
            object.__setattr__(self, "rate", 0.0)

    def _check(self, name: str, kind: Any) -> None:
        """Checks a number, and makes it a Python number."""
        number = checked_number(f"group {self.pattern!r}: {name}", getattr(self, name), kind)
        object.__setattr__(self, name, number)

    def to_proto(self) -> job_pb2.OptimizerGroup:
        """Returns the message that carries this group."""
        return job_pb2.OptimizerGroup(pattern=self.pattern, rate=self.rate, weight_decay=self.weight_decay)

    @classmethod
    def from_proto(cls, message: job_pb2.OptimizerGroup) -> "VariableGroup":
        """Returns the group that a message carries.

        Raises:
            InvalidOptimizer: see the constructor.
        """
        decay = message.weight_decay if message.HasField("weight_decay") else None
        return cls(message.pattern, message.rate if message.HasField("rate") else 1.0, decay)


def checked_groups(optimizer: str, groups: object) -> tuple[VariableGroup, ...]:
    """Returns groups as a tuple.

    Raises:
        InvalidOptimizer: it is not an iterable of groups.
    """
    kept = tuple(groups) if isinstance(groups, Iterable) and not isinstance(groups, str) else (groups,)
    for group in kept:
        if not isinstance(group, VariableGroup):
            raise InvalidOptimizer(
                f"{optimizer}: groups has {group!r}; give a list of shoal.optim.VariableGroup, such as "
                'VariableGroup("*bias", weight_decay=0)'
            )
    return kept


def group_of(groups: Iterable[VariableGroup], variable: str) -> VariableGroup | None:
    """Returns the first group whose pattern matches the name of the variable, or None."""
    return next((group for group in groups if fnmatchcase(variable, group.pattern)), None)


def unmatched_patterns(groups: Iterable[VariableGroup], variables: Iterable[str]) -> str:
    """Returns an error text if the patterns of some groups match no variable; otherwise "".

    Args:
        groups: groups of an optimizer.
        variables: names of all trainable variables.
    """
    names = [*variables]
    idle = [group.pattern for group in groups if not any(fnmatchcase(name, group.pattern) for name in names)]
    if not idle:
        return ""
    shown = ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return (
        f"the optimizer has a group for {', '.join(map(repr, idle[:_SHOWN]))}, which matches no trainable variable; "
        f"correct the pattern, or leave the group out. The trainable variables are {shown or 'none'}"
    )


_SHOWN = 20

__all__ = ["VariableGroup", "VariableSettings", "checked_groups", "group_of", "unmatched_patterns"]
