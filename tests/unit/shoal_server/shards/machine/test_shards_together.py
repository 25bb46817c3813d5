"""Seeded simulation of several shards and of workers that take steps on all of them and die at any moment.

The shards are the real state machines. The workers follow `shoal._training.parameters`, one small action at a time:
they pull from each shard, pull again where shards are at different steps, stage on each, and commit on each. Workers
that overlap follow the order of `shoal._training.overlap`: they pull the next step's values before they push this step.
At times a worker has no data and skips a step, or a shard finds NaN in its part of a push. The coordinator fences a
dead worker on all shards before it releases it on any. A checkpoint may be cut at any moment. It must contain on all
shards each push that is committed on one of them. The next action is random.
"""

import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal import consistency
from shoal._wire.cursor import Cursor
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import (
    AnswerAdmission,
    AnswerCut,
    AnswerFence,
    AnswerPulls,
    AnswerPush,
    CutRequested,
    FoldsDone,
    PullRequested,
    PushCommitted,
    PushStaged,
    WorkerAdmitted,
    WorkerFenced,
    WorkerReleased,
)
from shoal_server.shards.machine.mode import Apply
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.machine.worker_progress import WorkerProgress
from support.run_lengths import size

GOAL = 12


@dataclass
class Worker:
    """One life of a worker: a generator of actions, resumed when it is its turn."""

    name: str
    life: int
    rank: int
    step: int
    overlaps: bool
    script: Iterator[bool] = field(init=False)  # made from the worker itself
    pulls: int = 0  # so far: the last one's number
    staged: int = -1  # the last step of which shards may hold a gradient
    headers: dict[int, int] = field(default_factory=dict)  # by shard: the step that its last pull was answered


class Simulation:
    """Shards, and workers some of which overlap if they may."""

    def __init__(
        self,
        seed: int,
        mode: consistency.Consistency,
        shards: int,
        workers: int,
        *,
        overlap: bool = False,
        cut_chance: float = 0.0,
    ) -> None:
        self.cut_chance, self.cuts = cut_chance, 0
        self.random = random.Random(seed)
        self.mode, self.overlap = mode, overlap
        self.shards = [GroupState(f"job/{index}", mode_for(mode)) for index in range(shards)]
        self.applied: list[list[str]] = [[] for _ in self.shards]  # by shard: payloads, in order
        self.finished: list[dict[str, int]] = [{} for _ in self.shards]  # by shard and worker: steps finished there
        self.asked_ahead = 0  # pulls that were let through for a step whose last push had not come
        self.workers: list[Worker] = []
        self.outcomes: dict[str, list[str]] = {}  # payload -> what each shard answered its commit
        self.lives = 0
        for rank in range(workers):
            self.admit(rank)

    def admit(self, rank: int) -> None:
        self.lives += 1
        name = f"w{rank}"
        step = max(self.send(index, WorkerAdmitted(name, self.lives, rank))[-1].step for index in self.indices)
        worker = Worker(name, self.lives, rank, step, self.overlap and self.random.random() < 0.8)
        worker.script = self.live(worker)
        self.workers.append(worker)

    @property
    def indices(self) -> range:
        return range(len(self.shards))

    def send(self, index: int, event: Any) -> list[Any]:
        finished = self.finished[index]
        effects = self.shards[index].handle(event)
        self.shards[index].validate()
        match event:
            case WorkerAdmitted():
                admission = effects[-1]
                assert isinstance(admission, AnswerAdmission)
                finished[event.worker] = admission.step
            case WorkerReleased():
                finished.pop(event.worker, None)
            case PullRequested():
                finished[event.worker] = max(finished[event.worker], event.step)
            case PushCommitted():
                finished[event.worker] = event.step + 1
            case CutRequested():
                for worker, progress in event.progress.items():
                    finished[worker] = max(finished[worker], progress.finished)
        for effect in effects:
            match effect:
                case Apply(contributions):
                    self.applied[index] += [part.payload for part in contributions]
                case AnswerPulls(tickets, step):
                    for ticket in tickets:
                        self.check_answered(index, ticket, step)
        return effects

    def check_answered(self, index: int, ticket: tuple[str, int, int, int], step: int) -> None:
        """A shard lets a pull through, for the step that was wanted or one after it."""
        name, life, number, wanted = ticket
        assert step >= wanted
        finished = self.finished[index]
        if isinstance(self.mode, consistency.BoundedStaleness):
            assert wanted - min(finished.values()) <= self.mode.bound, f"{name} is too far ahead: {finished}"
        self.asked_ahead += finished[name] < wanted
        for worker in self.workers:
            if (worker.life, worker.pulls) == (life, number):
                worker.headers[index] = step

    def live(self, worker: Worker) -> Iterator[bool]:
        """The client's algorithm; yields wherever something else may happen first, True while it waits."""
        fetched = None  # the step that there are values of
        while worker.step < GOAL:
            if self.random.random() < 0.3:
                worker.step = yield from self.pull(worker, worker.step)
                yield from self.skip(worker)
                continue
            if fetched != worker.step:
                worker.step = yield from self.pull(worker, worker.step)
            if worker.overlaps:
                fetched = yield from self.pull(worker, worker.step, ahead=1)
            payload, refuses = f"{worker.life}@{worker.step}", None
            if self.random.random() < 0.3:
                payload, refuses = "NaN", self.random.choice(self.indices)
            yield from self.stage(worker, payload, refuses)
            if refuses is None:
                yield from self.commit(worker, payload)
            elif worker.overlaps:
                worker.step += 1
            else:
                yield from self.skip(worker)

    def skip(self, worker: Worker) -> Iterator[bool]:
        """Once a gradient of this step may be staged somewhere, in two phases: that must not be taken for this."""
        if worker.staged == worker.step:
            yield from self.stage(worker, None)
            yield from self.commit(worker, None)
            return
        steps = [worker.step + 1]
        for index in self.shuffled():
            self.send(index, PushStaged(worker.name, worker.life, worker.step, 0.0, 0, None))
            steps.append(self.send(index, PushCommitted(worker.name, worker.life, worker.step))[-1].step)
            yield False
        worker.step = max(steps)

    def stage(self, worker: Worker, payload: str | None, refuses: int | None = None) -> Iterator[bool]:
        worker.staged = worker.step
        for index in self.shuffled():
            if index != refuses:
                cursor = Cursor(worker.life, worker.step)
                self.send(index, PushStaged(worker.name, worker.life, worker.step, 1.0, 0, payload, cursor))
            yield False

    def commit(self, worker: Worker, payload: str | None) -> Iterator[bool]:
        if payload:
            self.outcomes[payload] = []
        steps = [worker.step + 1]
        for index in self.shuffled():
            answer = self.send(index, PushCommitted(worker.name, worker.life, worker.step, defers=True))[-1]
            assert isinstance(answer, AnswerPush)
            yield False  # while the server folds
            self.send(index, FoldsDone())
            if payload:
                self.outcomes[payload].append(answer.outcome)
            steps.append(answer.step)
            yield False
        worker.step = max(steps)

    def pull(self, worker: Worker, step: int, ahead: int = 0) -> Generator[bool, None, int]:
        """From a worker that has finished `step` steps; the step that it gets the values of."""
        while True:
            worker.headers = {}
            worker.pulls += 1
            ticket = (worker.name, worker.life, worker.pulls, step + ahead)
            for index in self.shuffled():
                self.send(index, PullRequested(ticket, worker.name, worker.life, step, ahead))
                yield False
            while len(worker.headers) < len(self.shards):
                yield True
            newest = max(step + ahead, *worker.headers.values())
            if all(header == newest for header in worker.headers.values()):
                return newest
            step = newest - ahead

    def shuffled(self) -> list[int]:
        return self.random.sample(self.indices, len(self.shards))

    def kill(self, worker: Worker) -> None:
        self.workers.remove(worker)
        for index in self.indices:  # a server goes on folding when the worker that it folds for has died
            self.send(index, FoldsDone())
        committed = 0
        for index in self.shuffled():
            answer = self.send(index, WorkerFenced(worker.name, worker.life))[-1]
            assert isinstance(answer, AnswerFence)
            committed = max(committed, answer.committed_steps)
        for index in self.shuffled():
            self.send(index, WorkerReleased(worker.name, worker.life, committed))

    def check_cut(self) -> None:
        """What a coordinator does for a checkpoint, while all commits are held back: the cut's version and step."""
        furthest: dict[str, WorkerProgress] = {}
        for shard in self.shards:
            for name, progress in shard.progress().items():
                furthest[name] = furthest.get(name, progress).joined(progress)
        answers = [self.send(index, CutRequested(furthest))[-1] for index in self.shuffled()]
        assert all(isinstance(answer, AnswerCut) for answer in answers)
        backups = getattr(self.mode, "backup_workers", 0)
        if not backups:
            assert len({(answer.version, answer.step) for answer in answers}) == 1, f"the shards differ: {answers}"
            assert len({frozenset(applied) for applied in self.applied}) == 1, "a push is in the cut in part"
        cursors: dict[str, Cursor] = {}
        for answer in answers:
            for name, cursor in answer.cursors.items():
                cursors[name] = max(cursors.get(name, cursor), cursor)
        for worker in self.workers:  # its data is where the last of its pushes that is in the cut was
            prefix = f"{worker.life}@"
            counted = {payload for applied in self.applied for payload in applied if payload.startswith(prefix)}
            last = max((int(payload.removeprefix(prefix)) for payload in counted), default=None)
            cursor = cursors.get(worker.name)
            known = cursor.consumed if cursor and cursor.lease == worker.life else None
            if backups:  # what was dropped is spent, too
                assert last is None or (known is not None and known >= last)
            else:
                assert known == last, f"{worker.name} is at {known}, and its push {last} counts"
        self.cuts += 1

    def check_run(self, deaths: int) -> None:
        """Lets everybody act in drawn order until all are through; AssertionError if all wait for each other."""
        waited = 0
        while self.workers:
            worker = self.random.choice(self.workers)
            if self.random.random() < self.cut_chance:
                self.check_cut()
            if deaths and self.random.random() < 0.03:
                deaths -= 1
                self.kill(worker)
                if self.random.random() < 0.7 or not self.workers:
                    self.admit(worker.rank)
                continue
            try:
                waits = next(worker.script)
            except StopIteration:  # through: it leaves, as a finished worker does
                self.kill(worker)
                waits = False
            waited = waited + 1 if waits else 0
            stuck = [(each.name, each.step, each.headers) for each in self.workers]
            assert waited <= 200 * len(self.workers), f"everybody waits for everybody: {stuck}"


MODES = [
    consistency.Synchronous(),
    consistency.Synchronous(backup_workers=1),
    consistency.Synchronous(backup_workers=2),
    consistency.Asynchronous(),
    consistency.BoundedStaleness(0),
    consistency.BoundedStaleness(1),
    consistency.BoundedStaleness(2),
]
WAYS = [pytest.param(mode, False, id=f"{mode}") for mode in MODES]
WAYS += [pytest.param(mode, True, id=f"{mode} overlapping") for mode in MODES if mode.overlaps]


@pytest.mark.parametrize(("mode", "overlap"), WAYS)
@pytest.mark.parametrize("deaths", [0, 6], ids=["nobody dies", "deaths"])
@pytest.mark.parametrize("cut_chance", [0.0, 0.1], ids=["no checkpoints", "checkpoints"])
def test_everybody_gets_through_and_every_push_is_complete(
    mode: consistency.Consistency, overlap: bool, deaths: int, cut_chance: float
) -> None:
    asked_ahead = 0
    seeds = size(8, 30)
    for seed in range(seeds):
        simulation = Simulation(
            seed, mode, shards=1 + seed % 3, workers=3 + seed % 2, overlap=overlap, cut_chance=cut_chance
        )
        simulation.check_run(deaths)
        assert bool(simulation.cuts) == bool(cut_chance)
        asked_ahead += simulation.asked_ahead
        for applied in simulation.applied:
            assert len(applied) == len(set(applied)), f"seed {seed}: a push counted twice"
            assert "NaN" not in applied, f"seed {seed}: a push that was refused counted"
        if not getattr(mode, "backup_workers", 0):
            # Whole: the same pushes on every shard, those of the dead included.
            assert len({frozenset(applied) for applied in simulation.applied}) == 1, f"seed {seed}: a push is torn"
        counted = {payload for applied in simulation.applied for payload in applied}
        accepted = {payload for payload, outcomes in simulation.outcomes.items() if "accepted" in outcomes}
        assert accepted <= counted, f"seed {seed}: what was acknowledged is lost"
    assert (asked_ahead > 15 * seeds) == overlap
