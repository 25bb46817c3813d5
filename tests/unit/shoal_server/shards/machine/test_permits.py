"""Permits: the next rank always gets one, memory stays within its bound, and no push waits forever."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import consistency, errors
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import (
    AnswerPush,
    Folded,
    FoldsDone,
    GrantPermit,
    LockGroupEffect,
    PushCommitted,
    PushOpened,
    PushStaged,
    PushWithdrawn,
    RefusePermit,
    WorkerAdmitted,
    WorkerFenced,
    WorkerReleased,
)
from shoal_server.shards.machine.mode import Apply, Fold, PermitLimits
from shoal_server.shards.machine.state import GroupState
from support.run_lengths import draws

LIMITS = PermitLimits(workers=4, permits=4)
LARGE = 1 << 30


def group(workers: int, backup_workers: int = 0, limits: PermitLimits = LIMITS) -> GroupState:
    state = GroupState("job", mode_for(consistency.Synchronous(backup_workers)))
    state.permits.limits = limits
    for rank in range(workers):
        state.handle(WorkerAdmitted(name(rank), 1, rank))
    return state


def name(rank: int) -> str:
    return f"w{rank}"


def handle(state: GroupState, event: Any) -> list[LockGroupEffect]:
    effects = state.handle(event)
    state.validate()
    return effects


def opened(state: GroupState, *ranks: int, step: int = 0) -> list[tuple[Any, bool]]:
    """Opens pushes; returns the ranks that may go on, and whether their gradient is wanted."""
    effects = [effect for rank in ranks for effect in handle(state, PushOpened(rank, name(rank), 1, step))]
    return granted(effects)


def granted(effects: Sequence[LockGroupEffect]) -> list[tuple[Any, bool]]:
    return [(effect.ticket, effect.wanted) for effect in effects if isinstance(effect, GrantPermit)]


def contributed(state: GroupState, rank: int, step: int = 0, payload: Any = "g") -> list[LockGroupEffect]:
    handle(state, PushStaged(name(rank), 1, step, 1.0, 0, payload))
    return handle(state, PushCommitted(name(rank), 1, step, defers=True))


def outcomes(effects: Sequence[LockGroupEffect]) -> list[str]:
    return [effect.outcome for effect in effects if isinstance(effect, AnswerPush)]


class TestBounds:
    @pytest.mark.parametrize(
        "mode", [consistency.Asynchronous(), consistency.Asynchronous(scale_by_staleness=True)], ids=str
    )
    def test_a_mode_that_applies_each_push_needs_no_permits(self, mode: consistency.Consistency) -> None:
        assert mode_for(mode).permit_limits(LARGE) is None
        assert mode_for(consistency.BoundedStaleness(2)).permit_limits(LARGE) is None

    def test_small_gradients_need_no_permits(self) -> None:
        mode = mode_for(consistency.Synchronous())
        assert mode.permit_limits(1 << 20) is None
        assert mode.permit_limits(2 << 20) == PermitLimits(64, 64)
        assert mode.permit_limits(64 << 20) == PermitLimits(6, 3)

    def test_no_more_workers_than_permits_never_wait(self) -> None:
        assert opened(group(4), 3, 2, 1) == [(3, True), (2, True), (1, True)]
        assert opened(group(4), 0, 1, 2, 3) == [(rank, True) for rank in range(4)]


class TestOrder:
    def test_the_last_permits_are_for_the_next_ranks(self) -> None:
        state = group(8)
        assert opened(state, 7, 6, 5, 4, 3) == [(7, True), (6, True)]
        assert opened(state, 0) == [(0, True), (3, True)]
        assert state.permits.in_use == 4

    def test_all_permits_are_in_use_while_the_next_rank_sends(self) -> None:
        assert opened(group(8), *range(8)) == [(0, True), (1, True), (2, True), (3, True)]
        assert opened(group(8, limits=PermitLimits(6, 3)), *range(8)) == [(0, True), (1, True), (2, True)]

    def test_a_rank_that_is_next_gets_in_while_the_one_before_is_folded(self) -> None:
        state = group(8, limits=PermitLimits(6, 3))
        assert opened(state, 7, 6, 0) == [(7, True), (0, True), (6, True)]
        assert not opened(state, 1)
        assert not granted(contributed(state, 0)), "three gradients are in memory"
        assert granted(handle(state, Folded(1))) == [(1, True)]

    def test_permits_are_free_when_gradients_are_folded_and_not_before(self) -> None:
        state = group(8)
        opened(state, *range(8))
        effects = contributed(state, 0)
        assert any(isinstance(effect, Fold) for effect in effects)
        assert not granted(effects)
        assert granted(handle(state, Folded(1))) == [(4, True)]

    def test_lower_ranks_come_first(self) -> None:
        state = group(8)
        opened(state, 7, 6)
        assert not opened(state, 4, 2, 3)
        assert granted(handle(state, PushWithdrawn(7, "w7"))) == [(2, True)]


class TestBackupWorkers:
    def test_a_step_is_not_decided_while_permits_are_free(self) -> None:
        state = group(4, backup_workers=2)
        assert opened(state, 3, 2, 1) == [(3, True), (2, True), (1, True)]
        assert opened(state, 0) == [(0, True)]

    def test_a_step_is_decided_when_enough_have_announced(self) -> None:
        state = group(8, backup_workers=2)
        assert opened(state, 7, 6, 5, 4, 3) == [(7, True), (6, True)]
        assert opened(state, 2) == [(2, True), (3, True)], "0 and 1 are outside of the step, so 2 is the next"
        assert opened(state, 1) == [(1, False)]

    def test_who_is_outside_is_dropped_and_the_others_are_waited_for(self) -> None:
        state = group(8, backup_workers=2)
        opened(state, 7, 6, 5, 4, 3, 2)
        assert opened(state, 0) == [(0, False)]
        assert outcomes(contributed(state, 0, payload={})) == ["dropped_late"]
        assert state.version == 0
        effects = contributed(state, 2)
        assert [fold.contributions[0].worker for fold in effects if isinstance(fold, Fold)] == ["w2"]

    def test_contributions_of_a_decided_step_are_folded(self) -> None:
        state = group(8, backup_workers=1)
        opened(state, 1, 2, 3)
        contributed(state, 1)
        effects = []
        for rank in (4, 5, 6, 7):
            effects += handle(state, PushOpened(rank, name(rank), 1, 0))
        assert [fold.contributions[0].worker for fold in effects if isinstance(fold, Fold)] == ["w1"]

    def test_a_push_that_fails_lets_one_that_was_outside_in(self) -> None:
        state = group(8, backup_workers=2)
        opened(state, 1, 2, 3, 4, 5, 0)
        handle(state, PushWithdrawn(4, "w4"))
        assert opened(state, 6) == []
        assert granted(handle(state, PushOpened(7, "w7", 1, 0))) == [(7, False)]

    def test_a_death_does_not_leave_the_step_waiting(self) -> None:
        state = group(8, backup_workers=2)
        opened(state, 7, 6, 5, 4, 3, 2)
        handle(state, WorkerFenced("w2", 1))
        effects = handle(state, WorkerReleased("w2", 1, 0))
        assert not granted(effects), "1 or 0 must come now"
        assert opened(state, 1) == [(1, True)]


class TestEnds:
    def test_a_fenced_worker_does_not_wait(self) -> None:
        state = group(8)
        opened(state, 7, 6, 4)
        (refused,) = [it for it in handle(state, WorkerFenced("w4", 1)) if isinstance(it, RefusePermit)]
        assert refused.ticket == 4
        assert isinstance(refused.error, errors.Fenced)
        assert state.permits.waiting == 0

    def test_a_dead_worker_gives_its_permit_back(self) -> None:
        state = group(8)
        opened(state, 7, 6, 5, 4)
        assert granted(handle(state, WorkerReleased("w7", 1, 0))) == [(4, True)]

    def test_a_staged_gradient_keeps_its_permit(self) -> None:
        state = group(8)
        opened(state, 7, 6, 5, 4)
        handle(state, PushStaged("w7", 1, 0, 1.0, 0, "g"))
        assert not granted(handle(state, PushWithdrawn(7, "w7")))
        assert state.permits.in_use == 2

    def test_a_repeated_push_takes_the_place_of_the_earlier_call(self) -> None:
        state = group(8)
        opened(state, 7, 6, 5, 4)
        assert granted(handle(state, PushOpened("again", "w7", 1, 0))) == [("again", True)]
        assert not handle(state, PushWithdrawn(7, "w7")), "the earlier call has no permit any more"
        (refused,) = handle(state, PushOpened("again", "w4", 1, 0))
        assert isinstance(refused, RefusePermit)
        assert refused.ticket == 4

    def test_a_step_that_closes_needs_no_more_gradients(self) -> None:
        state = group(8, backup_workers=4, limits=PermitLimits(workers=4, permits=4))
        for rank in (4, 5, 6):
            contributed(state, rank)
        assert opened(state, 0, 1) == [(0, True)]
        effects = contributed(state, 0)
        assert granted(effects) == [(1, False)]
        assert any(isinstance(effect, Fold) and effect.seals for effect in effects)
        assert outcomes(contributed(state, 1, payload={})) == ["dropped_late"]
        handle(state, FoldsDone())
        assert state.version == 1

    def test_all_are_refused_at_the_end(self) -> None:
        state = group(8)
        opened(state, 7, 6, 4, 3)
        assert sorted(state.abandon_all()) == [3, 4]

    def test_a_push_before_its_step_is_refused_at_once(self) -> None:
        state = group(8)
        with pytest.raises(errors.BadRequest, match="before it may begin"):
            opened(state, 3, step=1)

    def test_nobody_joins_before_the_rank_whose_place_is_reserved(self) -> None:
        state = group(8)
        handle(state, WorkerReleased("w0", 1, 0))
        opened(state, 7, 6, 5, 1)
        handle(state, WorkerAdmitted("new", 2, 0))
        assert state.clocks["new"].steps == 1


# A whole step on some servers, in any order of what can happen.


@dataclass
class Server:
    state: GroupState
    queue: int = 0  # contributions that wait to be folded
    folded: int = 0
    sealed: bool = False
    asked: dict[str, str] = field(default_factory=dict)  # worker -> opened, granted, unwanted, staged or committed
    summed: list[tuple[int, int]] = field(default_factory=list)

    def handle(self, event: Any) -> None:
        effects = self.state.handle(event)
        if self.state.permits.waiting:
            effects += self.state.handle(Folded(self.folded))
        self.state.validate()
        for effect in effects:
            match effect:
                case GrantPermit():
                    self.asked[effect.ticket] = "granted" if effect.wanted else "unwanted"
                case RefusePermit():
                    self.asked.pop(effect.ticket, None)
                case Fold():
                    self.queue += len(effect.contributions)
                    self.summed += [it.place for it in effect.contributions]
                    self.sealed |= effect.seals
                case Apply():
                    self.summed += [it.place for it in effect.contributions[effect.folded :]]
                    assert [it.place for it in effect.contributions] == self.summed == sorted(self.summed)
                    self.folded, self.queue, self.sealed = self.folded + self.queue, 0, False
        self.check_memory()

    def check_memory(self) -> None:
        """Counts gradients as the server holds them, without the state machine's own count."""
        received = [worker for worker, at in self.asked.items() if at in ("granted", "full")]
        assert len(received) + self.state.mode.held + self.queue <= LIMITS.permits

    def fold_one(self) -> None:
        self.queue, self.folded = self.queue - 1, self.folded + 1
        if self.state.permits.waiting:
            self.handle(Folded(self.folded))
        if self.sealed and not self.queue:
            self.handle(FoldsDone())


class Round:
    """Workers that push one step to all servers: they stage it everywhere, then commit it everywhere."""

    def __init__(self, workers: int, backups: int, servers: int, chance: random.Random) -> None:
        self.chance = chance
        self.servers = [Server(group(workers, backups)) for _ in range(servers)]
        self.alive = [name(rank) for rank in range(workers)]
        self.silent: list[str] = []

    def moves(self) -> list[Any]:
        found: list[Any] = []
        for server in self.servers:
            if server.queue:
                found.append(server.fold_one)
            if server.state.version:
                continue
            for worker in self.alive:
                if worker not in self.silent and (move := self.move(server, worker)):
                    found.append(move)
        return found

    def move(self, server: Server, worker: str) -> Any:
        at = server.asked.get(worker)
        if at is None:
            return lambda: self.open(server, worker)
        if at in ("granted", "unwanted"):
            return lambda: self.stage(server, worker, at)
        ready = all(it.asked.get(worker) in ("full", "empty", "committed") or it.state.version for it in self.servers)
        if at in ("full", "empty") and ready:
            return lambda: self.commit(server, worker)
        return None

    def open(self, server: Server, worker: str) -> None:
        server.asked[worker] = "opened"
        server.handle(PushOpened(worker, worker, 1, 0))

    def stage(self, server: Server, worker: str, at: str) -> None:
        server.asked[worker] = "full" if at == "granted" else "empty"
        server.handle(PushStaged(worker, 1, 0, 1.0, 0, "g" if at == "granted" else {}))

    def commit(self, server: Server, worker: str) -> None:
        server.asked[worker] = "committed"
        server.handle(PushCommitted(worker, 1, 0, defers=True))

    def break_call(self) -> None:
        """A connection breaks; the worker will repeat its push."""
        server = self.chance.choice(self.servers)
        calls = [worker for worker, at in server.asked.items() if at in ("opened", "granted")]
        if calls:
            worker = self.chance.choice(calls)
            del server.asked[worker]
            server.handle(PushWithdrawn(worker, worker))

    def die(self) -> None:
        """A worker is declared lost: fenced on all servers, then released with the most steps that it committed."""
        worker = self.alive.pop(self.chance.randrange(len(self.alive)))
        committed = int(any(server.asked.get(worker) == "committed" for server in self.servers))
        for server in self.servers:
            server.handle(WorkerFenced(worker, 1))
        for server in self.servers:
            if server.asked.get(worker) in ("full", "granted", "opened"):
                server.asked.pop(worker)
            server.handle(WorkerReleased(worker, 1, committed))

    def check_finish(self) -> None:
        while moves := self.moves():
            self.chance.choice(moves)()
        stuck = [server.asked for server in self.servers if not server.state.version]
        assert not stuck or not self.alive or self.excused(), stuck

    def excused(self) -> bool:
        """Whether no step is due: nobody is left who contributes, so the workers finished it without gradients."""
        return (
            all(
                server.state.version or not any(at in ("opened", "granted", "full") for at in server.asked.values())
                for server in self.servers
            )
            and len(self.silent) > 0
        )


CHANCE = st.randoms(use_true_random=False)


@settings(max_examples=draws(40), deadline=None)
@given(CHANCE, st.integers(5, 9), st.integers(0, 2), st.integers(1, 3))
def test_a_step_closes_in_any_order_on_several_servers(
    chance: random.Random, workers: int, backups: int, servers: int
) -> None:
    step = Round(workers, backups, servers, chance)
    step.silent = chance.sample(step.alive, chance.randint(0, backups))
    step.check_finish()
    assert all(server.state.version == 1 for server in step.servers)


@settings(max_examples=draws(40), deadline=None)
@given(CHANCE, st.integers(5, 9), st.integers(0, 2), st.integers(1, 3), st.integers(0, 4))
def test_a_step_closes_although_calls_break_and_workers_die(
    chance: random.Random, workers: int, backups: int, servers: int, faults: int
) -> None:
    step = Round(workers, backups, servers, chance)
    for _ in range(faults):
        for _ in range(chance.randint(0, 12)):
            if moves := step.moves():
                chance.choice(moves)()
        if chance.random() < 0.5 and len(step.alive) > 1:
            step.die()
        else:
            step.break_call()
    step.check_finish()
    assert all(server.state.version == 1 for server in step.servers)
