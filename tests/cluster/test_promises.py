"""Guarantees of the consistency modes on real processes: exact sums, bounded staleness, counted updates, learning."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import pytest
from digits import Digits

import shoal
from shoal import initializers, optim, partitioners
from shoal.consistency import Consistency
from shoal.events import MetricsReported
from support import run_lengths
from support.clusters import history_server
from support.clusters.cluster_probe import histories, in_sessions, leads_of, placement
from support.training import reference_worker, training_problem
from support.training.training_problem import Combination
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

GROUPS, CLIPPED = (Combination("adamw", "onecycle", clips=clips) for clips in (False, True))


def test_synchronous_is_exact(shared_cluster: shoal.LocalCluster, client: shoal.Client) -> None:
    """4 processes with batches of unequal size compute the same 50 steps as one process on the joined batch."""
    command = [sys.executable, reference_worker.__file__, shared_cluster.address]
    workers = [subprocess.Popen(command) for _ in range(reference_worker.WORKERS)]
    try:
        assert [worker.wait(timeout=60) for worker in workers] == [0] * len(workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        problem = reference_worker.Problem(dtype)
        alone, trained = problem.alone(), client.pull(problem.job)
        difference = np.max([largest_difference(trained[name], alone[name]) for name in alone])
        print(f"largest relative difference in {dtype}: {difference:.2g}")
        assert difference <= tolerance, f"the largest relative difference in {dtype} is {difference:.2g}"
        assert np.max(np.abs(alone["w"] - problem.start["w"])) > 0.1, "nothing was learned, so nothing was compared"


@pytest.mark.parametrize(("combination", "shards"), [(GROUPS, 4), (CLIPPED, 1), (CLIPPED, 2), (CLIPPED, 4)], ids=str)
def test_groups_schedules_and_clipping_equal_one_process(
    client: shoal.Client, combination: Combination, shards: int
) -> None:
    """2 workers on unequal parts of each batch, against PyTorch on the joined batches, in float64."""

    def train(session: shoal.Session, rank: int) -> None:
        for step in range(training_problem.STEPS):
            gradients = training_problem.gradients(session.pull(), step, rank)
            session.push(gradients, weight=training_problem.ROWS[rank + 1] - training_problem.ROWS[rank])

    found = _trained(client, f"training-{combination}-{shards}", 2, train, combination, shards)
    _check_trained(found, combination)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streams"])
def test_a_clipped_asynchronous_job_equals_one_process(client: shoal.Client, *, streams: bool) -> None:
    """One worker on each joined batch; servers limit the norm of each push."""
    rows = training_problem.ROWS

    def train(session: shoal.Session, rank: int) -> None:
        del rank
        for step in range(training_problem.STEPS):
            values = session.pull()
            parts = [training_problem.gradients(values, step, half) for half in (0, 1)]
            shares = [(stop - start) / rows[-1] for start, stop in itertools.pairwise(rows)]
            joined = {name: shares[0] * parts[0][name] + shares[1] * parts[1][name] for name in values}
            if streams:
                session.push(iter(joined.items()))
            else:
                session.push(joined)

    name = f"training-async-{'streams' if streams else 'whole'}"
    _check_trained(_trained(client, name, 1, train, CLIPPED, 4, consistency=shoal.Asynchronous()), CLIPPED)


def _trained(
    client: shoal.Client,
    job: str,
    workers: int,
    train: Callable[[shoal.Session, int], None],
    combination: Combination,
    shards: int,
    **options: Any,
) -> dict[str, np.ndarray]:
    """Returns the values of the training problem after sessions have trained it, on a server for each shard."""
    options |= {"optimizer": combination.build(), "shards": shards}
    in_sessions(client, job, workers, train, variables=training_problem.start(), **options)
    assert len({shard.address for shard in placement(client, job).shards}) == min(shards, 3)
    return client.pull(job)


def _check_trained(found: dict[str, np.ndarray], combination: Combination) -> None:
    difference = training_problem.largest_difference(found, training_problem.recorded(combination).values)
    print(f"largest relative difference: {difference:.2g}")
    assert difference < 1e-10


def test_a_learning_rate_can_be_set_while_a_job_runs(client: shoal.Client) -> None:
    variables: Any = {f"v{i}": np.zeros(2) for i in range(3)}
    pushed = {name: np.full(2, -1.0) for name in variables}
    with client.session("rated", variables=variables, optimizer=optim.SGD(1.0), shards=3) as session:
        assert _moved(session, pushed) == {1.0}
        client.job("rated").set_learning_rate(0.25)
        wait_until(lambda: _moved(session, pushed) == {0.25}, what="the servers' use of the new rate")


def _moved(session: shoal.Session, pushed: dict[str, np.ndarray]) -> set[float]:
    """The changes of all elements by one push."""
    before = session.pull()
    session.push(pushed)
    after = session.pull()
    return {float(change) for name in before for change in after[name] - before[name]}


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest relative difference of any element.

    The rounding error of an element near 0 comes from its large terms. So each difference is divided by the element or
    by a tenth of the largest element, whichever is larger.
    """
    sizes = np.abs(expected)
    return float(np.max(np.abs(found - expected) / np.maximum(sizes, 0.1 * np.max(sizes))))


class Race:
    """Race of two workers, one of which is 10 times slower in each step, from the barrier to the answered push.

    The fast worker's steps are measured in its own processor time, so that other load on the machine does not count.
    By the clock, its steps would take longer when other tests run, and the slow worker's steps 10 times as long.
    """

    STEPS, SLOWER = run_lengths.size(400, 2_000), 10

    def __init__(self, bound: int) -> None:
        self.job, self.mode = f"bound-{bound}", shoal.BoundedStaleness(bound)
        self.changed = threading.Condition()  # guards seconds
        self.seconds: tuple[list[float], list[float]] = (
            [],
            [],
        )  # that each step took, by rank: the slow one's by the clock

    def run(self, client: shoal.Client) -> Self:
        variables = {"w": shoal.Variable((4,))}
        in_sessions(client, self.job, 2, self.loop, variables=variables, consistency=self.mode, shards=1)
        return self

    def loop(self, session: shoal.Session, rank: int) -> None:
        work, gradient = np.ones((64, 64), np.float32), {"w": np.ones(4, np.float32)}
        for step in range(self.STEPS):
            session.barrier()
            clock = time.perf_counter if rank == 0 else time.thread_time
            start = clock()
            work @ work
            if rank == 0:
                self.lag(step, start)
            session.push(gradient)
            with self.changed:
                self.seconds[rank].append(clock() - start)
                self.changed.notify_all()

    def lag(self, step: int, start: float) -> None:
        """Delays the slow worker's step until it has taken 10 times as long as the fast worker's same step.

        The mode lets the fast worker take that step now, whatever the bound. The slow worker waits without computing,
        because it would take processor time from the fast one.
        """
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.seconds[1]) > step, 30), "the fast one does not go on"
            over = start + self.SLOWER * self.seconds[1][step]
            while (rest := over - time.perf_counter()) > 0:
                self.changed.wait(rest)


@pytest.fixture
def recorded() -> Iterator[shoal.Client]:
    """Yields a client of a cluster whose only server records answered pulls and committed pushes."""
    with shoal.LocalCluster(servers=0, workers=0, env={"SHOAL_INSECURE": "1"}) as cluster, cluster.client() as client:
        command = [sys.executable, history_server.__file__, cluster.address, "recorded"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout
                assert server.stdout.readline(), "it is ready"
                yield client
            finally:
                assert server.stdin
                server.stdin.close()


def test_the_bound_holds(recorded: shoal.Client) -> None:
    """In 400 or 2,000 steps beside a worker 10 times slower, the servers' own history shows no violation of the bound.

    The three bounds run at the same time, because their workers mostly wait.
    """
    bounds = (0, 1, 4)
    with ThreadPoolExecutor(len(bounds)) as pool:
        races = list(pool.map(lambda bound: Race(bound).run(recorded), bounds))
    for bound, race in zip(bounds, races, strict=True):
        slow, fast = map(np.array, race.seconds)
        assert len(slow) == len(fast) == race.STEPS
        assert np.all(slow >= race.SLOWER * fast), f"only {np.min(slow / fast):.1f} times slower in a step"

        ((_, history),) = histories(recorded, race.job).items()
        leads, finished = leads_of(history)
        violations = [lead for lead in leads if lead > bound]
        assert not violations
        assert list(finished.values()) == [race.STEPS, race.STEPS]
        assert max(leads) == bound, "nobody ever got as far ahead as the bound allows, so it was not tested"


# async:scaled is not here: it divides the learning rate by each gradient's staleness, so there is no sum to expect.
@pytest.mark.parametrize(
    "mode", [shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(2)], ids=lambda mode: mode.name
)
def test_updates_are_counted(client: shoal.Client, mode: Consistency) -> None:
    """4 workers push integer gradients 100 or 500 times each to 3 servers: the sums are exactly equal."""
    pushes, workers = run_lengths.size(100, 500), 4
    rng = np.random.default_rng(2)
    sent = rng.integers(-4, 5, size=(workers, pushes, 30)).astype(np.float32)
    variables = {
        "w": shoal.Variable((30,), partitioner=partitioners.FixedShards(3), initializer=initializers.Ones()),
    }

    def check_pushes(session: shoal.Session, rank: int) -> None:
        for step in range(pushes):
            if mode != shoal.Asynchronous():  # which never waits, so that there is nothing to ask
                session.barrier()
            assert session.push({"w": sent[rank, step]}).outcome == "accepted"

    name = f"counted-{mode.name}"
    options = {"variables": variables, "optimizer": optim.SGD(1.0), "consistency": mode, "shards": 3}
    in_sessions(client, name, workers, check_pushes, **options)
    assert len({shard.address for shard in placement(client, name).shards}) == 3
    total = sent.sum(axis=(0, 1))
    share = total / workers if mode == shoal.Synchronous() else total
    np.testing.assert_array_equal(client.pull(name)["w"], 1 - share)


def test_with_a_backup_worker_each_step_counts_three_of_four(client: shoal.Client) -> None:
    """Only element r of worker r's gradient is 1, so the variable counts the contributions of each worker."""
    steps, workers, slow = 60, 4, 3
    through = threading.Barrier(workers)  # who leaves uses up the backup, so nobody leaves before the last step is over
    changed = threading.Condition()  # guards pushed
    pushed = [0] * steps  # by the others, of each step

    def loop(session: shoal.Session, rank: int) -> list[str]:
        outcomes: list[str] = []
        gradient = {"w": np.eye(workers, dtype=np.float32)[rank]}
        while (step := session.step) < steps:
            session.pull()
            if session.step != step:  # overtaken while it waited: that step is closed
                continue
            if rank == slow and step % 3:  # in each third step it is as quick as the others
                with changed:
                    assert changed.wait_for(lambda: pushed[step] == workers - 1, 30)
            outcomes.append(session.push(gradient).outcome)
            if rank != slow:
                with changed:
                    pushed[step] += 1
                    changed.notify_all()
        through.wait(30)
        return outcomes

    # At a rate of 3 the mean of three gradients adds 1 for each of them.
    options = {"optimizer": optim.SGD(3.0), "consistency": shoal.Synchronous(backup_workers=1), "shards": 1}
    outcomes = in_sessions(client, "backup", workers, loop, variables={"w": shoal.Variable(workers)}, **options)

    counted = -client.pull("backup")["w"]
    np.testing.assert_allclose(counted, [found.count("accepted") for found in outcomes], rtol=1e-5)
    assert counted.sum() == pytest.approx(steps * (workers - 1))
    dropped = sum(found.count("dropped_late") for found in outcomes)
    assert outcomes[slow].count("dropped_late") > 0
    assert client.job("backup").wait(timeout_s=20).progress.dropped == dropped


@run_lengths.long_only  # benchmarks measure what overlapping saves
def test_a_worker_that_overlaps_waits_for_less_of_its_time(client: shoal.Client) -> None:
    """A step moves 64 MB each way and computes for longer than this takes, first without overlap, then with it."""
    steps, settings = 30, {"elements": 16_000_000, "seconds": 0.1}
    shares = {}
    for overlap in (False, True):  # not at the same time: each would slow the other's transfers
        options: dict[str, Any] = {"consistency": shoal.Asynchronous(), "max_steps": steps, "settings": settings}
        job = client.submit(shoal.Job("support.programs.broken:Accelerated", overlap=overlap, **options))
        assert job.wait(timeout_s=60).progress.steps == steps
        reported = [event.values for event in job.events() if isinstance(event, MetricsReported)]
        # The smallest of some half seconds: other tests may load this machine.
        shares[overlap] = min(values["wait_share"] for values in reported if "wait_share" in values)
        job.drop()
    print(f"waits for {shares[False]:.0%} of its time in turn, for {shares[True]:.0%} when it overlaps")
    assert shares[True] < 0.7 * shares[False]


@run_lengths.long_only  # the demo does so, too
def test_an_asynchronous_run_converges(client: shoal.Client) -> None:
    """4 workers train on the digits."""
    job = shoal.Job(
        "digits:Digits",
        name="converges",
        workers=4,
        consistency=shoal.Asynchronous(),
        optimizer=optim.Adam(0.003),
        epochs=run_lengths.size(15, 30),
    )
    result = client.submit(job).wait(timeout_s=100)
    assert result.progress.staleness_max > 0
    assert shoal.evaluate(Digits(), client.pull(job.name))["accuracy"] >= 0.97


def test_a_run_scaled_by_staleness_converges(client: shoal.Client) -> None:
    """4 workers solve least squares. They pull only periodically, so most of their gradients are stale."""
    target = np.arange(6, dtype=np.float32)

    def loop(session: shoal.Session, _rank: int) -> int:
        stalest = 0
        for step in range(120):
            if step % 3 == 0:
                params = session.pull()
            stalest = max(stalest, session.push({"w": params["w"] - target}).staleness)
        return stalest

    mode = shoal.Asynchronous(scale_by_staleness=True)
    variables = {"w": shoal.Variable((6,))}
    options = {"variables": variables, "optimizer": optim.SGD(0.2), "consistency": mode, "shards": 1}
    assert max(in_sessions(client, "scaled", 4, loop, **options)) > 1
    np.testing.assert_allclose(client.pull("scaled")["w"], target, atol=1e-2)
