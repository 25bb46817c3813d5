"""Optimizers applied in the worker's process, for strategies without servers: to NumPy or CuPy arrays, in place.

The equations and the names of the slots are those of `shoal.optim`, whose optimizers the servers apply with kernels of
their own. Tests compare both.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal import errors, optim
from shoal.optim import VariableSettings
from shoal.program import Array
from shoal_distribute.tensor_parallel import PartGroup, SplitArray
from shoal_worker.arrays import namespace_of

_TINY = 1e-6  # as in PyTorch: a norm of 0 divides nothing

_CLIPPING = "_shoal_distribute_clipping"  # the attribute of an optimizer that has its `GradientClipping`

# Arrays of one variable by slot name.
State = MutableMapping[str, Array]
# An update of one variable in place: value, gradient, slots, rate, version, settings.
_Update = Callable[[Any, Array, Array, State, float, int, float], None]


@dataclass(frozen=True)
class GradientClipping:
    """Limits of the gradient of each variable, as Keras' optimizers have them. `clip_norm` of `shoal.optim` is another.

    Attributes:
        norm: largest norm of a gradient; 0 means no limit.
        value: largest absolute value of an element; 0 means no limit.
    """

    norm: float = 0.0
    value: float = 0.0

    def set_for(self, optimizer: optim.Optimizer) -> None:
        """Makes the updates of an optimizer, and of its copies, apply the limits. Messages to servers lack them."""
        object.__setattr__(optimizer, _CLIPPING, self)  # specifications are frozen

    @staticmethod
    def of(optimizer: optim.Optimizer) -> "GradientClipping | None":
        """Returns the limits of an optimizer; None if it has none."""
        found: GradientClipping | None = getattr(optimizer, _CLIPPING, None)
        return found

    def applied(self, gradient: Array, norm: float) -> Array:
        """Returns a gradient, or a part of it, within the limits.

        Args:
            gradient: the gradient.
            norm: the norm of the whole gradient.
        """
        number = gradient.dtype.type
        if self.norm and norm > self.norm:
            gradient = gradient * number(self.norm / norm)
        if self.value:
            gradient = namespace_of(gradient).clip(gradient, number(-self.value), number(self.value))
        return gradient


class LocalOptimizer:
    """One replica's slots of an optimizer, and its updates.

    Args:
        optimizer: the optimizer, from `shoal.optim`.

    Attributes:
        optimizer: the optimizer.
        version: number of updates so far.
        learning_rate: replaces the optimizer's schedule; None keeps it.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        if type(optimizer) not in _UPDATES:
            raise errors.InvalidOptimizer(f"{optimizer!r} is not an optimizer of shoal.optim; give one of its classes")
        self.optimizer = optimizer
        self.version = 0
        self.learning_rate: optim.Schedule | None = None
        self._schedule = optimizer.schedule  # built once: an optimizer builds and checks it at each access
        self._settings: dict[str, VariableSettings] = {}  # by variable: patterns of names take long to match
        self._slots: dict[str, State] = {}
        self._restored: dict[str, State] = {}  # slots that go to the devices of their variables with the next update
        self._put: Callable[[Array], Array] = _same

    def update(self, gradients: Sequence[tuple[str, Array, Array]], square: float | None = None) -> None:
        """Applies the gradients of one step, in place.

        Args:
            gradients: (name, value, gradient) of each variable; both arrays have one shape, dtype and device, or are
                split in the same way.
            square: what `clip_norm` takes for the square of the norm, if these are a part of the gradients; None means
                `square_of` these.
        """
        entries = self._entries(gradients)
        factor = self._clip_factor(self._square_of(entries) if square is None else square)
        rate = (self.learning_rate or self._schedule).rate(self.version)
        change, limits = _UPDATES[type(self.optimizer)], GradientClipping.of(self.optimizer)
        entries = entries if limits is None else [_limited(it, limits) for it in entries]

        def changed(it: _Entry) -> None:
            clipped = it.gradient if factor is None else it.gradient * it.value.dtype.type(factor)
            own = it.settings
            change(self.optimizer, it.value, clipped, it.slots, rate * own.rate, self.version, own.weight_decay)

        _on_devices(changed, entries)
        self.version += 1

    def square_of(self, gradients: Sequence[tuple[str, Array, Array]]) -> float:
        """Returns the square of the norm that `clip_norm` limits; 0 without a limit.

        Args:
            gradients: see `update`.
        """
        return self._square_of(self._entries(gradients))

    def state(self) -> dict[str, Array]:
        """Returns the slots, by "variable/slot"."""
        return _by_path(self._slots | self._restored)

    def updated_state(self) -> dict[str, Array]:
        """Returns the slots of the variables that have been updated since the last `restore`, by "variable/slot"."""
        return _by_path(self._slots)

    def restore(self, version: int, state: Mapping[str, Array], put: Callable[[Array], Array] | None = None) -> None:
        """Sets the number of updates and the slots.

        Args:
            version: number of updates so far.
            state: as `state` returns it. The optimizer keeps the arrays.
            put: returns an array on the replica's device; None if they are there. Slots of variables that are split
                go to the devices of their variables instead.

        Raises:
            IncompatibleCheckpoint: the state is that of another kind of optimizer. Nothing has changed.
        """
        restored: dict[str, State] = {}
        for path, array in state.items():
            name, _, slot = path.rpartition("/")
            restored.setdefault(name, {})[slot] = array
        keeps = sorted(_SLOTS[type(self.optimizer)](self.optimizer))
        for name, slots in restored.items():
            if sorted(slots) != keeps:
                raise errors.IncompatibleCheckpoint(
                    f"the state of an optimizer has {', '.join(sorted(slots))} of {name}, but {self.optimizer.name} "
                    f"keeps {', '.join(keeps) or 'nothing'}; use an optimizer of the kind that was saved"
                )
        self.version, self._slots, self._restored, self._put = version, {}, restored, put or _same

    def keeps(self, name: str) -> bool:
        """Returns whether it has the slots of a variable."""
        return name in self._slots or name in self._restored

    def take(self, name: str) -> State | None:
        """Removes and returns the slots of a variable; None if it has none."""
        return self._slots.pop(name, None) or self._restored.pop(name, None)

    def give(self, name: str, slots: State) -> None:
        """Sets the slots of a variable, which are on its device."""
        self._slots[name] = slots

    def _settings_of(self, name: str) -> VariableSettings:
        if name not in self._settings:
            self._settings[name] = self.optimizer.settings_of(name)
        return self._settings[name]

    def _slots_of(self, name: str, value: Array) -> State:
        if restored := self._restored.pop(name, None):
            put = value.like if isinstance(value, SplitArray) else self._put
            self._slots[name] = {slot: put(array) for slot, array in restored.items()}
        if name not in self._slots:
            initial = _SLOTS[type(self.optimizer)](self.optimizer)
            self._slots[name] = {slot: _full_like(value, start) for slot, start in initial.items()}
        return self._slots[name]

    def _entries(self, gradients: Sequence[tuple[str, Array, Array]]) -> "list[_Entry]":
        """Returns what the update of each variable needs. Variables that do not learn are left out."""
        return [
            _Entry(value, gradient, self._slots_of(name, value), own)
            for name, value, gradient in gradients
            if (own := self._settings_of(name)).rate != 0
        ]

    def _square_of(self, entries: "Sequence[_Entry]") -> float:
        if not self.optimizer.clip_norm:
            return 0.0
        return _squares(entries)

    def _clip_factor(self, square: float) -> float | None:
        """Returns what `clip_norm` multiplies the gradients with; None if it leaves them alone."""
        limit = self.optimizer.clip_norm
        factor = limit / (math.sqrt(square) + _TINY) if limit else 1.0
        return factor if factor < 1 else None


@dataclass(frozen=True)
class _Entry:
    """What an update of one variable needs, or of one part of a variable that is split.

    Attributes:
        value: the value.
        gradient: its gradient.
        slots: its slots.
        settings: its settings.
    """

    value: Array
    gradient: Array
    slots: State
    settings: VariableSettings

    @property
    def group(self) -> PartGroup | None:
        """What has the parts; None if the variable is not split."""
        return self.value.group if isinstance(self.value, SplitArray) else None

    def part(self, number: int) -> "_Entry":
        """Returns one of the parts of this process."""
        slots = {slot: array.parts[number] for slot, array in self.slots.items()}
        return _Entry(self.value.parts[number], self.gradient.parts[number], slots, self.settings)


def _limited(entry: _Entry, limits: GradientClipping) -> _Entry:
    """Returns a variable with its gradient within the limits. The norm is that of all parts."""
    norm = math.sqrt(_squares([entry])) if limits.norm else 0.0
    gradient = entry.gradient
    if isinstance(gradient, SplitArray):
        return replace(entry, gradient=gradient.mapped(lambda part: limits.applied(part, norm)))
    return replace(entry, gradient=limits.applied(gradient, norm))


def _squares(entries: Sequence[_Entry]) -> float:
    """Returns the sum of the squares of all gradients, over all parts."""
    return math.fsum(
        number
        for group, squares in _on_devices(lambda it: _square(it.gradient), entries).items()
        for number in (squares if group is None else group.numbers(squares))
    )


def _on_devices(function: Callable[[_Entry], Any], entries: Sequence[_Entry]) -> dict[PartGroup | None, list[Any]]:
    """Calls a function with each variable, or with each part in this process, and returns the results by group.

    Args:
        function: the function. Optimizers change each element on its own, so parts need nothing of each other.
        entries: the variables.
    """
    own: dict[PartGroup | None, list[_Entry]] = {}
    for entry in entries:
        own.setdefault(entry.group, []).append(entry)
    return {
        group: [function(it) for it in chosen] if group is None else _on_group(group, function, chosen)
        for group, chosen in own.items()
    }


def _on_group(group: PartGroup, function: Callable[[_Entry], Any], entries: Sequence[_Entry]) -> list[Any]:
    found = group.map(lambda _, number: [function(it.part(number)) for it in entries], range(len(group.devices)))
    return [result for results in found for result in results]


def _by_path(kept: Mapping[str, State]) -> dict[str, Array]:
    return {f"{name}/{slot}": array for name, slots in kept.items() for slot, array in slots.items()}


def _full_like(value: Array, start: float) -> Array:
    if isinstance(value, SplitArray):
        return value.mapped(lambda part: _full_like(part, start))
    return namespace_of(value).full(value.shape, start, value.dtype)


def _same(array: Array) -> Array:
    return array


def slots_of(optimizer: optim.Optimizer) -> int:
    """Returns the number of slots of each variable."""
    return len(_SLOTS[type(optimizer)](optimizer))


def _square(gradient: Array) -> float:
    """Returns the sum of the squares, in float64."""
    flat = gradient.reshape(-1)
    return float((flat.astype("float64", copy=False) ** 2).sum())


def _sgd(_spec: Any, x: Array, g: Array, _slots: State, rate: float, _version: int, decay: float) -> None:
    x -= _scaled(x, rate, _coupled(g, x, decay))


def _momentum(spec: optim.Momentum, x: Array, g: Array, slots: State, rate: float, _version: int, decay: float) -> None:
    slope, s = _coupled(g, x, decay), slots["momentum_buffer"]
    s *= s.dtype.type(spec.momentum)
    s += slope
    x -= _scaled(x, rate, slope + s.dtype.type(spec.momentum) * s if spec.nesterov else s)


def _adagrad(spec: optim.Adagrad, x: Array, g: Array, slots: State, rate: float, _version: int, decay: float) -> None:
    xp, slope, s = namespace_of(x), _coupled(g, x, decay), slots["accumulator"]
    s += slope * slope
    x -= _scaled(x, rate, slope) / (xp.sqrt(s) + x.dtype.type(spec.eps))


def _rmsprop(spec: optim.RMSProp, x: Array, g: Array, slots: State, rate: float, _version: int, decay: float) -> None:
    xp, slope, number = namespace_of(x), _coupled(g, x, decay), x.dtype.type
    s = slots["square_avg"]
    s *= number(spec.alpha)
    s += number(1 - spec.alpha) * slope * slope
    variance = s
    if spec.centered:
        a = slots["grad_avg"]
        a *= number(spec.alpha)
        a += number(1 - spec.alpha) * slope
        variance = xp.maximum(s - a * a, number(0))
    eps = number(spec.eps)
    step = slope / (xp.sqrt(variance + eps) if spec.eps_under_root else xp.sqrt(variance) + eps)
    if spec.momentum:
        b = slots["momentum_buffer"]
        b *= number(spec.momentum)
        b += step
        step = b
    x -= _scaled(x, rate, step)


def _adam(spec: optim.Adam, x: Array, g: Array, slots: State, rate: float, version: int, decay: float) -> None:
    xp, number, t = namespace_of(x), x.dtype.type, version + 1
    decoupled = isinstance(spec, optim.AdamW)
    slope = g if decoupled else _coupled(g, x, decay)
    m, v = slots["exp_avg"], slots["exp_avg_sq"]
    m *= number(spec.beta1)
    m += number(1 - spec.beta1) * slope
    v *= number(spec.beta2)
    v += number(1 - spec.beta2) * slope * slope
    unbias = 1 / math.sqrt(1 - spec.beta2**t)
    eps = number(spec.eps * unbias if spec.eps_uncorrected else spec.eps)
    step = number(rate / (1 - spec.beta1**t)) * m / (number(unbias) * xp.sqrt(v) + eps)
    if decoupled and decay:
        step += number(rate * decay) * x
    x -= step


def _ftrl(spec: optim.FTRL, x: Array, g: Array, slots: State, rate: float, _version: int, decay: float) -> None:
    if rate == 0:
        return  # the equations divide by the rate; in the limit the values do not change
    xp, number = namespace_of(x), x.dtype.type
    n, z, own = slots["accumulator"], slots["linear"], number(rate)
    value = x - number(rate * decay) * x
    square = g * g
    grown = n + square
    if spec.learning_rate_power == -0.5:
        root = xp.sqrt(grown)
        rise = square / (root + xp.sqrt(n))
    else:
        power = number(-spec.learning_rate_power)
        root = grown**power
        rise = root - n**power
    n[...] = grown
    z += g + number(2 * spec.l2_shrinkage) * value - rise / own * value
    pull = xp.clip(z, number(-spec.l1), number(spec.l1)) - z
    x[...] = pull / ((root + number(spec.beta)) / own + number(2 * spec.l2))


def _coupled(g: Array, x: Array, decay: float) -> Array:
    """Returns the gradient with the L2 penalty."""
    return g + x.dtype.type(decay) * x if decay else g


def _scaled(x: Array, rate: float, step: Array) -> Array:
    return x.dtype.type(rate) * step


def _rmsprop_slots(spec: optim.RMSProp) -> dict[str, float]:
    needed = {"square_avg": True, "grad_avg": spec.centered, "momentum_buffer": spec.momentum > 0}
    return {name: 0.0 for name, has in needed.items() if has}


# The slots of each optimizer, with their first values.
_SLOTS: dict[type[optim.Optimizer], Callable[[Any], dict[str, float]]] = {
    optim.SGD: lambda _: {},
    optim.Momentum: lambda _: {"momentum_buffer": 0.0},
    optim.Adagrad: lambda spec: {"accumulator": spec.initial_accumulator_value},
    optim.RMSProp: _rmsprop_slots,
    optim.Adam: lambda _: {"exp_avg": 0.0, "exp_avg_sq": 0.0},
    optim.AdamW: lambda _: {"exp_avg": 0.0, "exp_avg_sq": 0.0},
    optim.FTRL: lambda spec: {"accumulator": spec.initial_accumulator_value, "linear": 0.0},
}
_UPDATES: dict[type[optim.Optimizer], _Update] = {
    optim.SGD: _sgd,
    optim.Momentum: _momentum,
    optim.Adagrad: _adagrad,
    optim.RMSProp: _rmsprop,
    optim.Adam: _adam,
    optim.AdamW: _adam,
    optim.FTRL: _ftrl,
}

__all__ = ["GradientClipping", "LocalOptimizer", "slots_of"]
