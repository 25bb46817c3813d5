"""Encoding of the results of scheduled functions."""

from collections import namedtuple
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shoal import errors
from shoal_distribute import PerReplica
from shoal_distribute.coordinator.outcomes import (
    MAX_RESULT_BYTES,
    OutcomeKind,
    ScheduledOutcome,
    decode_tree,
    encode_tree,
)
from support import run_lengths

LEAVES: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    arrays(st.sampled_from([np.int64, np.bool_, np.uint8]), (2,)),
    arrays(np.float64, st.sampled_from([(), (3,), (2, 0), (2, 3)]), elements=st.floats(allow_nan=False)),
    st.floats(width=32, allow_nan=False).map(np.float32),
)
TREES: Any = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(st.text(), inside, max_size=3),
    ),
    max_leaves=8,
)


def check_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert [*found] == [*wanted]
        check_same([*found.values()], [*wanted.values()])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            check_same(one, other)
    elif isinstance(wanted, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_array_equal(found, wanted)
    else:
        assert found == wanted


@settings(max_examples=run_lengths.draws(10), deadline=None)
@given(TREES)
def test_a_tree_is_decoded_to_the_same(tree: Any) -> None:
    check_same(decode_tree(encode_tree(tree)), tree)


def test_other_values_are_converted() -> None:
    pair = namedtuple("pair", "a b")
    halves = np.ones(3, ml_dtypes.bfloat16)
    found = decode_tree(encode_tree([pair(1, 2), PerReplica([1, halves]), np.ones((2, 3)).T, np.ones(4)[::2]]))
    assert found[0] == (1, 2)
    assert type(found[0]) is tuple
    assert found[1].values[0] == 1
    assert found[1].values[1].dtype == halves.dtype
    assert [found[2].shape, found[3].shape] == [(3, 2), (2,)]
    found[3][0] = 5.0  # an array of its own, which can be written


def test_values_that_cannot_be_sent_say_what_can() -> None:
    with pytest.raises(errors.BadRequest, match="returned a set; return arrays"):
        encode_tree({"a": [{1, 2}]})
    with pytest.raises(errors.BadRequest, match="the key 1; use strings"):
        encode_tree({1: 2})
    with pytest.raises(errors.BadRequest, match="an array of object"):
        encode_tree(np.array([None]))
    with pytest.raises(errors.MessageTooLarge, match="return less, such as a mean"):
        encode_tree(np.zeros(MAX_RESULT_BYTES, np.uint8))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(errors.BadRequest, match="nested deeper than 50 levels"):
        encode_tree(endless)


@settings(max_examples=run_lengths.draws(30), deadline=None)
@given(st.binary(max_size=40), st.integers(0, 60))
def test_bytes_that_are_no_tree_are_refused(noise: bytes, at: int) -> None:
    whole = encode_tree({"a": np.arange(3), "b": [1.5, "x"]})
    for encoded in (noise, whole[:at] + noise + whole[at:], whole[:at]):
        try:
            decode_tree(encoded)
        except errors.BadFrame:
            continue
    for described in (
        '["a","float64",[1e9]]',
        '["a","object",[1]]',
        '["q"]',
        '["a","int8",[-1]]',
        '["d",[1]]',
        "{}",
        "[",
    ):
        with pytest.raises(errors.BadFrame, match="are not the result of a call"):
            decode_tree(len(described).to_bytes(4, "little") + described.encode())


def test_outcomes_without_a_result_raise() -> None:
    assert ScheduledOutcome.of_value(3).value() == 3
    for kind, error in (
        (OutcomeKind.ERROR, errors.ProgramError),
        (OutcomeKind.CANCELLED, errors.Cancelled),
        (OutcomeKind.DROPPED, errors.LimitExceeded),
    ):
        with pytest.raises(error, match="why"):
            ScheduledOutcome.of_text(kind, "why").value()
