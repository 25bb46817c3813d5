"""Cuts of a model into stages, as given or by measured costs (no I/O)."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from shoal import errors
from shoal_distribute.keras.names import advice
from shoal_distribute.pipeline.timings import layers_shown

# What a byte that a stage sends counts, compared with the seconds of its layers: a copy in memory.
_SECONDS_PER_BYTE = 1e-10

# The cost of a stage: its number, its first call, and the call behind its last one.
_StageCost = Callable[[int, int, int], float]


@dataclass(frozen=True)
class CallCost:
    """What one call of a layer costs for a micro-batch.

    Two calls may keep one array, such as the output of the first. It has the same number in both, and counts once.

    Attributes:
        seconds: time of its forward and backward passes.
        forward_seconds: time of its forward pass, which recomputation repeats.
        fixed_bytes: variables that come with it, their gradients and optimizer slots.
        saved: the bytes of each array that its forward pass keeps for its backward pass, by a number of the array.
        fed: the bytes of each input of the model that it takes, by the same numbers.
    """

    seconds: float
    forward_seconds: float = 0.0
    fixed_bytes: int = 0
    saved: Mapping[int, int] = field(default_factory=dict)
    fed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelCosts:
    """What the calls of a model cost for a micro-batch.

    Attributes:
        calls: the cost of each call.
        crossing: for each place, the bytes of each array that crosses it, by the same numbers as in `CallCost`.
    """

    calls: Sequence[CallCost]
    crossing: Sequence[Mapping[int, int]]


@dataclass(frozen=True)
class Places:
    """Where a model may be cut. Place i is before call i.

    Attributes:
        model: name of the model.
        names: the name of the layer of each call.
        crossing: for each place, the names of the layers whose values cross it.
        carries_residuals: whether several values may cross a cut.
    """

    model: str
    names: Sequence[str]
    crossing: Sequence[Sequence[str]]
    carries_residuals: bool

    def allows(self, place: int) -> bool:
        """Returns whether the model may be cut there."""
        return self.carries_residuals or len(self.crossing[place]) <= 1

    def check_stages(self, stages: int) -> None:
        """Raises InvalidLayer if there are more stages than calls of layers."""
        if stages > len(self.names):
            raise errors.InvalidLayer(
                f"model {self.model} has {len(self.names)} layers ({', '.join(self.names)}), too few for {stages} "
                "stages; each stage needs a layer, so use fewer stages"
            )

    def check(self, cuts: Sequence[int]) -> None:
        """Raises InvalidLayer if a cut goes through a residual connection, unless values may be carried past layers."""
        for place in cuts:
            if not self.allows(place):
                raise errors.InvalidLayer(
                    f"the cut before layer {self.names[place]} of model {self.model} goes through a residual "
                    f"connection: the outputs of {', '.join(self.crossing[place])} cross it. Cut elsewhere, or use "
                    "carry_residuals=True"
                )


def checked_cut(cut: Any) -> list[str | int] | None:
    """Returns a list of names or of numbers, or None for None.

    Raises:
        BadRequest: it is something else.
    """
    if cut is None:
        return None
    parts: list[Any] = list(cut) if isinstance(cut, Iterable) and not isinstance(cut, str) else [None]
    if all(isinstance(it, str) for it in parts):
        return parts
    if all(isinstance(it, Integral) and not isinstance(it, bool) for it in parts):
        return [int(it) for it in parts]
    raise errors.BadRequest(
        f"cut is {cut!r:.200}; give a list of names, the first layer of each stage but the first, or a list of the "
        "number of layers of each stage"
    )


def cut_as_given(places: Places, cut: Sequence[str | int], stages: int) -> list[int]:
    """Returns the places of a cut by names or numbers.

    Args:
        places: where the model may be cut.
        cut: the name of the first layer of each stage but the first; or the number of layers of each stage.
        stages: number of stages.

    Raises:
        BadRequest: a name is unknown, the names are not in the order of the model, or the numbers do not fit.
        InvalidLayer: there are more stages than layers, or a cut goes through a residual connection that may not be
            carried.
    """
    places.check_stages(stages)
    if all(isinstance(it, str) for it in cut):
        found = _by_names(places, [str(it) for it in cut], stages)
    else:
        found = _by_counts(places, [int(it) for it in cut], stages)
    places.check(found)
    return found


def _by_names(places: Places, cut: Sequence[str], stages: int) -> list[int]:
    names = list(places.names)
    for name in cut:
        if name not in names:
            raise errors.BadRequest(f"cut: model {places.model} has no layer {name!r}; {advice(name, names)}")
    if len(cut) != stages - 1:
        raise errors.BadRequest(
            f"cut has {len(cut)} names for {stages} stages; give the first layer of each stage but the first: "
            f"{stages - 1} names"
        )
    found = [names.index(name) for name in cut]
    if 0 in found:
        raise errors.BadRequest(
            f"cut: layer {names[0]!r} is the first of model {places.model}, and always begins stage 0; name the first "
            "layers of the other stages alone"
        )
    for before, after in itertools.pairwise([0, *found]):
        if after <= before:
            raise errors.BadRequest(
                f"cut: a stage cannot begin with layer {names[after]!r}, because the stage before it begins with "
                f"{names[before]!r}; name the layers in the order {', '.join(names)}"
            )
    return found


def _by_counts(places: Places, cut: Sequence[int], stages: int) -> list[int]:
    if len(cut) != stages or sum(cut) != len(places.names) or min(cut, default=0) < 1:
        raise errors.BadRequest(
            f"cut is {list(cut)}; give the number of layers of each of {stages} stages: 1 or more, and "
            f"{len(places.names)} in all, for the layers {', '.join(places.names)}"
        )
    return list(itertools.accumulate(cut))[:-1]


def cut_by_cost(
    places: Places, costs: ModelCosts, held: Sequence[int], limits: Sequence[float], *, recompute: bool = False
) -> list[int]:
    """Returns the places of the cut whose slowest stage is fastest, by dynamic programming over the calls.

    Args:
        places: where the model may be cut.
        costs: what its calls cost.
        held: for each stage, the number of micro-batches that it holds at most.
        limits: the bytes that each stage may use; infinity means any.
        recompute: whether a stage keeps only what it receives, and computes its forward pass again.

    Raises:
        InvalidLayer: there are more stages than layers, or no cut is allowed.
        LimitExceeded: every cut exceeds a limit. The message names the stage that exceeds it least.
    """
    places.check_stages(len(held))
    calls = costs.calls
    seconds = _sums([it.seconds + (it.forward_seconds if recompute else 0) for it in calls])
    fixed = _sums([it.fixed_bytes for it in calls])
    received = _bytes_of_parts(costs.crossing, [it.fed for it in calls])
    saved = _bytes_of_parts(costs.crossing, [{**it.fed, **it.saved} for it in calls])

    def need(stage: int, first: int, end: int) -> float:
        whole = saved[first][end - first]
        kept = received[first][end - first] if recompute else whole
        return fixed[end] - fixed[first] + held[stage] * kept + (whole - kept)  # one micro-batch is computed at a time

    def time(stage: int, first: int, end: int) -> float:
        if need(stage, first, end) > limits[stage]:
            return float("inf")
        sent = sum(costs.crossing[end].values()) if end < len(calls) else 0
        return seconds[end] - seconds[first] + _SECONDS_PER_BYTE * sent

    if (found := _best(places, len(held), time)) is not None:
        return found
    least = _best(places, len(held), lambda stage, first, end: need(stage, first, end) / limits[stage])
    if least is None:
        raise errors.InvalidLayer(
            f"model {places.model} cannot be cut into {len(held)} stages without a cut through a residual connection; "
            "use fewer stages, or carry_residuals=True"
        )
    bounds = [0, *least, len(calls)]
    stages = [(need(stage, *part), stage, part) for stage, part in enumerate(itertools.pairwise(bounds))]
    bytes_, stage, (first, end) = max(stages, key=lambda it: it[0] / limits[it[1]])
    what = f"{layers_shown(places.names[first:end])}, in the cut that exceeds the limits least"
    raise memory_error(stage, what, bytes_, limits[stage], "more stages")


def memory_error(
    stage: int, what: str, need: float, limit: float, remedy: str = "another cut, more stages"
) -> errors.LimitExceeded:
    """Returns the error for a stage that needs more memory than its device may use.

    Args:
        stage: number of the stage.
        what: its layers, and its device if that is known.
        need: bytes that it needs.
        limit: bytes that it may use.
        remedy: what to use, besides more micro-batches and recomputation.
    """
    return errors.LimitExceeded(
        f"stage {stage} ({what}) needs {need:,.0f} bytes, but memory_limit is {limit:,.0f}; use {remedy}, more "
        "micro-batches or recompute=True, or raise the limit"
    )


def _best(places: Places, stages: int, cost: _StageCost) -> list[int] | None:
    """Returns the cut whose largest cost of a stage is smallest; None if each has an infinite cost."""
    calls = len(places.names)
    # By the end of the stages so far: their largest cost, and where they are cut.
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for stage in range(stages):
        last = stage == stages - 1
        after: dict[int, tuple[float, list[int]]] = {}
        for end in [calls] if last else [it for it in range(stage + 1, calls) if places.allows(it)]:
            options = [
                (max(so_far, cost(stage, first, end)), [*cuts, *([] if last else [end])])
                for first, (so_far, cuts) in best.items()
                if first < end
            ]
            if options:
                after[end] = min(options)
        best = after
    found = best.get(calls)
    return None if found is None or found[0] == float("inf") else found[1]


def _bytes_of_parts(first: Sequence[Mapping[int, int]], added: Sequence[Mapping[int, int]]) -> list[list[int]]:
    """Returns the bytes of the arrays of consecutive calls, by the first call and the number of calls.

    Args:
        first: the arrays that a part has before its first call, for each place.
        added: the arrays that each call adds. An array that a part has already counts once.
    """
    found = []
    for place, start in enumerate(first):
        sizes = dict(start)
        totals = [sum(sizes.values())]
        for arrays in added[place:]:
            more = {key: max(size, sizes.get(key, 0)) for key, size in arrays.items()}
            totals.append(totals[-1] + sum(size - sizes.get(key, 0) for key, size in more.items()))
            sizes.update(more)
        found.append(totals)
    return found


def _sums(values: Sequence[float]) -> list[float]:
    """Returns the sum of the first 0, 1, 2, ... values."""
    return [0, *itertools.accumulate(values)]


__all__ = ["CallCost", "ModelCosts", "Places", "checked_cut", "cut_as_given", "cut_by_cost", "memory_error"]
