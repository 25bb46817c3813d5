"""Collective calls as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal_distribute.collectives.calls import Collective, CollectiveCall, ReduceOp

CALLS = st.builds(
    CollectiveCall,
    st.integers(0, 2**64 - 1),
    st.sampled_from(Collective),
    st.sampled_from(["", "float32", "bfloat16", "complex128"]),
    st.integers(0, 2**64 - 1),
    st.sampled_from(ReduceOp),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@given(CALLS)
def test_a_call_is_read_as_it_was_written(call: CollectiveCall) -> None:
    assert CollectiveCall.decode(call.encode()) == call


@given(st.binary(max_size=60))
def test_other_bytes_are_refused(data: bytes) -> None:
    try:
        CollectiveCall.decode(data)
    except errors.BadFrame as error:
        assert "not a collective call" in error.message  # noqa: PT017 - most inputs are refused, some are calls


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (
            CollectiveCall(3, Collective.ALL_REDUCE, "float32", 1_000),
            "all_reduce of 1,000 float32 by sum as its call 3",
        ),
        (CollectiveCall(0, Collective.BROADCAST, "int8", 2, root=1), "broadcast of 2 int8 from rank 1 as its call 0"),
        (CollectiveCall(9, Collective.BARRIER), "barrier as its call 9"),
    ],
)
def test_messages_show_a_call(call: CollectiveCall, shown: str) -> None:
    assert str(call) == shown
