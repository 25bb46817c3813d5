"""Norm exchange: steps of several servers close with the same gradients and the same norm, in every order of events."""

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import consistency, errors, initializers, optim
from shoal._memory.buffers import BufferPool
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal.status import UndeliveredNorm
from shoal.variables import Variable
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.group.pending_cut import PendingCut
from shoal_server.shards.machine import events
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.mode import Apply, Fold
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.machine.worker_progress import WorkerProgress
from shoal_server.shards.store import ShardStore
from shoal_server.shards.values.shard import JobShardConfig, Peer, Stamp
from support.run_lengths import draws

SERVERS = ("s0", "s1", "s2")


def part_of(server: str, step: int) -> float:
    """The squares of a step's mean on a server."""
    return 10.0**step + int(server[1:])


class Machine:
    """The state machine of one server, with a shell that carries out its effects later or at once."""

    def __init__(self, name: str, servers: Sequence[str]) -> None:
        self.name, self.others = name, [other for other in servers if other != name]
        self.state = GroupState("job", mode_for(consistency.Synchronous(), shares_norms=True), peers=self.others)
        self.norms: list[tuple[str, events.NormReceived]] = []  # calls to other servers
        self.folding = 0  # FoldsDone events that must follow
        self.applied: list[tuple[int, tuple[str, ...], float | None]] = []
        self.answered: set[Any] = set()
        self.cut: events.AnswerCut | None = None
        self.holds = False  # whether a cut holds the commits

    def handle(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect]:
        effects = self.state.handle(event)
        for effect in effects:
            match effect:
                case Fold(seals=True):
                    self.folding += 1
                case events.MeasureNorm():
                    squares = (part_of(self.name, self.state.mode.next_step(0)),)
                    self.handle(events.NormMeasured(squares))
                case events.ShareNorm(step, squares):
                    told = events.NormReceived(self.name, step, squares)
                    self.norms += [(other, told) for other in self.others]
                case Apply(contributions, squares=squares):
                    workers = tuple(sorted(it.worker for it in contributions))
                    self.applied.append((contributions[0].step, workers, squares))
                case events.AnswerPulls(tickets):
                    self.answered |= {*tickets}
                case events.AnswerCut():
                    self.cut, self.holds = effect, False
        self.state.validate()
        return effects


class Worker:
    """A worker that stages its push on all servers, commits it on all, and pulls from all, or skips a step."""

    def __init__(self, name: str, incarnation: int, first: int, cluster: "Cluster") -> None:
        self.name, self.incarnation, self.first, self._cluster = name, incarnation, first, cluster
        self.alive = True

    def run(self, steps: int) -> Iterator[Machine | None]:
        """Yields the server at which the next commit goes through, or None, before each action."""
        servers, draw, me = self._cluster.machines, self._cluster.draw, (self.name, self.incarnation)
        for step in range(self.first, steps):
            tickets = []
            for server in servers:
                tickets.append((server, object()))
                yield None
                server.handle(events.PullRequested(tickets[-1][1], *me, step))
            while not all(ticket in server.answered for server, ticket in tickets):
                yield None
            skips = draw.random() < 0.2
            phases = ("both",) if skips else ("stage", "commit")
            for phase in phases:
                for server in draw.sample(servers, len(servers)):
                    yield server if phase != "stage" else None
                    if phase != "commit":
                        payload = None if skips else object()
                        server.handle(events.PushStaged(*me, step, 0.0 if skips else 1.0, 0, payload))
                    if phase != "stage":
                        server.handle(events.PushCommitted(*me, step, defers=draw.random() < 0.8))


class Cluster:
    """Some servers and workers, whose actions come in a random order."""

    STEPS = 4

    def __init__(self, draw: random.Random, servers: int, workers: int, *, deaths: int, cuts: int) -> None:
        self.draw = draw
        self.machines = [Machine(name, SERVERS[:servers]) for name in SERVERS[:servers]]
        self._deaths, self._cuts, self._lives = deaths, cuts, 0
        self._running: list[tuple[Worker, Iterator[Machine | None], Machine | None]] = []
        self._ranks: dict[str, int] = {}
        for rank in range(workers):
            self._admit(f"w{rank}", rank)
        self._busy: Iterator[None] | None = None  # calls of the coordinator
        self._readers: list[object] = []

    def _admit(self, name: str, rank: int) -> None:
        self._lives += 1
        self._ranks[name] = rank
        event = events.WorkerAdmitted(name, self._lives, rank)
        entries = [events.only(it.handle(event), events.AnswerAdmission).step for it in self.machines]
        worker = Worker(name, self._lives, max(entries), self)
        self._running.append((worker, worker.run(self.STEPS), None))

    def _bury(self, worker: Worker) -> Iterator[None]:
        """Fences and releases a worker, and lets another one take its rank."""
        committed = []
        for machine in self.machines:
            fenced = events.WorkerFenced(worker.name, worker.incarnation)
            committed.append(events.only(machine.handle(fenced), events.AnswerFence).committed_steps)
            yield
        for machine in self.draw.sample(self.machines, len(self.machines)):
            machine.handle(events.WorkerReleased(worker.name, worker.incarnation, max(committed)))
            yield
        self._admit(worker.name, self._ranks[worker.name])

    def _cut(self) -> Iterator[None]:
        """Takes a cut, which must be the same state on all servers."""
        progress: dict[str, WorkerProgress] = {}
        for machine in self.machines:
            machine.holds, machine.cut = True, None
            yield
        for machine in self.machines:
            for worker, found in machine.state.progress().items():
                progress[worker] = found.joined(progress.get(worker, found))
        for machine in self.draw.sample(self.machines, len(self.machines)):
            machine.handle(events.CutRequested(progress))
            yield
        while any(machine.cut is None for machine in self.machines):
            yield
        assert len({(it.cut.version, it.cut.step) for it in self.machines if it.cut}) == 1

    def _choices(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        found += [partial(self._step, index) for index in range(len(self._running)) if self._may(index)]
        for machine in self.machines:
            found += [partial(self._fold, machine)] * bool(machine.folding)
            found += [partial(self._tell, machine)] * bool(machine.norms)
        if self._busy:
            found.append(self._coordinate)
        return found

    def _may(self, index: int) -> bool:
        commits_at = self._running[index][2]
        return not (commits_at and commits_at.holds)

    def _step(self, index: int) -> None:
        worker, actions, _ = self._running[index]
        try:
            self._running[index] = worker, actions, next(actions)
        except StopIteration:
            del self._running[index]
            self._busy = self._chain(self._busy, self._leave(worker))

    def _leave(self, worker: Worker) -> Iterator[None]:
        committed = self.STEPS
        for machine in self.machines:
            machine.handle(events.WorkerReleased(worker.name, worker.incarnation, committed))
            yield

    def _fold(self, machine: Machine) -> None:
        machine.folding -= 1
        machine.handle(events.FoldsDone())

    def _tell(self, machine: Machine) -> None:
        """Delivers a call to another server, perhaps not for the last time."""
        index = self.draw.randrange(len(machine.norms))
        other, told = machine.norms[index]
        next(it for it in self.machines if it.name == other).handle(told)
        if self.draw.random() < 0.7:
            del machine.norms[index]

    def _coordinate(self) -> None:
        assert self._busy
        if next(self._busy, "end") == "end":
            self._busy = None

    @staticmethod
    def _chain(first: Iterator[None] | None, second: Iterator[None]) -> Iterator[None]:
        yield from first or ()
        yield from second

    def run(self) -> None:
        for _ in range(20_000):
            choices = self._choices()
            if not choices:
                break
            self.draw.choice(choices)()
            self._disturb()
        else:
            raise AssertionError("the cluster never comes to rest")
        assert not self._running

    def _disturb(self) -> None:
        chance = self.draw.random()
        if chance < 0.05:
            ticket = object()
            self._readers.append(ticket)
            self.draw.choice(self.machines).handle(events.PullRequested(ticket, "", 0, 0))
        elif chance < 0.1 and self._cuts and not self._busy:
            self._cuts -= 1
            self._busy = self._cut()
        elif chance < 0.13 and self._deaths and self._running and not self._busy:
            self._deaths -= 1
            worker, _, _ = self._running.pop(self.draw.randrange(len(self._running)))
            self._busy = self._bury(worker)

    def check(self) -> None:
        """All servers have applied the same steps, with the same gradients, and the norm of all servers' parts."""
        first, *others = self.machines
        assert all(machine.applied == first.applied for machine in others)
        for step, _, squares in first.applied:
            assert squares == sum(part_of(machine.name, step) for machine in self.machines)
        answered = set[Any]().union(*(machine.answered for machine in self.machines))
        assert {*self._readers} <= answered
        assert not any(machine.state.mode.awaits_norm for machine in self.machines)


@settings(max_examples=draws(60))
@given(st.integers(0, 2**32), st.integers(2, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_all_servers_close_the_same_steps_with_the_same_norm(
    seed: int, servers: int, workers: int, deaths: int, cuts: int
) -> None:
    cluster = Cluster(random.Random(seed), servers, workers, deaths=deaths, cuts=cuts)
    cluster.run()
    cluster.check()


# Lock groups.

NAMES = ("a", "b", "c")
SIZES = {"a": 7, "b": 33, "c": 2}


class Wire:
    """Carries norms between lock groups: at once, or when the test says so."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.groups: dict[str, LockGroup] = {}
        self.kept: list[tuple[str, int, Sequence[float]]] = []
        self.at_once, self.closed = at_once, 0

    def outbox(self, server: str) -> "WireOutbox":
        return WireOutbox(self, server)

    def carry(self) -> None:
        while self.kept:
            server, step, squares = self.kept.pop(0)
            for name, group in self.groups.items():
                if name != server:
                    group.receive_norm(server, step, squares)


@dataclasses.dataclass
class WireOutbox:
    wire: Wire
    server: str

    def send(self, step: int, squares: Sequence[float]) -> None:
        self.wire.kept.append((self.server, step, squares))
        if self.wire.at_once:
            self.wire.carry()

    def undelivered(self) -> Sequence[UndeliveredNorm]:
        return ()

    def close(self) -> None:
        self.wire.closed += 1


def groups_on(servers: int, mode: consistency.Consistency, wire: Wire) -> list[LockGroup]:
    """Groups of one job, with its variables divided over servers."""
    variables = {name: Variable((SIZES[name],), "float64", initializers.Zeros()) for name in NAMES}
    optimizer = optim.Momentum(0.5, clip_norm=0.7, groups=[optim.VariableGroup("c", frozen=True)])
    for index in range(servers):
        arenas = [
            ArenaLayout(
                variables[name].dtype, variables[name].aggregation, (Slice(name, 0, SIZES[name], 0),), SIZES[name]
            )
            for name in NAMES[index::servers]
        ]
        layouts = [ShardLayout(NAMES.index(arena.slices[0].variable), (arena,)) for arena in arenas]
        peers = tuple(Peer(f"s{other}", "127.0.0.1:1") for other in range(servers) if other != index)
        config = JobShardConfig("job", 1, variables, optimizer, mode, 0, peers)
        group = LockGroup(config, layouts, norms=wire.outbox(f"s{index}"))
        wire.groups[f"s{index}"] = group
        for rank in range(2):
            group.admit(f"w{rank}", 1, rank)
    return [*wire.groups.values()]


def push(
    groups: Sequence[LockGroup], rank: int, step: int, gradients: dict[str, np.ndarray], squares: float | None = None
) -> None:
    for commits in (False, True):
        for group in groups:
            if commits:
                group.commit(Stamp(f"w{rank}", 1, step))
                continue
            shards = group.select([shard.layout.shard for shard in group.shards])
            parts = {
                slab: np.concatenate([gradients[arena.slices[0].variable] for arena in slab.arenas])
                for slab in shards.layout.slabs
            }
            payload = shards.payload(parts, BufferPool(0, 0.0))
            group.stage(Stamp(f"w{rank}", 1, step), rank + 1.0, step, payload, squares=squares)


def values_of(groups: Sequence[LockGroup]) -> dict[str, np.ndarray]:
    return {
        arena.layout.slices[0].variable: arena.values.copy()
        for group in groups
        for shard in group.shards
        for arena in shard.arenas
    }


def gradients_of(rank: int, step: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng([rank, step])
    return {name: draws.standard_normal(SIZES[name]) for name in NAMES}


@pytest.mark.parametrize("mode", [consistency.Synchronous(), consistency.Asynchronous()], ids=str)
def test_any_number_of_servers_gives_the_same_bits(mode: consistency.Consistency) -> None:
    """One server measures the gradients itself. The others share norms, or get that of each push."""
    found = []
    for servers in (1, 2, 3):
        groups = groups_on(servers, mode, Wire())
        for step in range(4):
            for rank in (1, 0):
                pushed = gradients_of(rank, step)
                squares = math.fsum(float(np.sum(pushed[name] ** 2)) for name in "ab")
                push(groups, rank, step, pushed, None if mode.joins_gradients else squares)
        assert {group.version for group in groups} == {4 if mode.joins_gradients else 8}
        found.append(values_of(groups))
    assert np.abs(found[0]["b"]).max() > 0.1
    assert not found[0]["c"].any()
    for other in found[1:]:
        for name, expected in found[0].items():
            if mode.joins_gradients:
                np.testing.assert_array_equal(other[name], expected)
            else:  # the worker adds the squares in another order than the server
                np.testing.assert_allclose(other[name], expected, rtol=1e-14)


class Ticket:
    def __init__(self) -> None:
        self.answered, self.error = False, ""

    def answer(self, step: int) -> None:
        del step
        self.answered = True

    def refuse(self, error: errors.ShoalError) -> None:
        self.error = error.message


def sealed(wire: Wire) -> list[LockGroup]:
    """Two groups with a step that waits for the norms."""
    groups = groups_on(2, consistency.Synchronous(), wire)
    for rank in range(2):
        push(groups, rank, 0, gradients_of(rank, 0))
    assert [group.version for group in groups] == [0, 0]
    return groups


def test_readers_and_cuts_get_the_update_of_a_step_that_waits_for_norms() -> None:
    wire = Wire(at_once=False)
    groups = sealed(wire)
    reader, worker = Ticket(), Ticket()
    groups[0].pull(reader, Stamp("", 0, 0))
    groups[0].pull(worker, Stamp("w0", 1, 1))
    assert not reader.answered
    assert not worker.answered
    wire.kept.append(("s1", 0, wire.kept[-1][2]))  # a repeated call
    wire.carry()
    assert reader.answered
    assert worker.answered
    cut = groups[0].cut(groups[0].progress())
    assert (cut.answer.version, cut.answer.step) == (1, 1)
    for snapshot in cut.snapshots:
        snapshot.end_saving()
    wire.groups["s0"].receive_norm("s1", 0, [5.0])  # of a closed step
    assert groups[0].version == 1


def test_a_cut_ends_when_the_norms_do_not_come_or_the_job_is_dropped() -> None:
    wire = Wire(at_once=False)
    groups = sealed(wire)
    with pytest.raises(errors.Overloaded, match="job: the norms of a step did not arrive"):
        groups[0].cut(groups[0].progress(), within_s=0.0)
    wire.carry()
    assert [group.version for group in groups] == [1, 1]
    reader = Ticket()
    groups = sealed(wire)
    groups[0].pull(reader, Stamp("", 0, 0))
    groups[0].close()
    assert "gone from this server" in reader.error
    assert wire.closed == 1


def test_a_later_generation_ends_the_wait_for_norms_and_refuses_earlier_ones() -> None:
    wire = Wire(at_once=False)
    config = groups_on(2, consistency.Synchronous(), wire)[0].config
    layout = wire.groups["s0"].shards[0].layout
    store = ShardStore(norms_of=lambda job: wire.outbox(f"s{2 - len(job.peers)}"))
    store.create(config, [layout])
    group, reader, worker = store.hosted.group("job", 1), Ticket(), Ticket()
    group.admit("w0", 1, 0)
    push([group], 0, 0, gradients_of(0, 0))
    group.pull(worker, Stamp("w0", 1, 1))
    group.pull(reader, Stamp("", 0, 0))
    store.create(dataclasses.replace(config, generation=2), [layout])
    assert "gone from this server" in reader.error
    assert reader.error == worker.error
    assert wire.closed == 1
    with pytest.raises(errors.StaleGeneration):
        store.hosted.group("job", 1)
    assert not store.hosted.group("job", 2).version


@pytest.mark.parametrize("wrong", [math.nan, -1.0, -math.inf])
def test_norms_that_are_not_numbers_are_refused(wrong: float) -> None:
    wire = Wire(at_once=False)
    groups = sealed(wire)
    with pytest.raises(errors.BadRequest, match="the norm of s1 has a sum of squares"):
        groups[0].receive_norm("s1", 0, [1.0, wrong])
    with pytest.raises(errors.BadRequest, match="'s7' is not another server of the job"):
        groups[0].receive_norm("s7", 0, [1.0])
    with pytest.raises(errors.BadRequest, match="s1 shares the norm of step 1, but the open step is 0"):
        groups[0].receive_norm("s1", 1, [1.0])
    wire.carry()
    assert [group.version for group in groups] == [1, 1]
    groups = groups_on(2, consistency.Asynchronous(), Wire())
    with pytest.raises(errors.BadRequest, match="job: a push has a sum of squares"):
        push(groups, 0, 0, gradients_of(0, 0), wrong)
    with pytest.raises(errors.BadRequest, match="the header of a push needs `squares`"):
        push(groups, 0, 0, gradients_of(0, 0))
    push(groups, 0, 0, gradients_of(0, 0), math.inf)  # squares of float64 may overflow
    assert not values_of(groups)["b"].any()


def test_a_failed_update_ends_the_wait_of_a_cut() -> None:
    pending = PendingCut("job")
    pending.refuse(errors.InternalError("an update failed"))
    pending.take(lambda: pytest.fail("nobody waits for this cut"))
    with pytest.raises(errors.InternalError, match="an update failed"):
        pending.wait(0.0)
