"""Optimizers as users specify them: their equations and parameters. The servers have the code that applies them.

In the equations, x is a value, g is its gradient, and other letters are slots: state that the server keeps for each
value. lr is the schedule's rate at the shard's version, and t = version + 1. Defaults and results equal those of
PyTorch, and for FTRL those of Keras.

    optimizer = Adam(CosineLR(1e-3, steps=10_000, warmup_steps=500), weight_decay=1e-4)
    job = client.submit(shoal.Job("digits:Digits", optimizer=optimizer))
"""

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from shoal.errors import InvalidOptimizer
from shoal.optim._groups import VariableGroup, VariableSettings, checked_groups, group_of, unmatched_patterns
from shoal.optim._schedules import ConstantLR, Schedule
from shoal.optim._slots import Slot
from shoal.optim._specifications import Flag, Fraction, NonNegative, NonPositive, Positive, Specification, checked_list
from shoal.v1 import job_pb2


@dataclass(frozen=True)
class Optimizer(Specification):
    """The rule by which gradients change trainable variables: the base class of all optimizers.

    Weight decay is an L2 penalty: an update first sets g := g + weight_decay * x. For `AdamW` and `FTRL` it is
    decoupled: an update first sets x := x * (1 - lr * weight_decay), and g does not change.

    Args:
        learning_rate: a constant >= 0, or a `Schedule`.
        weight_decay: 0 or more.
        decay_exclude: shell-style, case-sensitive patterns for the names of variables without weight decay, such as
            ("*bias",).
        groups: settings of some variables, by patterns of their names: see `VariableGroup`. If several patterns match a
            variable, the first one counts. Each pattern must match a trainable variable of the job.
        clip_norm: largest global norm of the gradient, as in `torch.nn.utils.clip_grad_norm_`: an update multiplies the
            gradient g by min(1, clip_norm / (norm(g) + 1e-6)) before all else. The norm is that of all trainable
            variables together, without frozen ones. In synchronous mode g is the mean of the step, in the other modes
            the gradient of one push. With backup workers, all variables of the job are then on one server. 0 means no
            limit.
        lr: another name of the argument `learning_rate`; give one of the two. The attribute is `learning_rate`.

    Raises:
        InvalidOptimizer: a number is out of range or not finite, the patterns are not strings, or an argument is given
            under both of its names.
    """

    possible_slots: ClassVar[tuple[Slot, ...]] = ()  # in the order of checkpoints
    kind: ClassVar[str] = "optimizer"
    registry: ClassVar[dict[str, type[Any]]] = {}
    separate_fields: ClassVar[frozenset[str]] = frozenset({"weight_decay", "clip_norm"})
    advice: ClassVar[dict[str, str]] = {
        "maximize": "leave it out, and push the negative gradients",
        **dict.fromkeys(
            ("foreach", "fused", "capturable", "differentiable"), "leave it out: the servers choose the code"
        ),
    }

    learning_rate: float | Schedule = 1e-3
    weight_decay: NonNegative = field(default=0.0, kw_only=True)
    decay_exclude: tuple[str, ...] = field(default=(), kw_only=True)
    groups: Sequence[VariableGroup] = field(default=(), kw_only=True)
    clip_norm: NonNegative = field(default=0.0, kw_only=True)
    lr: InitVar[float | Schedule | None] = field(default=None, kw_only=True)

    def _refuse_both(self, alias: str, name: str) -> None:
        """Raises InvalidOptimizer if an argument with another name is given under this name, too."""
        # By identity: an argument that equals the default is another object.
        if getattr(self, name) is not getattr(type(self), name):
            raise InvalidOptimizer(
                f"{self.name}: {name} and {alias} are both given, and {alias} sets {name}; give only one of them"
            )

    def __post_init__(self, lr: float | Schedule | None) -> None:
        if lr is not None:
            self._refuse_both("lr", "learning_rate")
            object.__setattr__(self, "learning_rate", lr)
        super().__post_init__()
        if not isinstance(self.learning_rate, Schedule):
            ConstantLR.checked({"learning_rate": self.learning_rate}, self.name)
        object.__setattr__(self, "learning_rate", _simplified(self.schedule))
        object.__setattr__(self, "decay_exclude", _patterns(self.name, self.decay_exclude))
        object.__setattr__(self, "groups", checked_groups(self.name, self.groups))

    @property
    def schedule(self) -> Schedule:
        """The learning rate as a schedule, also if it is a constant."""
        return self.learning_rate if isinstance(self.learning_rate, Schedule) else ConstantLR(self.learning_rate)

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the slots that the servers keep for each trainable variable; see `OptimizerState`."""
        return tuple(it.name for it in self.possible_slots if not it.only_with or getattr(self, it.only_with))

    def initial(self, slot: str) -> float:
        """Returns the value of a slot's elements before the first update."""
        found = next(it for it in self.possible_slots if it.name == slot)
        return float(getattr(self, found.initial)) if found.initial else 0.0

    def rate(self, version: int) -> float:
        """Returns the learning rate of an update.

        Args:
            version: number of updates that the shard has applied before this update.
        """
        given = self.learning_rate
        return given.rate(version) if isinstance(given, Schedule) else given  # a new schedule per call is too slow

    def settings_of(self, variable: str) -> VariableSettings:
        """Returns the settings of the variable of this name.

        The weight decay is that of its group, if the group has one. Otherwise it is 0 if a pattern of `decay_exclude`
        matches, and else `weight_decay`.
        """
        group = group_of(self.groups, variable)
        if group and group.weight_decay is not None:
            return VariableSettings(group.rate, group.weight_decay)
        excluded = any(fnmatchcase(variable, pattern) for pattern in self.decay_exclude)
        return VariableSettings(group.rate if group else 1.0, 0.0 if excluded else self.weight_decay)

    def unmatched(self, variables: Iterable[str]) -> str:
        """Returns an error text if a group's pattern matches none of these trainable variables; otherwise ""."""
        return unmatched_patterns(self.groups, variables)

    def to_proto(self) -> job_pb2.Optimizer:
        """Returns the message that carries this optimizer."""
        return job_pb2.Optimizer(
            name=self.name,
            hyperparameters=self.numbers(),
            learning_rate=self.schedule.to_proto(),
            weight_decay=self.weight_decay,
            decay_exclude=self.decay_exclude,
            groups=[group.to_proto() for group in self.groups],
            clip_norm=self.clip_norm,
        )


def from_proto(message: job_pb2.Optimizer) -> Optimizer:
    """Returns the optimizer that a message carries. Missing hyperparameters have their defaults.

    Raises:
        InvalidOptimizer: the name, the schedule or a hyperparameter is unknown, missing or out of range.
    """
    rate = {"learning_rate": Schedule.from_proto(message.learning_rate)} if message.HasField("learning_rate") else {}
    return Optimizer.decoded(
        message.name,
        message.hyperparameters,
        weight_decay=message.weight_decay,
        decay_exclude=tuple(message.decay_exclude),
        groups=tuple(VariableGroup.from_proto(group) for group in message.groups),
        clip_norm=message.clip_norm,
        **rate,
    )


def _simplified(schedule: Schedule) -> float | Schedule:
    """Returns a number for a schedule that is constant, so that equal optimizers compare equal."""
    return schedule.learning_rate if schedule == ConstantLR(schedule.learning_rate) else schedule


def _patterns(name: str, patterns: Iterable[str]) -> tuple[str, ...]:
    # A single string is also iterable, and its letters would be taken as patterns.
    single = isinstance(patterns, str) or not isinstance(patterns, Iterable)
    kept = () if single else tuple(patterns)
    if single or not all(isinstance(pattern, str) for pattern in kept):
        raise InvalidOptimizer(f'{name}: decay_exclude is {patterns!r}; give a tuple of patterns, such as ("*bias",)')
    return kept


_NO_DAMPENING = "leave it out: the optimizer momentum (shoal.optim.Momentum) is that of PyTorch with dampening 0"


@dataclass(frozen=True)
class SGD(Optimizer, name="sgd"):
    """Stochastic gradient descent, without state.

        x := x - lr * g

    Args:
        learning_rate: see `Optimizer`, which also describes weight_decay and decay_exclude.
    """

    advice: ClassVar[dict[str, str]] = Optimizer.advice | {
        "momentum": "use the optimizer momentum: shoal.optim.Momentum(lr=..., momentum=...)",
        "nesterov": "use the optimizer momentum: shoal.optim.Momentum(lr=..., nesterov=True)",
        "dampening": _NO_DAMPENING,
    }


@dataclass(frozen=True)
class Momentum(Optimizer, name="momentum"):
    """Heavy-ball momentum (Polyak, 1964), or Nesterov's as in Sutskever et al., ICML 2013.

        s := momentum * s + g
        x := x - lr * s                       (nesterov: x - lr * (g + momentum * s))

    The results are those of PyTorch's SGD with dampening 0.

    Args:
        learning_rate: see `Optimizer`.
        momentum: in [0, 1); above 0 if nesterov is set.
        nesterov: whether to use Nesterov's momentum.
    """

    possible_slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum_buffer", "s"),)
    advice: ClassVar[dict[str, str]] = Optimizer.advice | {"dampening": _NO_DAMPENING}

    momentum: Fraction = 0.9
    nesterov: Flag = False

    def __post_init__(self, lr: float | Schedule | None) -> None:
        super().__post_init__(lr)
        if self.nesterov and not self.momentum:
            raise InvalidOptimizer("momentum: nesterov needs a momentum above 0; raise it, or use SGD")


@dataclass(frozen=True)
class Adagrad(Optimizer, name="adagrad"):
    """Adaptive subgradients (Duchi et al., JMLR 12, 2011).

        s := s + g ** 2
        x := x - lr * g / (sqrt(s) + eps)

    Args:
        learning_rate: see `Optimizer`.
        initial_accumulator_value: initial value of s, >= 0.
        eps: above 0.
    """

    possible_slots: ClassVar[tuple[Slot, ...]] = (
        Slot("accumulator", "s", initial="initial_accumulator_value", least=0.0),
    )
    advice: ClassVar[dict[str, str]] = Optimizer.advice | {
        "lr_decay": "leave it out, and give a schedule as the learning rate, such as shoal.optim.ExponentialLR"
    }

    learning_rate: float | Schedule = 1e-2
    initial_accumulator_value: NonNegative = 0.0
    eps: Positive = 1e-10


@dataclass(frozen=True)
class RMSProp(Optimizer, name="rmsprop"):
    """Root mean square propagation (Hinton, Coursera lecture 6.5, 2012); centered as in Graves, arXiv:1308.0850.

        s := alpha * s + (1 - alpha) * g ** 2
        a := alpha * a + (1 - alpha) * g      (centered only; else a = 0)
        b := momentum * b + g / (sqrt(s - a ** 2) + eps)
        x := x - lr * b

    If rounding makes s smaller than a ** 2, the difference counts as 0. PyTorch gives NaN in this case.

    Args:
        learning_rate: see `Optimizer`.
        alpha: smoothing factor, in [0, 1).
        eps: above 0.
        momentum: in [0, 1). With 0 there is no slot b.
        centered: whether to divide by the standard deviation instead of the root mean square.
        eps_under_root: whether to divide by sqrt(s - a ** 2 + eps), as Keras does.
    """

    possible_slots: ClassVar[tuple[Slot, ...]] = (
        Slot("square_avg", "s", least=0.0),
        Slot("grad_avg", "a", only_with="centered"),
        Slot("momentum_buffer", "b", only_with="momentum"),
    )
    later_fields: ClassVar[frozenset[str]] = frozenset({"eps_under_root"})

    learning_rate: float | Schedule = 1e-2
    alpha: Fraction = 0.99
    eps: Positive = 1e-8
    momentum: Fraction = 0.0
    centered: Flag = False
    eps_under_root: Flag = False


@dataclass(frozen=True)
class Adam(Optimizer, name="adam"):
    """Adaptive moments (Kingma and Ba, ICLR 2015, arXiv:1412.6980).

        m := beta1 * m + (1 - beta1) * g
        v := beta2 * v + (1 - beta2) * g ** 2
        x := x - lr / (1 - beta1 ** t) * m / (sqrt(v / (1 - beta2 ** t)) + eps)

    Args:
        learning_rate: see `Optimizer`.
        beta1: in [0, 1).
        beta2: in [0, 1).
        eps: above 0.
        eps_uncorrected: whether to add eps to sqrt(v) instead of sqrt(v / (1 - beta2 ** t)), as Keras and section 2 of
            the paper do. The update is then x - lr * sqrt(1 - beta2 ** t) / (1 - beta1 ** t) * m / (sqrt(v) + eps).
        betas: (beta1, beta2), instead of the arguments `beta1` and `beta2`. The attributes are `beta1` and `beta2`.
    """

    possible_slots: ClassVar[tuple[Slot, ...]] = (Slot("exp_avg", "m"), Slot("exp_avg_sq", "v", least=0.0))
    later_fields: ClassVar[frozenset[str]] = frozenset({"eps_uncorrected"})
    advice: ClassVar[dict[str, str]] = Optimizer.advice | {
        "amsgrad": "leave it out: Shoal has no AMSGrad",
        "decoupled_weight_decay": "leave it out, and use the optimizer adamw: shoal.optim.AdamW",
    }

    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    eps: Positive = 1e-8
    eps_uncorrected: Flag = False
    betas: InitVar[tuple[float, float] | None] = field(default=None, kw_only=True)

    def __post_init__(self, lr: float | Schedule | None, betas: tuple[float, float] | None) -> None:
        if betas is not None:
            both = checked_list(f"{self.name}: betas", betas, Fraction)
            if len(both) != 2:
                raise InvalidOptimizer(f"{self.name}: betas is {betas!r}; give two numbers, such as (0.9, 0.999)")
            for name, value in zip(("beta1", "beta2"), both, strict=True):
                self._refuse_both("betas", name)
                object.__setattr__(self, name, value)
        super().__post_init__(lr)


@dataclass(frozen=True)
class AdamW(Adam, name="adamw"):
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, arXiv:1711.05101).

    The update is x := x * (1 - lr * weight_decay), followed by the update of `Adam`.
    """

    weight_decay: NonNegative = field(default=1e-2, kw_only=True)


@dataclass(frozen=True)
class FTRL(Optimizer, name="ftrl"):
    """Follow the regularized leader, proximal (McMahan et al., KDD 2013), as in Keras; p = -learning_rate_power.

        n' := n + g ** 2
        z := z + g + 2 * l2_shrinkage * x - (n' ** p - n ** p) / lr * x
        x := (clip(z, -l1, l1) - z) / ((beta + n' ** p) / lr + 2 * l2)

    The new x depends on the slots only; the initial value of x has an effect through the last term of z. If the
    schedule's rate is 0, an update changes nothing.

    Args:
        learning_rate: see `Optimizer`. Use a schedule with small changes only, because z includes past rates.
        learning_rate_power: <= 0. -0.5 is the fastest to compute.
        initial_accumulator_value: initial value of n, > 0.
        l1: L1 penalty, >= 0. Above 0, values can become exactly 0.
        l2: L2 penalty on the values, >= 0.
        l2_shrinkage: L2 penalty that does not enter the accumulator n, >= 0.
        beta: beta of the paper's per-coordinate learning rates, >= 0.
    """

    possible_slots: ClassVar[tuple[Slot, ...]] = (
        Slot("accumulator", "n", initial="initial_accumulator_value", least=0.0),
        Slot("linear", "z"),
    )

    learning_rate_power: NonPositive = -0.5
    initial_accumulator_value: Positive = 0.1
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    l2_shrinkage: NonNegative = 0.0
    beta: NonNegative = 0.0


__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Momentum",
    "Optimizer",
    "RMSProp",
    "from_proto",
]
