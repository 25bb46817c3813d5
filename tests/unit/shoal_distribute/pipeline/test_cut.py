"""Cuts of models into stages, as given and by costs."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal_distribute.pipeline.cut import CallCost, ModelCosts, Places, checked_cut, cut_as_given, cut_by_cost

NAMES = ["one", "two", "three", "four", "five"]
PLAIN = [[], ["one"], ["two"], ["three"], ["four"]]
FREE = float("inf")


def places(crossing: Sequence[Sequence[str]] = PLAIN, *, carries: bool = True) -> Places:
    return Places("net", NAMES, crossing, carries)


def costs(*seconds: float, nbytes: int = 0, sent: Sequence[int] = (0, 0, 0, 0, 0)) -> ModelCosts:
    calls = [CallCost(it, fixed_bytes=nbytes) for it in seconds]
    return ModelCosts(calls, [{place: size} for place, size in enumerate(sent)])


def test_a_cut_is_given_by_names_or_counts() -> None:
    assert cut_as_given(places(), ["two", "five"], 3) == [1, 4]
    assert cut_as_given(places(), [1, 3, 1], 3) == [1, 4]


@pytest.mark.parametrize(
    ("cut", "stages", "message"),
    [
        (["fours"], 2, "no layer 'fours'; did you mean 'four'"),
        (["two"], 3, "1 names for 3 stages; give the first layer of each stage but the first: 2 names"),
        (["four", "two"], 3, "cannot begin with layer 'two', because the stage before it begins with 'four'"),
        (["one"], 2, "layer 'one' is the first of model net, and always begins stage 0"),
        ([2, 2], 2, "1 or more, and 5 in all"),
        ([5, 0], 2, "1 or more, and 5 in all"),
    ],
)
def test_an_invalid_cut_is_refused(cut: list[str | int], stages: int, message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        cut_as_given(places(), cut, stages)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(errors.InvalidLayer, match=r"has 5 layers \(one, .*\), too few for 6 stages"):
        cut_as_given(places(), [1] * 6, 6)
    with pytest.raises(errors.InvalidLayer, match="too few for 6 stages"):
        cut_by_cost(places(), costs(1, 1, 1, 1, 1), [1] * 6, [FREE] * 6)


def test_a_cut_through_a_residual_connection_may_be_refused() -> None:
    crossing = [[], ["one"], ["one", "two"], ["one", "three"], ["four"]]
    assert cut_as_given(places(crossing), ["three"], 2) == [2]
    with pytest.raises(errors.InvalidLayer, match=r"before layer three .* the outputs of one, two cross it"):
        cut_as_given(places(crossing, carries=False), ["three"], 2)
    assert cut_by_cost(places(crossing, carries=False), costs(1, 1, 1, 1, 2), [1, 1], [FREE] * 2) == [4]
    with pytest.raises(errors.InvalidLayer, match="cannot be cut into 4 stages"):
        cut_by_cost(places(crossing, carries=False), costs(1, 1, 1, 1, 1), [1] * 4, [FREE] * 4)


@given(st.lists(st.integers(1, 20), min_size=5, max_size=5), st.integers(1, 5))
def test_the_slowest_stage_is_as_fast_as_possible(seconds: list[int], stages: int) -> None:
    def slowest(cuts: Sequence[int]) -> int:
        return max(sum(seconds[first:end]) for first, end in itertools.pairwise([0, *cuts, 5]))

    found = cut_by_cost(places(), costs(*seconds), [1] * stages, [FREE] * stages)
    assert slowest(found) == min(map(slowest, itertools.combinations(range(1, 5), stages - 1)))


def test_bytes_that_cross_a_cut_count() -> None:
    assert cut_by_cost(places(), costs(1, 1, 0, 1, 1, sent=(0, 0, 10**9, 0, 0)), [1, 1], [FREE] * 2) == [3]


def test_each_stage_stays_within_the_limit_of_its_device() -> None:
    layers = costs(1, 1, 1, 1, 1, nbytes=100)
    assert cut_by_cost(places(), layers, [1, 1], [400, 100]) == [4]
    with pytest.raises(errors.LimitExceeded, match=r"0 \(one to four, in .* least\) needs 400 .* is 300; use more st"):
        cut_by_cost(places(), layers, [1, 1], [300, 100])


def test_a_stage_holds_what_its_schedule_holds() -> None:
    layers = ModelCosts([CallCost(1, saved={number: 10}) for number in range(5)], [{}] * 5)
    assert cut_by_cost(places(), layers, [2, 1], [40, 40]) == [2]
    with pytest.raises(errors.LimitExceeded, match="stage 0"):
        cut_by_cost(places(), layers, [8, 1], [40, 30])


def test_an_array_that_several_calls_keep_counts_once_in_a_stage() -> None:
    # Each call keeps its input and its output, 10 bytes each. A part of n calls holds n + 1 of them.
    calls = [CallCost(1, saved={number: 10, number + 1: 10}) for number in range(5)]
    layers = ModelCosts(calls, [{number: 10} for number in range(5)])
    assert cut_by_cost(places(), layers, [2, 1], [60, 40]) == [2]
    with pytest.raises(errors.LimitExceeded, match=r"stage 0 .* needs 60 bytes"):
        cut_by_cost(places(), layers, [2, 1], [59, 40])


def test_recomputation_holds_inputs_and_computes_forward_passes_twice() -> None:
    calls = [CallCost(1, 0.0, 0, {number + 1: 10}) for number in range(4)] + [CallCost(1, 5.0, 0, {5: 10}, {0: 10})]
    layers = ModelCosts(calls, [{number: 10} for number in range(5)])
    # Stage 0 holds 4 inputs of 10 bytes, and computes one micro-batch again, which needs 30 bytes more.
    assert cut_by_cost(places(), layers, [4, 1], [70, 100], recompute=True) == [3]
    assert cut_by_cost(places(), layers, [1, 1], [FREE] * 2, recompute=True) == [4]
    with pytest.raises(errors.LimitExceeded):
        cut_by_cost(places(), layers, [4, 1], [70, 30])


@pytest.mark.parametrize("cut", ["dense", 3, [1.5, 2], [True, 4], ["one", 2], {1: None}.values()])
def test_a_cut_of_a_wrong_type_is_refused(cut: object) -> None:
    with pytest.raises(errors.BadRequest, match=r"cut is .*; give a list of names"):
        checked_cut(cut)
    assert checked_cut(None) is None
