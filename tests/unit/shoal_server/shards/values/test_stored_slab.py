"""Stored slab: the mean of a step's contributions, and the update of values of each dtype."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import optim
from shoal._wire import Slab
from shoal._wire.layout import Aggregation, ArenaLayout, Slice
from shoal.initializers import Zeros
from shoal.variables import AggregationName, Variable
from shoal_server.shards.values.stored_slab import StoredSlab


def stored(elements: int, dtype: str = "float32", aggregation: AggregationName | None = None) -> StoredSlab:
    variable = Variable((elements,), dtype, Zeros(), trainable=aggregation is None, aggregation=aggregation)
    layout = ArenaLayout(variable.dtype, variable.aggregation, (Slice("w", 0, elements, 0),), elements)
    return StoredSlab(Slab.of([((0, 0), layout)]), {"w": variable}, optim.SGD(1.0), 0, threading.Lock())


@given(
    st.lists(st.tuples(st.integers(-1000, 1000), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
    st.sampled_from(["float32", "float64"]),
)
def test_the_mean_is_weighted_as_one_would_expect(parts: Sequence[tuple[int, float]], dtype: str) -> None:
    made = stored(3, dtype)
    pushed = [np.full(3, value, dtype) for value, _ in parts]
    made.apply(pushed, [weight for _, weight in parts], version=0, scale=1.0)
    expected = np.average([value for value, _ in parts], weights=[weight for _, weight in parts])
    np.testing.assert_allclose(-made.values, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("weight", [7.0, 1e-300, 1e300])
def test_equal_weights_keep_integers_exact(weight: float) -> None:
    made = stored(2)
    made.apply([np.full(2, value, np.float32) for value in (3, 5, 8, 1)], [weight] * 4, version=0, scale=1.0)
    np.testing.assert_array_equal(made.values, -17 / 4)


def in_order(parts: list[Any]) -> Any:
    """The mean as it has always been computed: sums in order of rank, divided once."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total * total.dtype.type(1.0 / len(parts))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("weights", ["equal", "unequal"])
@pytest.mark.parametrize("workers", [2, 3, 5, 16, 17])
def test_the_mean_of_finite_numbers_is_finite(workers: int, weights: str, dtype: Any) -> None:
    largest = np.finfo(dtype).max
    for value in (largest, -largest, dtype(0.88) * largest):
        made = stored(2, dtype)
        amounts = [1.0] * workers if weights == "equal" else [float(rank + 1) for rank in range(workers)]
        made.apply([np.full(2, value, dtype) for _ in range(workers)], amounts, version=0, scale=1.0)
        np.testing.assert_allclose(made.values, -value, rtol=1e-6 if dtype is np.float32 else 1e-14)


@given(st.integers(2, 20), st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float64]))
def test_the_mean_has_the_same_bits_as_a_sum_in_order_of_rank(workers: int, seed: int, dtype: Any) -> None:
    draws = np.random.default_rng(seed)
    parts = [(draws.standard_normal(64) * 10.0 ** draws.integers(-20, 20, 64)).astype(dtype) for _ in range(workers)]
    expected = in_order(parts)
    made = stored(64, dtype)
    made.apply([part.copy() for part in parts], [3.0] * workers, version=0, scale=1.0)
    np.testing.assert_array_equal(made.values, -expected)


def test_no_weight_overflows() -> None:
    made = stored(2)
    made.apply([np.ones(2, np.float32), np.full(2, 3, np.float32)], [1e308, 1.7e308], version=0, scale=1.0)
    np.testing.assert_allclose(made.values, -(1 * 1 + 3 * 1.7) / 2.7, rtol=1e-6)


def test_a_lone_contribution_is_applied_bit_for_bit() -> None:
    made = stored(4)
    gradient = np.array([0.1, -0.2, 1e-30, 3e30], np.float32)
    made.apply([gradient.copy()], [0.3], version=0, scale=1.0)
    np.testing.assert_array_equal(made.values, -gradient)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_stored_as_float32(dtype: str) -> None:
    made = stored(3, dtype)
    assert made.values.dtype == np.float32
    assert made.nbytes == 12
    made.apply([np.full(3, 2.0**-20, np.float32)], [1.0], version=0, scale=1.0)
    made.apply([np.ones(3, np.float32)], [1.0], version=1, scale=1.0)
    np.testing.assert_array_equal(made.values, np.float32(-1 - 2.0**-20))


def test_counters_have_no_slots_and_add_up() -> None:
    made = stored(2, "int64", "sum")
    assert made.slab.aggregation is Aggregation.SUM
    assert made.slots == {}
    made.apply([np.array([1, 2]), np.array([10, 20])], [5.0, 1.0], version=0, scale=1.0)
    np.testing.assert_array_equal(made.values, [11, 22])


def test_arenas_of_a_slab_are_initialized_and_decayed_as_if_each_were_alone() -> None:
    variables = {f"layer_{number}/{kind}": Variable((5,)) for number in range(3) for kind in ("kernel", "bias")}
    optimizer = optim.AdamW(0.1, weight_decay=0.5, decay_exclude=("*bias",))
    arenas = [
        ((number, 0), ArenaLayout(it.dtype, it.aggregation, (Slice(name, 0, 5, 0),), 5))
        for number, (name, it) in enumerate(variables.items())
    ]
    together = StoredSlab(Slab.of(arenas), variables, optimizer, 7, threading.Lock())
    alone = [StoredSlab(Slab.of([arena]), variables, optimizer, 7, threading.Lock()) for arena in arenas]
    gradient = np.linspace(-1, 1, 30, dtype=np.float32)
    for version in range(3):
        together.apply([gradient.copy()], [1.0], version=version, scale=1.0)
        for number, slab in enumerate(alone):
            slab.apply([gradient[5 * number : 5 * number + 5].copy()], [1.0], version=version, scale=1.0)
    np.testing.assert_array_equal(together.values, np.concatenate([slab.values for slab in alone]))
    for name, slot in together.slots.items():
        np.testing.assert_array_equal(slot, np.concatenate([slab.slots[name] for slab in alone]))
