"""Packing of named arrays into the slabs of a placement. `shoal._wire.pull_decoder` unpacks them.

`shoal._wire.framing` divides slabs into chunks, and assembles them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, eq
from sys import intern
from typing import Any, Protocol

import numpy as np

from shoal import errors
from shoal._system import listed
from shoal._wire.chunks import Chunk
from shoal._wire.framing import chunks_of
from shoal._wire.layout import Aggregation
from shoal._wire.limits import CHUNK_BYTES
from shoal._wire.placement import Placement
from shoal._wire.plans import GATHERED_BYTES, SlabPlan, SliceGroup, getter
from shoal._wire.slabs import CallLayout, Slab
from shoal.variables import Variable

# What to do about a gradient that the caller does not have.
_UNTRAINED = (
    ". Variables of a float dtype are trainable. If one is not trained, declare it with shoal.Variable.of(array, "
    "trainable=False), and push its values in `updates`"
)

# Allocates this many bytes: flat, uninitialised, unsigned.
Memory = Callable[[int], np.ndarray]


class ArraySource(Protocol):
    """Source of arrays by variable, some of which may not be available yet."""

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays that are available, by variable."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all arrays are available."""
        ...

    def wait(self) -> None:
        """Waits until all arrays are available."""
        ...

    def ready(self, groups: Sequence[SliceGroup]) -> Iterator[SliceGroup]:
        """Yields each of these groups once all its arrays are available."""
        ...


@dataclass(frozen=True, slots=True)
class CompleteArrays:
    """Arrays by variable, all available."""

    arrays: Mapping[str, np.ndarray]

    @property
    def complete(self) -> bool:
        return True

    def wait(self) -> None:
        """Returns at once."""

    def ready(self, groups: Sequence[SliceGroup]) -> Iterator[SliceGroup]:
        """Returns all groups, in order."""
        return iter(groups)


class _Expected:
    """Expected names, shapes and dtypes of arrays. One check covers all arrays, in C loops.

    Args:
        variables: the variables, by name.
        wires: wire dtypes of the variables for which it differs from their own; arrays may have these already.
    """

    def __init__(self, variables: Mapping[str, Variable], wires: Mapping[str, np.dtype]) -> None:
        self.variables = variables
        self._get = getter([*variables])
        self._shapes = [variable.shape for variable in variables.values()]
        self._dtypes = [variable.dtype for variable in variables.values()]
        self._wires = [wires.get(name, variable.dtype) for name, variable in variables.items()]

    def fit(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Returns whether the arrays have exactly these names, shapes and dtypes."""
        if len(arrays) != len(self.variables):
            return False
        try:
            found = self._get(arrays)
        except KeyError:
            return False
        try:
            return all(map(eq, map(attrgetter("shape"), found), self._shapes)) and (
                all(map(eq, map(attrgetter("dtype"), found), self._dtypes))
                or all(map(eq, map(attrgetter("dtype"), found), self._wires))
            )
        except AttributeError:
            return False


class Packer:
    """Packs and unpacks arrays by one placement. Any number of threads can use it at once.

    Args:
        placement: the placement.
        known: packer of an earlier grouping of the generation. The layouts of lock groups that stay are taken over.

    Attributes:
        generation: the placement's generation.
        variables: the variables, by name.
        groups: layout of the calls to each lock group, by its name.
        nothing: None for each variable, in the placement's order.
        split: variables that do not lie in one arena with all their rows.
        unlendable: the trainable variables that `lend` cannot yield: they are split, or have another wire dtype.
    """

    def __init__(self, placement: Placement, known: "Packer | None" = None) -> None:
        self.generation = placement.generation
        self.variables = {intern(name): variable for name, variable in placement.variables.items()}
        # By identity, because layouts of many variables take long to compare.
        stay = {tuple(map(id, it.shards)): it for it in known.groups.values()} if known else {}
        self.groups: dict[int, CallLayout] = {}
        for group, shards in placement.by_group().items():
            layouts = tuple(shard.layout for shard in shards)
            self.groups[group] = stay.get(tuple(map(id, layouts))) or CallLayout(layouts)
        self._plans: dict[Slab, SlabPlan] = {}
        if known:
            slabs = {slab for layout in self.groups.values() for slab in layout.slabs}
            self._plans = {slab: plan for slab, plan in known._plans.items() if slab in slabs}
        plans = [self.plan(slab) for layout in self.groups.values() for slab in layout.slabs]
        self.nothing: dict[str, Any] = dict.fromkeys(self.variables)
        # Wire dtypes that differ from the variable's own.
        self._wires = {
            part.variable: plan.slab.wire_dtype for plan in plans if not plan.travels_as_it_is for part in plan.parts
        }
        self._expected: dict[frozenset[Aggregation], _Expected] = {}
        self.split = {part.variable for plan in plans for part in plan.partial}
        trainable = [plan for plan in plans if plan.slab.aggregation is Aggregation.TRAINABLE]
        lent = {name for plan in trainable if plan.travels_as_it_is for name in plan.names}
        self.unlendable = [part.variable for plan in trainable for part in plan.parts if part.variable not in lent]

    def plan(self, slab: Slab) -> SlabPlan:
        """Returns the packing plan of a slab of this placement."""
        plan = self._plans.get(slab)
        if plan is None:
            plan = self._plans.setdefault(slab, SlabPlan(slab, self.variables))
        return plan

    def check(self, arrays: Mapping[str, np.ndarray], aggregations: Collection[Aggregation]) -> None:
        """Checks that there is an array for each variable of some aggregations, and for no other variable.

        An array has its variable's dtype, or the wire dtype. A scalar variable also accepts a Python or NumPy number of
        the same kind.

        Args:
            arrays: the arrays, by variable.
            aggregations: selects the variables.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit; the message lists the first 50 problems.
        """
        key = frozenset(aggregations)
        expected = self._expected.get(key)
        if expected is None:
            chosen = {name: variable for name, variable in self.variables.items() if variable.aggregation in key}
            expected = self._expected.setdefault(key, _Expected(chosen, self._wires))
        if expected.fit(arrays):
            return
        complaints = [
            f"{name!r} {complaint}"
            for name in expected.variables
            if (complaint := self._complaint(name, arrays.get(name)))
        ]
        if complaints or len(arrays) != len(expected.variables):
            complaints += self._unexpected(arrays, aggregations)
        if complaints:
            without = any(it.trainable and arrays.get(name) is None for name, it in expected.variables.items())
            advice = _UNTRAINED if without else ""
            raise errors.InvalidGradient(f"the arrays do not fit the job's variables: {listed(complaints)}{advice}")

    def check_one(self, name: str, array: np.ndarray, aggregations: Collection[Aggregation]) -> None:
        """Checks one array of a push whose arrays come one by one.

        Args:
            name: name of the variable.
            array: the array.
            aggregations: aggregations that the push may carry.

        Raises:
            InvalidGradient: there is no such variable in these aggregations, or the array does not fit it.
        """
        complaints = list(self._unexpected([name], aggregations))
        if not complaints and (complaint := self._complaint(name, array)):
            complaints = [f"{name!r} {complaint}"]
        if complaints:
            raise errors.InvalidGradient(f"the arrays do not fit the job's variables: {complaints[0]}")

    def _complaint(self, name: str, array: object) -> str:
        variable = self.variables[name]
        return _complaint(array, variable, self._wires.get(name, variable.dtype))

    def _unexpected(self, arrays: Iterable[str], aggregations: Collection[Aggregation]) -> Iterator[str]:
        for name in arrays:
            known = self.variables.get(name)
            if known is None:
                yield f"{name!r} is not a variable"
            elif known.aggregation not in aggregations:
                if set(aggregations) == {Aggregation.TRAINABLE}:
                    floats = ", or declare it with a float dtype" if known.dtype.kind == "i" else ""
                    yield f"{name!r} ({known.dtype}) is not trainable: give it as an update{floats}"
                    continue
                wanted = " or ".join(sorted(aggregation.name for aggregation in aggregations))
                yield f"{name!r} has the aggregation {known.aggregation.name}, not {wanted}"

    def chunks(self, layout: CallLayout, arrays: ArraySource, aggregations: Collection[Aggregation]) -> Iterator[Chunk]:
        """Yields the slabs of a call as chunks.

        Args:
            layout: layout of the call.
            arrays: the arrays, by variable, as accepted by `check`. Large ones are not copied, so they must not change
                meanwhile.
            aggregations: selects the slabs.

        Yields:
            The chunks, as their arrays become available.
        """
        slabs = {group: slab for slab in layout.carrying(aggregations) for group in self.plan(slab).groups}
        for group in arrays.ready([*slabs]):
            slab = slabs[group]
            offset = group.elements.start * slab.wire_dtype.itemsize
            for piece in _pieces(group, arrays.arrays, slab.wire_dtype):
                yield from chunks_of(slab, piece, offset)
                offset += piece.nbytes

    def write(
        self, layout: CallLayout, arrays: ArraySource, aggregations: Collection[Aggregation], region: np.ndarray
    ) -> None:
        """Writes the slabs of a call into a region.

        Args:
            layout: layout of the call.
            arrays: the arrays, by variable, as accepted by `check`.
            aggregations: selects the slabs.
            region: unsigned bytes, large enough.
        """
        targets: dict[SliceGroup, np.ndarray] = {}
        for slab, flat in layout.arrays(region, aggregations).items():
            plan = self.plan(slab)
            targets |= dict.fromkeys([plan.all] if arrays.complete else plan.groups, flat)
        for group in arrays.ready([*targets]):
            _join(group.slices(arrays.arrays), targets[group][group.elements])

    def lend(self, layout: CallLayout, region: np.ndarray) -> Iterator[Iterable[tuple[str, np.ndarray]]]:
        """Yields views of a region, slab by slab: the trainable variables that it holds in their own dtype.

        Values that are written to these views are packed. The other variables are `unlendable`.
        """
        for slab, flat in layout.arrays(region, [Aggregation.TRAINABLE]).items():
            plan = self.plan(slab)
            if plan.travels_as_it_is:
                yield plan.whole(flat)

    def write_some(self, layout: CallLayout, arrays: Mapping[str, np.ndarray], region: np.ndarray) -> None:
        """Writes some variables into a region.

        Args:
            layout: layout of the call.
            arrays: the arrays, by variable.
            region: unsigned bytes, large enough.
        """
        for slab, flat in layout.arrays(region).items():
            plan = self.plan(slab)
            if all(map(arrays.__contains__, plan.all.names)):
                _join(plan.all.slices(arrays), flat)
                continue
            for part in plan.parts:
                if part.variable in arrays:
                    _join(SliceGroup([part]).slices(arrays), flat[part.elements])


def _pieces(group: SliceGroup, arrays: Mapping[str, np.ndarray], wire: np.dtype) -> Iterator[np.ndarray]:
    """Yields a group as flat arrays of the wire dtype."""
    slices = group.slices(arrays)
    elements = group.elements.stop - group.elements.start
    if len(slices) == 1 and elements * wire.itemsize >= GATHERED_BYTES:
        yield from _cut(slices[0], wire)
    else:
        yield _joined(slices, elements, wire)


def _joined(pieces: list[np.ndarray], elements: int, wire: np.dtype) -> np.ndarray:
    flat = np.empty(elements, wire)
    _join(pieces, flat)
    return flat


def _overflowing() -> np.errstate:
    """Suppresses overflow warnings. Values too large for the wire dtype become Inf, which the server reports."""
    return np.errstate(over="ignore")


def _join(pieces: list[np.ndarray], flat: np.ndarray) -> None:
    """Copies arrays into a flat one, one after the other, and casts them to the wire dtype."""
    with _overflowing():
        np.concatenate(pieces, axis=None, out=flat, casting="unsafe")


def _cut(piece: np.ndarray, wire: np.dtype) -> Iterator[np.ndarray]:
    """Yields a large slice as it is or, if the wire dtype differs, cast chunk by chunk."""
    flat = np.ascontiguousarray(piece).reshape(-1)
    if flat.dtype == wire:
        yield flat
        return
    step = CHUNK_BYTES // wire.itemsize
    for start in range(0, flat.size, step):
        with _overflowing():
            cast = flat[start : start + step].astype(wire)
        yield cast


def _complaint(array: object, variable: Variable, wire: np.dtype) -> str:
    """Returns what is wrong with an array for a variable; empty if it fits."""
    if array is None:
        return "is missing"
    if isinstance(array, np.ndarray):
        fits = array.dtype in (variable.dtype, wire)
        wrong_shape = f"has shape {array.shape}, not {variable.shape}" if array.shape != variable.shape else ""
        wrong_dtype = "" if fits else f"is {array.dtype}: cast it to {variable.dtype}"
        return " and ".join(filter(None, (wrong_shape, wrong_dtype)))
    if not isinstance(array, int | float | np.generic):
        return f"is a {type(array).__name__}, not a NumPy array"
    if variable.shape:
        return f"is a number, not an array of shape {variable.shape}"
    dtype = np.asarray(array).dtype
    same_kind = dtype.kind == ("i" if variable.dtype.kind == "i" else "f")
    return "" if same_kind or dtype == variable.dtype else f"is {dtype}: cast it to {variable.dtype}"
