"""Metrics compared with their definitions: all pairs for the area under the curve, all ranks for top-k accuracy."""

import math
from collections.abc import Sequence
from random import Random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal.program import AggregateMetric
from shoal_nn import AreaUnderCurve, accuracy, top_k_accuracy

scores_and_labels = st.lists(st.tuples(st.integers(-4, 4).map(float), st.booleans()), min_size=1, max_size=40)
logits_and_labels = st.integers(2, 5).flatmap(
    lambda classes: st.lists(
        st.tuples(st.lists(st.integers(-2, 2), min_size=classes, max_size=classes), st.integers(0, classes - 1)),
        min_size=1,
        max_size=10,
    )
)


def arrays(samples: Sequence[tuple[float | list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = zip(*samples, strict=True)
    return np.array(scores, np.float32), np.array(labels, np.int64)


def of_pairs(scores: np.ndarray, labels: np.ndarray) -> float | np.float64:
    """The area by its definition."""
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    return sum(pairs) / len(pairs) if pairs else math.nan


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


class TestAreaUnderCurve:
    @given(scores_and_labels)
    def test_is_the_share_of_pairs_in_order(self, samples: Sequence[tuple[float, bool]]) -> None:
        scores, labels = arrays(samples)
        found, expected = AreaUnderCurve.of(scores, labels).value(), of_pairs(scores, labels)
        assert found == pytest.approx(expected, rel=1e-12, nan_ok=True)

    @given(scores_and_labels, st.lists(st.integers(0, 40), max_size=4), st.randoms())
    def test_does_not_depend_on_the_batches(
        self, samples: Sequence[tuple[float, bool]], cuts: list[int], random: Random
    ) -> None:
        scores, labels = arrays(samples)
        batches = [
            AreaUnderCurve.of(part, of_part)
            for part, of_part in zip(np.split(scores, sorted(cuts)), np.split(labels, sorted(cuts)), strict=True)
        ]
        random.shuffle(batches)
        joined = batches[0]
        assert isinstance(joined, AggregateMetric)
        for batch in batches[1:]:
            joined = joined.merged_with(batch)
        assert same(joined.value(), AreaUnderCurve.of(scores, labels).value())

    def test_is_nan_for_one_class_or_for_nan_scores(self) -> None:
        one, two = np.ones(2), np.array([0.0, math.nan])
        assert math.isnan(AreaUnderCurve.of(one, np.array([1, 1])).value())
        assert math.isnan(AreaUnderCurve.of(one[:0], np.array([], int)).value())
        assert math.isnan(AreaUnderCurve.of(two, np.array([1, 0])).value())

    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
    def test_takes_a_column_of_logits_and_labels_of_any_dtype(self, dtype: type[np.generic]) -> None:
        logits = np.array([[0.5], [2], [-1], [0.5]], dtype)
        for labels in (np.array([0, 1, 0, 1]), np.array([[0.0], [1], [0], [1]]), np.array([False, True, False, True])):
            assert AreaUnderCurve.of(logits, labels).value() == 3.5 / 4

    @pytest.mark.parametrize(("dtype", "nbytes"), [(np.float16, 5), (np.float32, 5), (np.float64, 9)])
    def test_holds_the_documented_bytes_and_no_given_array(self, dtype: type[np.floating], nbytes: int) -> None:
        logits, labels = np.zeros(100, dtype), np.ones(100)
        held = AreaUnderCurve.of(logits, labels)
        assert sum(array.nbytes for array in held.scores + held.labels) == 100 * nbytes
        assert not any(np.may_share_memory(array, given) for array in held.scores for given in (logits, labels))

    @pytest.mark.parametrize(
        ("logits", "labels"), [((3,), (2,)), ((3, 2), (3,)), ((3, 2), (3, 2)), ((), ()), ((3,), (1, 3))]
    )
    def test_refuses_shapes_that_do_not_go_together(self, logits: tuple[int, ...], labels: tuple[int, ...]) -> None:
        with pytest.raises(errors.InvalidShape, match="AreaUnderCurve got labels of shape"):
            AreaUnderCurve.of(np.zeros(logits), np.zeros(labels))

    @pytest.mark.parametrize("label", [2, -1, 0.5, math.nan])
    def test_refuses_other_labels(self, label: float) -> None:
        with pytest.raises(errors.InvalidData, match="neither 0 nor 1"):
            AreaUnderCurve.of(np.zeros(2), np.array([label, 1.0]))


class TestAccuracy:
    @given(logits_and_labels, st.integers(1, 5))
    def test_is_of_those_whose_label_is_among_the_first(self, samples: Sequence[tuple[list[int], int]], k: int) -> None:
        logits, labels = arrays(samples)
        ranked = np.argsort(-logits, axis=1, kind="stable")  # of equal ones the lower class first, as argmax has it
        expected = np.mean([label in row[:k] for label, row in zip(labels, ranked, strict=True)])
        assert top_k_accuracy(logits, labels, k) == pytest.approx(expected)
        assert accuracy(logits, labels) == pytest.approx((logits.argmax(axis=1) == labels).mean())

    def test_over_further_axes(self) -> None:
        logits = np.eye(3)[[[0, 1], [2, 2]]]
        assert accuracy(logits, np.array([[0, 1], [2, 0]])) == 0.75
        assert accuracy(logits.astype(ml_dtypes.bfloat16), np.array([[0, 1], [2, 0]])) == 0.75

    @pytest.mark.parametrize("label", [0, 1, 2])
    def test_logits_that_are_no_numbers_are_wrong(self, label: int) -> None:
        assert accuracy(np.array([[1, math.nan, 3]]), np.array([label])) == 0

    @pytest.mark.parametrize(
        ("logits", "labels"), [((3, 2), np.zeros(2, int)), ((3, 1), np.zeros(3, int)), ((3, 2), np.zeros(3)), ((), 0)]
    )
    def test_refuses_shapes_that_do_not_go_together(self, logits: tuple[int, ...], labels: int | np.ndarray) -> None:
        with pytest.raises(errors.InvalidShape, match="top_k_accuracy got labels of shape"):
            accuracy(np.zeros(logits), np.asarray(labels))
