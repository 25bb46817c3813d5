"""Encoded answers: the same bytes as those of the generated classes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal._wire.headers import ShardHeaders
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

NUMBERS = st.integers(0, 2**64 - 1)
SHARDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20, unique=True)
OUTCOMES = st.sampled_from(pb.PushOutcome.values())


@given(SHARDS, NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4))
def test_headers_of_a_pull_are_those_of_the_generated_class(
    shards: list[int], generation: int, calls: list[tuple[int, int]]
) -> None:
    encoder = ShardHeaders(shards, generation)
    for version, step in calls:
        headers = [
            header_pb2.ShardHeader(shard=shard, generation=generation, version=version, step=step) for shard in shards
        ]
        assert encoder.of_values(version, step) == pb.PullReply(headers=headers).SerializeToString()


@given(SHARDS, NUMBERS, st.lists(st.tuples(NUMBERS, NUMBERS, OUTCOMES, NUMBERS), max_size=4))
def test_reply_to_a_push_is_that_of_the_generated_class(
    shards: list[int], generation: int, calls: list[tuple[int, int, "pb.PushOutcome.ValueType", int]]
) -> None:
    encoder = ShardHeaders(shards, generation)
    for version, step, outcome, staleness in calls:
        answers = [
            pb.ShardPush(
                header=header_pb2.ShardHeader(shard=shard, generation=generation, version=version, step=step),
                outcome=outcome,
                staleness=staleness,
            )
            for shard in shards
        ]
        encoded = encoder.of_push(version, step, outcome, staleness)
        assert encoded == pb.PushReply(shards=answers).SerializeToString()


@pytest.mark.parametrize("number", [0, 2**64 - 1])
def test_longest_and_shortest_numbers(number: int) -> None:
    encoder = ShardHeaders([number & (2**32 - 1)], number)
    (header,) = pb.PullReply.FromString(encoder.of_values(number, number)).headers
    assert (header.generation, header.version, header.step) == (number, number, number)
