"""Several shards, workers that take steps over all of them, and deaths at any moment: a seeded simulation.

The shards are the real state machines. The workers do what `shoal._parameters` does, one small action at a time: pull
from each shard, pull again where shards are at different steps, stage on each, commit on each. The coordinator fences a
dead worker everywhere before it releases it anywhere. Which action comes next is drawn.
"""

import random
from dataclasses import dataclass, field

import pytest

from shoal import consistency
from shoal_server.consistency import Apply, mode_for
from shoal_server.shard_events import (
    AnswerFence,
    AnswerPull,
    AnswerPush,
    PullRequested,
    PushCommitted,
    PushStaged,
    WorkerAdmitted,
    WorkerFenced,
    WorkerReleased,
)
from shoal_server.shard_state import ShardState

GOAL = 12


@dataclass
class Worker:
    """One life of a worker: a generator of actions, resumed when it is its turn."""

    name: str
    life: int
    rank: int
    step: int
    script: object = None
    headers: dict[int, int] = field(default_factory=dict)  # by shard: the step that its pull was answered


class Simulation:
    def __init__(self, seed, mode, shards, workers):
        self.random = random.Random(seed)
        self.mode = mode
        self.shards = [ShardState(f"job/{index}", mode_for(mode)) for index in range(shards)]
        self.applied = [[] for _ in self.shards]  # by shard: payloads, in order
        self.workers: list[Worker] = []
        self.outcomes: dict[str, list[str]] = {}  # payload -> what each shard answered its commit
        self.lives = 0
        for rank in range(workers):
            self.admit(rank)

    def admit(self, rank):
        self.lives += 1
        name = f"w{rank}"
        step = max(self.send(index, WorkerAdmitted(name, self.lives, rank))[-1].step for index in self.indices)
        worker = Worker(name, self.lives, rank, step)
        worker.script = self.live(worker)
        self.workers.append(worker)

    @property
    def indices(self):
        return range(len(self.shards))

    def send(self, index, event):
        effects = self.shards[index].handle(event)
        self.shards[index].validate()
        for effect in effects:
            match effect:
                case Apply(contributions):
                    self.applied[index] += [part.payload for part in contributions]
                case AnswerPull((life, asked), step):
                    for worker in self.workers:
                        if worker.life == life and worker.step == asked:
                            worker.headers[index] = step
        return effects

    def live(self, worker):
        """The client's algorithm; yields wherever something else may happen first, True while it waits."""
        while worker.step < GOAL:
            yield from self.pull(worker)
            payload = f"{worker.life}@{worker.step}"
            gives = PushStaged(worker.name, worker.life, worker.step, 1.0, 0, payload)
            for index in self.shuffled():
                self.send(index, gives)
                yield False
            self.outcomes[payload] = []
            steps = [worker.step + 1]
            for index in self.shuffled():
                answer = self.send(index, PushCommitted(worker.name, worker.life, worker.step))[-1]
                assert isinstance(answer, AnswerPush)
                self.outcomes[payload].append(answer.outcome)
                steps.append(answer.step)
                yield False
            worker.step = max(steps)

    def pull(self, worker):
        while True:
            worker.headers = {}
            for index in self.shuffled():
                self.send(index, PullRequested((worker.life, worker.step), worker.name, worker.life, worker.step))
                yield False
            while len(worker.headers) < len(self.shards):
                yield True
            reached = max(worker.step, *worker.headers.values())
            level = all(step == reached for step in worker.headers.values())
            worker.step = reached
            if level:
                return

    def shuffled(self):
        return self.random.sample(self.indices, len(self.shards))

    def kill(self, worker):
        self.workers.remove(worker)
        committed = 0
        for index in self.shuffled():
            answer = self.send(index, WorkerFenced(worker.name, worker.life))[-1]
            assert isinstance(answer, AnswerFence)
            committed = max(committed, answer.committed_steps)
        for index in self.shuffled():
            self.send(index, WorkerReleased(worker.name, worker.life, committed))

    def run(self, deaths):
        """Lets everybody act in drawn order until all are through; AssertionError if all wait for each other."""
        waited = 0
        while self.workers:
            worker = self.random.choice(self.workers)
            if deaths and self.random.random() < 0.01:
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
    consistency.BoundedStaleness(2),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("deaths", [0, 6], ids=["nobody dies", "deaths"])
def test_everybody_gets_through_and_every_push_is_whole(mode, deaths):
    for seed in range(60):
        simulation = Simulation(seed, mode, shards=1 + seed % 3, workers=3 + seed % 2)
        simulation.run(deaths)
        for applied in simulation.applied:
            assert len(applied) == len(set(applied)), f"seed {seed}: a push counted twice"
        if not getattr(mode, "backup_workers", 0):
            # Whole: the same pushes on every shard, those of the dead included.
            assert len({frozenset(applied) for applied in simulation.applied}) == 1, f"seed {seed}: a push is torn"
        counted = {payload for applied in simulation.applied for payload in applied}
        accepted = {payload for payload, outcomes in simulation.outcomes.items() if "accepted" in outcomes}
        assert accepted <= counted, f"seed {seed}: what was acknowledged is lost"
