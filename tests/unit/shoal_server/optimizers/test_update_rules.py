"""Update rules: the references' results, setting ranges, invalid arguments, and the aggregations without gradients."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import optim
from shoal._wire.layout import Aggregation
from shoal_server.optimizers import kernels, update_rules
from shoal_server.optimizers.kernel_threads import KernelThreads
from shoal_server.shards.values.running_sum import running_sum

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "optimizers.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
FLOATS = (np.float32, np.float64)
KERNEL_THREADS = KernelThreads(3, clock=lambda: 0.0)
EVERY = [
    optim.SGD(weight_decay=0.1),
    optim.Momentum(),
    optim.Momentum(nesterov=True),
    optim.Adagrad(),
    optim.RMSProp(),
    optim.RMSProp(momentum=0.9),
    optim.RMSProp(centered=True),
    optim.RMSProp(momentum=0.9, centered=True),
    optim.Adam(weight_decay=0.1),
    optim.AdamW(),
    optim.FTRL(l1=0.1, weight_decay=0.1),
    optim.FTRL(learning_rate_power=-0.4),
]


class Trainee:
    """One arena and its slots."""

    def __init__(
        self, optimizer: optim.Optimizer, values: Any, dtype: Any, sizes: dict[str, int] | None = None
    ) -> None:
        self.rule = update_rules.rule_for(optimizer)
        self.values = np.array(values, dtype)
        self.slots = {slot: np.full(self.values.size, self.rule.initial(slot), dtype) for slot in self.rule.slots}
        self.setting_ranges = update_rules.setting_ranges_for(
            list((sizes or {"w": self.values.size}).items()), optimizer
        )
        self.version = 0

    def apply(self, gradient: Any, lr_scale: float = 1.0) -> None:
        given = np.array(gradient, self.values.dtype)
        given.flags.writeable = False
        arguments: dict[str, Any] = {
            "version": self.version,
            "lr_scale": lr_scale,
            "setting_ranges": self.setting_ranges,
        }
        self.rule.apply(self.values, given, self.slots, **arguments)
        self.version += 1


def optimizer_of(case: dict[str, Any]) -> optim.Optimizer:
    numbers = dict(case["numbers"])
    if isinstance(rate := numbers.get("learning_rate"), dict):
        schedule = getattr(optim, rate["name"])
        numbers["learning_rate"] = schedule(**{key: value for key, value in rate.items() if key != "name"})
    numbers["groups"] = [optim.VariableGroup(**group) for group in numbers.get("groups", [])]
    built: optim.Optimizer = getattr(optim, case["optimizer"])(**numbers)
    return built


def trained(case: dict[str, Any], dtype: Any) -> np.ndarray:
    trainee = Trainee(optimizer_of(case), GOLDEN["initial"], dtype, GOLDEN["sizes"])
    kept = []
    for number, gradient in enumerate(GOLDEN["gradients"], start=1):
        trainee.apply(gradient)
        if number in GOLDEN["kept"]:
            kept.append(trainee.values.copy())
    return np.array(kept)


@pytest.mark.parametrize("name", CASES)
def test_100_updates_equal_the_reference_in_float64(name: str) -> None:
    expected = np.array(CASES[name]["values"])
    np.testing.assert_allclose(trained(CASES[name], np.float64), expected, rtol=1e-12, atol=1e-15)
    if not name.endswith("frozen"):
        assert np.all((expected[-1] != GOLDEN["initial"]) | (expected[-1] == 0))


@pytest.mark.parametrize("name", CASES)
def test_100_updates_equal_the_reference_in_float32(name: str) -> None:
    """To 1e-6 of the larger of a value and 1, the size of the initial values.

    100 roundings of values of that size are an error of about 100 ** 0.5 * 2 ** -24 = 6e-7, which does not shrink when
    a value then passes near 0: no float32 implementation could be held to 1e-6 of the value there.
    """
    expected = np.array(CASES[name]["values"])
    error = np.abs(trained(CASES[name], np.float32) - expected) / np.maximum(np.abs(expected), 1)
    assert error.max() < 1e-6


def test_golden_cases_cover_every_optimizer_and_schedule() -> None:
    optimizers = [optimizer_of(case) for case in CASES.values()]
    assert {type(optimizer) for optimizer in optimizers} == set(optim.Optimizer.registry.values())
    assert {type(optimizer.schedule) for optimizer in optimizers} == set(optim.Schedule.registry.values())
    assert any(optimizer.schedule.warmup_steps for optimizer in optimizers)
    assert any(optimizer.decay_exclude for optimizer in optimizers)
    grouped = {group for optimizer in optimizers for group in optimizer.groups}
    assert any(group.frozen for group in grouped)
    assert any(group.weight_decay for group in grouped)
    assert any(group.rate not in {0, 1} for group in grouped)
    values = np.array(CASES["ftrl-l1"]["values"])
    assert 0 < np.count_nonzero(values == 0) < values.size  # the proximal step was at work


def test_there_is_a_rule_for_every_optimizer() -> None:
    for known in optim.Optimizer.registry.values():
        assert isinstance(update_rules.rule_for(known()), update_rules.UpdateRule)


def test_rules_have_exactly_the_named_slots_they_need() -> None:
    slots = {type(o).__name__ + str(i): update_rules.rule_for(o).slots for i, o in enumerate(EVERY)}
    assert list(slots.values()) == [
        (),
        ("momentum_buffer",),
        ("momentum_buffer",),
        ("accumulator",),
        ("square_avg",),
        ("square_avg", "momentum_buffer"),
        ("square_avg", "grad_avg"),
        ("square_avg", "grad_avg", "momentum_buffer"),
        ("exp_avg", "exp_avg_sq"),
        ("exp_avg", "exp_avg_sq"),
        ("accumulator", "linear"),
        ("accumulator", "linear"),
    ]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_gradients_of_zero_and_constant_ones_keep_everything_finite(optimizer: optim.Optimizer, dtype: Any) -> None:
    trainee = Trainee(optimizer, [1.0, 1.0, 1.0], dtype)
    for _ in range(200):
        trainee.apply([0.0, 1.0, 1e-3])
    for array in (trainee.values, *trainee.slots.values()):
        assert np.isfinite(array).all()
    assert trainee.values[1] < 1


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_repeating_gives_the_same_bits(optimizer: optim.Optimizer) -> None:
    results = set()
    for _ in range(2):
        trainee = Trainee(optimizer, np.linspace(-1, 1, 1001), np.float32)
        for number in range(5):
            trainee.apply(np.sin(np.arange(1001) + number))
        results.add(b"".join(array.tobytes() for array in (trainee.values, *trainee.slots.values())))
    assert len(results) == 1


def trained_in(share: Any, optimizer: optim.Optimizer, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Two updates of an arena of several blocks whose ranges end within blocks, through this way to share it."""
    size = 3 * kernels.BLOCK + 12_345
    bounds = np.array([0, 7, 7, 50_001, kernels.BLOCK + 1, 3 * kernels.BLOCK - 1, size])
    decay = np.array([0.1, 0.7, 0.0, 0.02, 0.3, 0.1])
    trainee = Trainee(optimizer, np.linspace(-1, 1, size), dtype)
    rates = np.array([1.0, 0.5, 2.0, 1.0, 0.0, 1.0])
    trainee.setting_ranges = update_rules.SettingRanges(bounds, decay, rates)
    monkeypatch.setattr(kernels, "share", share)
    for _ in range(2):
        trainee.apply(np.sin(np.arange(size)))
    return b"".join(array.tobytes() for array in (trainee.values, *trainee.slots.values()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_bits_do_not_depend_on_the_threads_that_claim_ranges(
    optimizer: optim.Optimizer, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_pieces(elements: int, work: Any) -> None:
        cuts = np.random.default_rng(0).integers(0, elements, 20)
        pieces = list(itertools.pairwise([0, *sorted(cuts.tolist()), elements]))
        for start, stop in reversed(pieces):
            work(np.array([start, stop]))

    def by_several_threads(elements: int, work: Any) -> None:
        claims = np.array([0, elements])
        KERNEL_THREADS.share(lambda: work(claims))

    def alone(elements: int, work: Any) -> None:
        work(np.array([0, elements]))

    expected = trained_in(alone, optimizer, dtype, monkeypatch)
    for share in (in_pieces, by_several_threads):
        assert trained_in(share, optimizer, dtype, monkeypatch) == expected


@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_lr_scale_is_a_smaller_learning_rate(optimizer: optim.Optimizer) -> None:
    scaled = Trainee(optimizer, [1.0, -2.0], np.float64)
    halved = Trainee(
        type(optimizer)(**{**vars(optimizer), "learning_rate": optimizer.rate(0) / 2}), [1.0, -2.0], np.float64
    )
    for gradient in ([0.5, 1.0], [0.25, -1.0]):
        scaled.apply(gradient, lr_scale=0.5)
        halved.apply(gradient)
    assert scaled.values.tobytes() == halved.values.tobytes()


def test_bias_is_corrected_by_the_version() -> None:
    """The first Adam update is lr * sign(gradient), whatever the betas; at a later version it would be smaller."""
    first, late = (Trainee(optim.Adam(0.1), [1.0, 1.0], np.float64) for _ in range(2))
    late.version = 10
    first.apply([3.0, -0.01])
    late.apply([3.0, -0.01])
    np.testing.assert_allclose(first.values, [0.9, 1.1], rtol=1e-6)
    assert 0.9 < late.values[0] < 1


def test_weight_decay_skips_what_is_excluded() -> None:
    optimizer = optim.SGD(0.5, weight_decay=0.1, decay_exclude=("*bias", "norm/*"))
    trainee = Trainee(optimizer, np.ones(6), np.float64, {"w": 2, "w/bias": 2, "norm/scale": 1, "v": 1})
    trainee.apply(np.zeros(6))
    np.testing.assert_allclose(trainee.values, [0.95, 0.95, 1, 1, 1, 0.95], rtol=1e-15)
    assert trainee.setting_ranges.bounds.tolist() == [0, 2, 5, 6]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("optimizer", EVERY, ids=repr)
def test_a_group_gets_the_bits_of_an_optimizer_of_its_own(optimizer: optim.Optimizer, dtype: Any) -> None:
    sizes = {"a": 5, "frozen": 3, "fast": 4, "b": 2}
    groups = [
        optim.VariableGroup("fast", rate=2, weight_decay=0.25),
        optim.VariableGroup("frozen", frozen=True),
        optim.VariableGroup("*"),
    ]
    grouped = Trainee(dataclasses.replace(optimizer, groups=groups), np.linspace(-1, 1, 14), dtype, sizes)
    fast = dataclasses.replace(optimizer, learning_rate=2 * optimizer.rate(0), weight_decay=0.25)
    alone = [Trainee(each, np.linspace(-1, 1, 14), dtype) for each in (optimizer, fast)]
    for number in range(5):
        for trainee in (grouped, *alone):
            trainee.apply(np.sin(np.arange(14) + number))
    own, theirs = np.r_[:5, 12:14], np.r_[8:12]
    for slot in (None, *grouped.slots):
        array, *expected = (trainee.values if slot is None else trainee.slots[slot] for trainee in (grouped, *alone))
        assert array[own].tobytes() == expected[0][own].tobytes()
        assert array[theirs].tobytes() == expected[1][theirs].tobytes()
        frozen = np.linspace(-1, 1, 14).astype(dtype)[5:8] if slot is None else grouped.rule.initial(slot)
        assert np.all(array[5:8] == frozen)


@pytest.mark.parametrize("optimizer", EVERY[:-1], ids=repr)
def test_a_rate_of_zero_changes_no_value(optimizer: optim.Optimizer) -> None:
    trainee = Trainee(type(optimizer)(**{**vars(optimizer), "learning_rate": 0.0}), [1.0, -2.0], np.float32)
    trainee.apply([1.0, 1.0])
    assert trainee.values.tolist() == [1.0, -2.0]


SLICES = st.lists(st.tuples(st.sampled_from(["w", "v", "w/bias", "v/bias"]), st.integers(0, 9)), max_size=30)


@given(slices=SLICES, decay=st.sampled_from([0.0, 0.01]))
def test_setting_ranges_are_the_fewest_that_give_each_decay(slices: list[tuple[str, int]], decay: float) -> None:
    optimizer = optim.SGD(weight_decay=decay, decay_exclude=("*bias",))
    setting_ranges = update_rules.setting_ranges_for(slices, optimizer)
    expected = [0.0 if name.endswith("bias") else decay for name, elements in slices for _ in range(elements)]
    assert np.repeat(setting_ranges.decay, np.diff(setting_ranges.bounds)).tolist() == expected
    assert setting_ranges.bounds[0] == 0
    assert setting_ranges.elements == len(expected)
    assert setting_ranges.bounds.dtype == np.int64
    assert setting_ranges.decay.dtype == np.float64
    assert all(one != other for one, other in zip(setting_ranges.decay, setting_ranges.decay[1:], strict=False))


def test_empty_arena_is_updated() -> None:
    trainee = Trainee(optim.Adam(), [], np.float32, {})
    trainee.apply([])
    assert trainee.values.size == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gradient": np.ones(4, np.float32)}, r"float32\(4,\) does not match .* float32\(3,\)"),
        ({"gradient": np.ones(3, np.float64)}, r"float64\(3,\) does not match .* float32\(3,\)"),
        ({"slots": {"momentum_buffer": np.ones(2, np.float32)}}, r"float32\(2,\) does not match"),
        ({"slots": {}}, "momentum_buffer are missing"),
        ({"values": np.ones((3, 1), np.float32), "gradient": np.ones((3, 1), np.float32)}, "arrays must be flat"),
        (
            {"setting_ranges": update_rules.setting_ranges_for([("w", 5)], optim.SGD())},
            "cover 5 elements of an arena of 3",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_unchanged(changed: dict[str, Any], message: str) -> None:
    values, slot = np.ones(3, np.float32), np.ones(3, np.float32)
    setting_ranges = update_rules.setting_ranges_for([("w", 3)], optim.SGD())
    arguments: dict[str, Any] = {
        "values": values,
        "gradient": np.ones(3, np.float32),
        "slots": {"momentum_buffer": slot},
        "setting_ranges": setting_ranges,
    }
    with pytest.raises(ValueError, match=message):
        update_rules.rule_for(optim.Momentum()).apply(**(arguments | changed), version=0, lr_scale=1.0)
    assert values.tolist() == slot.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_is_weighted_and_assigned(dtype: Any) -> None:
    values = np.full(3, 99, dtype)
    brought = [np.array([1, 2, 3], dtype), np.array([5, 6, 11], dtype)]
    update_rules.aggregate(values, brought, [3.0, 1.0], Aggregation.MEAN)
    assert values.tolist() == [2, 3, 5]


def test_mean_of_one_is_that_one_to_the_bit() -> None:
    brought = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    values = np.zeros_like(brought)
    update_rules.aggregate(values, [brought], [37.0], Aggregation.MEAN)
    assert values.tobytes() == brought.tobytes()


def test_mean_without_weight_changes_nothing() -> None:
    values = np.array([1.0, 2.0])
    update_rules.aggregate(values, [np.zeros(2)], [0.0], Aggregation.MEAN)
    update_rules.aggregate(values, [], [], Aggregation.MEAN)
    assert values.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [np.int64, *FLOATS])
def test_sum_adds_each_and_last_keeps_the_last(dtype: Any) -> None:
    brought = [np.array([1, 2], dtype), np.array([10, 20], dtype)]
    values = np.array([100, 100], dtype)
    update_rules.aggregate(values, brought, [5.0, 0.0], Aggregation.SUM)
    assert values.tolist() == [111, 122]
    update_rules.aggregate(values, brought, [5.0, 0.0], Aggregation.LAST)
    assert values.tolist() == [10, 20]
    assert brought[1] is not values


def test_counters_are_exact_beyond_the_range_of_doubles() -> None:
    values = np.array([2**53], np.int64)
    update_rules.aggregate(values, [np.array([1], np.int64)], [1.0], Aggregation.SUM)
    assert values[0] == 2**53 + 1


def limits_of(dtype: Any) -> tuple[Any, Any]:
    limits = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else np.finfo(dtype)
    return limits.min, limits.max


@pytest.mark.parametrize("dtype", [np.int64, *FLOATS])
@pytest.mark.parametrize("running", [False, True])
def test_a_sum_that_overflows_stays_at_the_limit(dtype: Any, running: bool) -> None:
    lowest, highest = limits_of(dtype)
    half = dtype(highest // 2 + 1 if dtype is np.int64 else highest / 2 * 1.5)
    values = np.array([half, -half, highest, lowest, 1], dtype)
    brought = [
        np.array([half, -half, -half, half, 2], dtype),
        np.array([-half, half, lowest, highest, 3], dtype),
        np.array([-1, 1, -1, 1, 4], dtype),
    ]
    for count in (1, 3):
        found = values.copy()
        if running:
            total = running_sum(Aggregation.SUM, found)
            for array in brought[:count]:
                total.add(array.copy(), 1.0, count)
            assert total.take(found) is None
        else:
            update_rules.aggregate(found, brought[:count], [1.0] * count, Aggregation.SUM)
        assert found.tolist() == [highest, lowest, highest, lowest, 3 if count == 1 else 10]


def test_a_sum_keeps_nan() -> None:
    values = np.array([np.nan, 1.0], np.float32)
    update_rules.aggregate(values, [np.ones(2, np.float32)], [1.0], Aggregation.SUM)
    assert np.isnan(values[0])
    assert values[1] == 2


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6),
    st.integers(-(2**63), 2**63 - 1),
)
def test_a_sum_of_integers_is_that_of_whole_numbers_within_the_range(increments: list[int], first: int) -> None:
    lowest, highest = limits_of(np.int64)
    expected = first
    for increment in increments:
        if expected not in {lowest, highest}:
            expected = min(max(expected + increment, lowest), highest)
    values = np.array([first], np.int64)
    update_rules.aggregate(
        values, [np.array([it], np.int64) for it in increments], [1.0] * len(increments), Aggregation.SUM
    )
    assert values[0] == expected


@pytest.mark.parametrize(
    ("dtype", "brought", "weights", "aggregation"),
    [
        (np.int64, [np.ones(2, np.int64)], [1.0], Aggregation.MEAN),
        (np.float32, [np.ones(2, np.float32)], [1.0], Aggregation.TRAINABLE),
        (np.float32, [np.ones(2, np.float32)], [1.0, 2.0], Aggregation.SUM),
        (np.float32, [np.ones(1, np.float32)], [1.0], Aggregation.LAST),
        (np.float32, [np.ones(2, np.float64)], [1.0], Aggregation.SUM),
    ],
)
def test_aggregate_refuses(
    dtype: Any, brought: list[np.ndarray], weights: list[float], aggregation: Aggregation
) -> None:
    values = np.zeros(2, dtype)
    with pytest.raises(ValueError):
        update_rules.aggregate(values, brought, weights, aggregation)
    assert values.tolist() == [0, 0]
