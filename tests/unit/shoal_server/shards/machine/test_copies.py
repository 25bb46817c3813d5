"""Copies of a lock group's state machine: scripted cases; see also test_drawn_copies."""

import pytest

from shoal import consistency, errors, optim
from shoal._wire import Cursor
from shoal.v1 import parameter_server_pb2 as server_pb
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine import pulls
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import (
    AnswerCut,
    AnswerPulls,
    CutRequested,
    GrantPermit,
    LearningRateSet,
    NormMeasured,
    NormReceived,
    PullRequested,
    PushCommitted,
    PushOpened,
    PushStaged,
    PushWithdrawn,
    RefusePull,
    WorkerAdmitted,
    WorkerFenced,
    WorkerReleased,
    only,
)
from shoal_server.shards.machine.mode import Apply, PermitLimits
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.machine.worker_progress import WorkerProgress

LIMITS = PermitLimits(workers=4, permits=4)


def group(mode: consistency.Consistency, workers: int, limits: PermitLimits | None = None) -> GroupState:
    state = GroupState("job", mode_for(mode))
    state.permits.limits = limits
    for rank in range(workers):
        state.handle(WorkerAdmitted(f"w{rank}", 1, rank))
    return state


def push(state: GroupState, rank: int, step: int) -> None:
    state.handle(PushStaged(f"w{rank}", 1, step, 1.0, state.version, 7))
    state.handle(PushCommitted(f"w{rank}", 1, step))


def written(state: GroupState) -> pb.GroupState:
    message = pb.GroupState()
    state.write_to(message, gradient_of=int, ticket_of=int)
    return message


def copy_of(state: GroupState, mode: consistency.Consistency) -> GroupState:
    copy = GroupState.restored(written(state), "job", mode_for(mode), payload_of=int)
    copy.permits.limits = state.permits.limits
    copy.validate()
    return copy


class TestRefusedPulls:
    def test_a_pull_for_which_there_is_no_room_still_finishes_the_steps_before(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The version counts the update, so the update must be applied."""
        state = group(consistency.Synchronous(), 2)
        push(state, 0, 0)
        monkeypatch.setattr(pulls, "MAX_WAITING_PULLS", 0)
        effects = state.handle(PullRequested("t", "w1", 1, 1, 1))
        update, refused = effects
        assert isinstance(update, Apply)
        assert state.version == 1
        assert isinstance(refused, RefusePull)
        assert refused.ticket == "t"
        assert refused.error.details["limit"] == "MAX_WAITING_PULLS"
        assert state.waiting == 0

    def test_a_reader_is_refused_likewise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = GroupState("job", mode_for(consistency.Synchronous(), shares_norms=True), peers=["s1"])
        state.handle(WorkerAdmitted("w0", 1, 0))
        push(state, 0, 0)
        monkeypatch.setattr(pulls, "MAX_WAITING_PULLS", 0)
        (refused,) = state.handle(PullRequested("t", "", 0, 0))
        assert isinstance(refused, RefusePull)


class TestCopies:
    def test_only_a_step_without_contributions_is_copied(self) -> None:
        mode = consistency.Synchronous()
        state = group(mode, 2)
        state.handle(PushStaged("w0", 1, 0, 1.0, 0, 7))
        assert state.is_copyable
        state.handle(PushCommitted("w0", 1, 0))
        assert not state.is_copyable
        push(state, 1, 0)
        assert copy_of(state, mode).version == 1

    def test_a_copy_waits_for_no_norm(self) -> None:
        state = GroupState("job", mode_for(consistency.Synchronous(), shares_norms=True), peers=["s1"])
        state.handle(WorkerAdmitted("w0", 1, 0))
        state.handle(NormReceived("s1", 0, (4.0, 5.0)))
        assert list(written(state).norms) == [pb.NormInput(server="s1", step=0, squares=[4.0, 5.0])]
        push(state, 0, 0)
        state.handle(CutRequested({}))
        assert not state.is_copyable
        state.handle(NormMeasured((1.0,)))
        assert state.is_copyable
        assert not written(state).norms

    def test_a_copy_has_what_workers_were_told(self) -> None:
        mode = consistency.Asynchronous(scale_by_staleness=True)
        state = group(mode, 2)
        push(state, 0, 0)
        state.handle(WorkerFenced("w9", 3))
        state.handle(LearningRateSet(optim.ConstantLR(0.5)))
        copy = copy_of(state, mode)
        assert copy.answer_to("w0", 1, 0) == state.answer_to("w0", 1, 0)
        assert copy.progress() == {"w0": WorkerProgress(1, 1, 1), "w1": WorkerProgress(1, 0, 0)}
        with pytest.raises(errors.Fenced):
            copy.handle(WorkerAdmitted("w9", 3, 5))
        copy.handle(PushStaged("w1", 1, 0, 1.0, 1, 7))
        update = copy.handle(PushCommitted("w1", 1, 0))[0]
        assert isinstance(update, Apply)
        assert update.learning_rate == optim.ConstantLR(0.5)

    @pytest.mark.parametrize(
        ("message", "problem"),
        [
            (pb.GroupState(staged=[pb.ReplicaContribution(worker="w0", incarnation=1)]), "but no such worker"),
            (pb.GroupState(workers=2 * [pb.WorkerState(worker="w0", incarnation=1)]), "lists the worker w0 twice"),
            (
                pb.GroupState(workers=[pb.WorkerState(worker="w0", answer=pb.AnsweredPushState(step=1))]),
                "unknown outcome 0",
            ),
        ],
        ids=["staged", "twice", "outcome"],
    )
    def test_a_damaged_copy_is_refused(self, message: pb.GroupState, problem: str) -> None:
        with pytest.raises(errors.BadRequest, match=problem):
            GroupState.restored(message, "job", mode_for(consistency.Asynchronous()), payload_of=int)

    def test_outcomes_are_those_of_the_contract(self) -> None:
        state = group(consistency.Synchronous(), 1)
        state.handle(PushStaged("w0", 1, 0, 0.0, 0, None))
        state.handle(PushCommitted("w0", 1, 0))
        assert written(state).workers[0].answer.outcome == server_pb.SKIPPED


class TestCopiesOfPermits:
    def test_a_copy_knows_who_is_outside_of_a_decided_step(self) -> None:
        mode = consistency.Synchronous(backup_workers=2)
        state = group(mode, 8, LIMITS)
        for rank in (7, 6, 5, 4, 3, 2, 1):
            state.handle(PushOpened(100 + rank, f"w{rank}", 1, 0))
        copy = copy_of(state, mode)
        outside = {it.worker: it.told for it in written(copy).synchronous.outside}
        assert outside == {"w0": False, "w1": True}
        for each in (state, copy):
            each.handle(WorkerFenced("w2", 1))
            each.handle(WorkerReleased("w2", 1, 0))
            assert each.handle(PushOpened(200, "w1", 1, 0)) == [GrantPermit(200, wanted=False)]
            assert each.handle(PushOpened(201, "w0", 1, 0))[0] == GrantPermit(201, wanted=True)

    def test_nobody_joins_before_the_reserved_place_of_a_copy(self) -> None:
        mode = consistency.Synchronous()
        state = group(mode, 8, LIMITS)
        state.handle(WorkerReleased("w0", 1, 0))
        for rank in (7, 6, 5, 1):
            state.handle(PushOpened(100 + rank, f"w{rank}", 1, 0))
        copy = copy_of(state, mode)
        copy.handle(WorkerAdmitted("new", 2, 0))
        assert copy.clocks["new"].steps == 1


class TestForgottenCallers:
    def test_they_ask_again(self) -> None:
        mode = consistency.Synchronous()
        state = group(mode, 8, LIMITS)
        for rank in (7, 6, 5):
            state.handle(PushOpened(100 + rank, f"w{rank}", 1, 0))
        state.handle(PullRequested(200, "w4", 1, 0, 1))
        copy = copy_of(state, mode)
        copy.handle(PullRequested(201, "w4", 1, 0, 1))
        copy.forget_callers()
        copy.validate()
        assert (copy.waiting, copy.permits.waiting, copy.permits.in_use) == (0, 0, 2)
        assert [it.ticket for it in written(copy).permits.granted] == [0, 0]
        assert copy.handle(PushOpened("again", "w7", 1, 0)) == [GrantPermit("again", wanted=True)]
        assert copy.handle(PushOpened("later", "w5", 1, 0)) == []

    def test_a_worker_that_does_not_come_back_loses_its_permit_when_it_is_released(self) -> None:
        mode = consistency.Synchronous()
        state = group(mode, 8, LIMITS)
        state.handle(PushOpened(100, "w7", 1, 0))
        copy = copy_of(state, mode)
        copy.forget_callers()
        copy.handle(PushWithdrawn(100, "w7"))  # by a later copy's number
        assert copy.permits.in_use == 1
        copy.handle(WorkerFenced("w7", 1))
        copy.validate()
        copy.handle(WorkerReleased("w7", 1, 0))
        copy.validate()
        assert copy.permits.in_use == 0

    def test_a_step_that_was_decided_by_their_pushes_is_open_to_others(self) -> None:
        state = group(consistency.Synchronous(backup_workers=2), 8, LIMITS)
        for rank in (1, 2, 3, 4, 5, 0):
            state.handle(PushOpened(100 + rank, f"w{rank}", 1, 0))
        assert [it.worker for it in written(state).synchronous.outside] == ["w6", "w7"]
        state.forget_callers()
        state.validate()
        assert not written(state).synchronous.outside

    def test_their_cut_is_not_answered(self) -> None:
        state = GroupState("job", mode_for(consistency.Synchronous(), shares_norms=True), peers=["s1"])
        state.handle(WorkerAdmitted("w0", 1, 0))
        push(state, 0, 0)
        state.handle(CutRequested({}))
        state.handle(PullRequested(5, "", 0, 0))
        state.forget_callers()
        state.handle(NormMeasured((1.0,)))
        effects = state.handle(NormReceived("s1", 0, (4.0,)))
        assert not any(isinstance(effect, AnswerCut | AnswerPulls) for effect in effects)
        assert state.version == 1

    def test_numbers_are_compared_by_value(self) -> None:
        """A backup decodes the ticket of each message by itself."""
        state = group(consistency.Synchronous(), 8, LIMITS)
        state.handle(PushOpened(10**6, "w7", 1, 0))
        state.handle(PushWithdrawn(int("1000000"), "w7"))
        assert state.permits.in_use == 0


def test_a_pull_that_waits_counts_as_use() -> None:
    """The copy does not have this pull, so its answer must change nothing."""
    state = group(consistency.Synchronous(), 1)
    assert state.handle(PullRequested("t", "w0", 1, 0, 1)) == []
    assert written(state).used
    assert not any(isinstance(effect, AnswerPulls) for effect in state.handle(PullRequested("u", "w0", 1, 0, 1)))


def test_a_push_that_needs_no_permit_gets_one_and_nothing_is_kept() -> None:
    state = group(consistency.Asynchronous(), 1)
    assert state.handle(PushOpened("t", "w0", 1, 0)) == [GrantPermit("t", wanted=True)]
    assert state.permits.in_use == 0


def test_a_cut_lists_workers_in_the_order_in_which_they_joined() -> None:
    """So that a primary and its backup, which has counted other pushes, say the same."""
    mode = consistency.Asynchronous()
    state = group(mode, 2)
    for rank in (1, 0):
        state.handle(PushStaged(f"w{rank}", 1, 0, 1.0, 0, 7, Cursor(1, 8)))
        state.handle(PushCommitted(f"w{rank}", 1, 0))
    for each in (state, copy_of(state, mode)):
        assert list(only(each.handle(CutRequested({})), AnswerCut).cursors) == ["w0", "w1"]
