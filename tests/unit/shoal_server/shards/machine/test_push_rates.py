"""The learning rate that a push carries: which update has it."""

import math
from collections.abc import Sequence

import pytest

from shoal import consistency, errors, optim
from shoal.v1 import replica_pb2
from shoal_server.shards.machine import events
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.mode import Apply
from shoal_server.shards.machine.replica_inputs import decode_staged
from shoal_server.shards.machine.state import GroupState


def group(mode: consistency.Consistency) -> GroupState:
    state = GroupState("job/0", mode_for(mode))
    for rank, worker in enumerate("ab"):
        state.handle(events.WorkerAdmitted(worker, 1, rank))
    return state


def push(state: GroupState, worker: str, step: int, rate: float | None) -> list[optim.Schedule | None]:
    """Returns the rates of the updates that follow."""
    state.handle(events.PushStaged(worker, 1, step, 1.0, state.version, "g", learning_rate=rate))
    return rates(state.handle(events.PushCommitted(worker, 1, step)))


def rates(effects: Sequence[events.LockGroupEffect]) -> list[optim.Schedule | None]:
    return [it.learning_rate for it in effects if isinstance(it, Apply)]


def test_the_lowest_rank_that_has_one_counts_for_one_step() -> None:
    state = group(consistency.Synchronous())
    assert push(state, "b", 0, 0.5) == []
    assert push(state, "a", 0, 0.25) == [optim.ConstantLR(0.25)]
    assert push(state, "a", 1, None) == []
    assert push(state, "b", 1, 0.0) == [optim.ConstantLR(0.0)]
    assert push(state, "a", 2, None) == []
    assert push(state, "b", 2, None) == [None]


def test_each_push_is_an_update_in_other_modes() -> None:
    state = group(consistency.Asynchronous())
    assert push(state, "a", 0, 0.5) == [optim.ConstantLR(0.5)]
    assert push(state, "b", 0, None) == [None]


def test_it_replaces_the_rate_of_the_job() -> None:
    state = group(consistency.Asynchronous())
    state.handle(events.LearningRateSet(optim.ConstantLR(2.0)))
    assert push(state, "a", 0, 0.5) == [optim.ConstantLR(0.5)]
    assert push(state, "b", 0, None) == [optim.ConstantLR(2.0)]


@pytest.mark.parametrize("rate", [-1.0, math.inf, math.nan])
def test_a_backup_refuses_others(rate: float) -> None:
    with pytest.raises(errors.BadRequest, match="a push of a replica has the learning rate"):
        decode_staged(replica_pb2.ReplicaContribution(worker="a", learning_rate=rate), lambda _: "g")
