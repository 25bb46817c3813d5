"""Sessions in a real cluster: how they end, go on from checkpoints, and divide the data."""

import itertools
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.data._reading import ShuffledSamples
from shoal.status import JobState
from support.clusters.local import ROOT, local_cluster
from support.clusters.variable_tree import check_same, tree
from support.programs.crashing_session import SAMPLES, VARIABLES, options, step
from support.run_lengths import runs
from support.waiting import wait_until


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.Client]:
    """Yields a client of a cluster without workers that has checkpoint storage."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    with local_cluster(servers=2, workers=0, checkpoints=str(folder)) as cluster, cluster.client() as client:
        yield client


def train(session: shoal.Session) -> list[int]:
    """Trains until the data ends. Returns the sample numbers of all batches."""
    seen: list[int] = []
    for numbers in session.batches(SAMPLES):
        step(session, numbers)
        seen += numbers.tolist()
    return seen


def train_two(client: shoal.Client, job: str) -> tuple[list[int], list[int]]:
    """Trains in two sessions until the data ends. Returns their first steps, and the sample numbers of all batches."""

    def run(_: int) -> tuple[int, list[int]]:
        with client.session(job, restore="auto", workers=2, **options()) as session:
            return session.step, train(session)

    with ThreadPoolExecutor(2) as pool:
        first, seen = zip(*pool.map(run, range(2)), strict=True)
    client.job(job).wait(timeout_s=20)
    return [*first], [number for numbers in seen for number in numbers]


def killed_at(client: shoal.Client, job: str, last: int) -> list[list[int]]:
    """Kills two processes with a session each, and ends their job. Returns the step and samples of each batch."""
    script = str(ROOT / "tests/support/programs/crashing_session.py")
    command = [sys.executable, script, client.address, job, str(last)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        lines = [process.stdout.readline() for _ in range(last) for process in processes if process.stdout]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
    client.job(job).cancel()  # otherwise the rerun joins it, and goes on with the variables as they are
    return [[*map(int, line.split())] for line in lines]


def test_a_rerun_after_all_processes_were_killed_ends_with_the_bits_of_an_uninterrupted_run(
    storing: shoal.Client,
) -> None:
    first, seen = train_two(storing, "whole")
    assert (first, sorted(seen)) == ([0, 0], list(range(SAMPLES)))
    crashed = killed_at(storing, "again", 6)
    first, rest = train_two(storing, "again")
    assert first == [4, 4], "the step of the checkpoint, not of the crash"
    before = [number for at, *numbers in crashed if at < 4 for number in numbers]
    assert sorted(before + rest) == list(range(SAMPLES))
    expected, values = storing.pull("whole"), storing.pull("again")
    assert expected.keys() == values.keys()
    for name, value in values.items():
        assert value.tobytes() == expected[name].tobytes()


def test_a_rerun_without_data_says_so_and_more_epochs_train_on(
    storing: shoal.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with storing.session("done", restore="auto", **options()) as session:
        train(session)
    storing.job("done").wait(timeout_s=20)
    with storing.session("done", restore="auto", **options()) as session:
        assert train(session) == []
    storing.job("done").wait(timeout_s=20)
    assert "job done has no data left, its epoch is done" in " ".join(caplog.messages)
    with storing.session("done", restore="auto", **options(epochs=2)) as session:
        assert sorted(train(session)) == list(range(SAMPLES))


def test_arrays_of_every_kind_begin_with_their_bits(storing: shoal.Client) -> None:
    means = np.arange(6.0).reshape(2, 3).T
    variables = {**tree(), "mean": shoal.Variable.of(means, trainable=False, aggregation="mean")}
    with storing.session("kinds", variables=variables) as session:
        pulled = session.pull()
    check_same(pulled, variables)
    assert pulled["mean"].tolist() == means.tolist()


def test_a_cell_that_is_run_twice_hears_of_its_open_session(storing: shoal.Client) -> None:
    with storing.session("cell", **options()) as session:
        for variables, error in ((VARIABLES, shoal.errors.Overloaded), ({"other": np.zeros(2)}, shoal.InvalidJob)):
            with pytest.raises(error, match=f"this process has session {session.worker} of job cell"):
                storing.session("cell", **options(variables=variables))


def test_an_exception_of_one_session_leaves_the_others_training(storing: shoal.Client) -> None:
    def open_session(_: int) -> shoal.Session:
        first_run: dict[str, Any] = {"restore": "auto", "partial_restore": True}  # there is no checkpoint
        return storing.session("two", workers=2, consistency=shoal.Asynchronous(), **first_run, **options())

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(open_session, range(2))
    assert first.workers == 2
    assert {(it.worker, it.state) for it in second.members} == {(it.worker, "present") for it in (first, second)}
    step(first, next(first.batches(100)))
    with pytest.raises(ValueError, match="my loop"), first:
        raise ValueError("my loop")
    job = storing.job("two")
    assert any("ValueError: my loop" in line for line in job.logs())
    assert any("in test_an_exception" in line for line in job.logs()), "the traceback"
    states = {it.worker: (it.state, it.reason) for it in second.members}
    assert states.pop(second.worker) == ("present", "")
    assert states == {first.worker: ("left", "left: the session raised ValueError: my loop")}
    second.set_learning_rate(0.02)
    status = job.status()
    assert status.state is JobState.RUNNING
    assert status.reason == f"rank {first.rank}: {first.worker} left: the session raised ValueError: my loop"
    with second:
        assert sorted(train(second)) == list(range(SAMPLES)), "also the range of the other"
    result = job.wait(timeout_s=10)
    rank = first.rank
    assert result.reason == f"rank {rank} did not finish: {first.worker} left: the session raised ValueError: my loop"


def test_with_fail_an_exception_fails_the_job(storing: shoal.Client) -> None:
    def open_session(_: int) -> shoal.Session:
        return storing.session("both", workers=2, on_error="fail", consistency=shoal.Asynchronous(), **options())

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(open_session, range(2))
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    with pytest.raises(shoal.JobFailed, match="the session raised KeyboardInterrupt"):
        storing.job("both").wait(timeout_s=10)
    with pytest.raises(shoal.JobFailed), second:
        second.pull()


def test_a_job_tells_how_much_of_its_data_was_not_trained_on(storing: shoal.Client) -> None:
    with storing.session("part", **options(range_size=20)) as session:
        for numbers in session.batches(100):
            step(session, numbers)
            if session.step == 6:
                break
    assert storing.job("part").wait(timeout_s=10).reason == "70 of 100 samples were not trained on"
    with storing.session("part", restore="auto", **options(range_size=20)) as session:
        seen = train(session)
    assert len(seen) == len(set(seen)) == 70, "the rest, and nothing twice"


def test_sessions_need_the_same_number_of_samples(storing: shoal.Client) -> None:
    with storing.session("numbers", **options()) as session:
        next(session.batches(100))
        with pytest.raises(shoal.InvalidJob, match="job numbers has 100 samples in an epoch, not 99: all its sessions"):
            next(session.batches(99))


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(storing: shoal.Client) -> None:
    with storing.session("model", variables={"w": np.zeros(3)}) as session:
        session.checkpoint(timeout_s=20)
    storing.job("model").wait(timeout_s=20)
    with pytest.raises(shoal.JobFailed, match=r"'w' was saved as float64\[3\], but is float64\[4\]"):
        storing.session("model", variables={"w": np.zeros(4)}, restore="auto")


def test_no_sample_is_missed_when_sessions_die(storing: shoal.Client, tmp_path: Path) -> None:
    """Each death repeats at most the range that the dead session had leased."""
    deaths, samples = runs(2, 20), 6_000
    seen, rng = tmp_path / "seen", np.random.default_rng(11)
    seen.touch()
    script = str(ROOT / "tests/support/programs/session_reader.py")
    command = [sys.executable, script, storing.address, "deaths", str(samples), str(seen)]
    births = itertools.count()

    def born() -> tuple[str, subprocess.Popen[bytes]]:
        name = f"reader-{next(births)}"
        return name, subprocess.Popen([*command, name])

    readers = [born() for _ in range(2)]
    held = Counter[int]()  # by place of the order, the number of deaths of a session that had leased it
    try:
        for _ in range(deaths):
            lines = len(seen.read_text().splitlines()) + int(rng.integers(1, 25))
            wait_until(partial(has_lines, seen, lines), timeout_s=30)
            victim = int(rng.integers(2))
            name, process = readers[victim]
            process.kill()
            process.wait()
            for it in storing.job("deaths").data().held:
                if it.worker == name:
                    held.update(range(it.start, it.stop))
            readers[victim] = born()
        for _, process in readers:
            assert process.wait(timeout=120) == 0
    finally:
        for _, process in readers:
            process.kill()
            process.wait()
    times = Counter(int(number) for number in seen.read_text().split())
    assert sorted(times) == list(range(samples)), "no sample is missed"
    order = np.concatenate([*ShuffledSamples(samples, 0).numbers(0, 0, samples)])
    too_often = {
        place: times[int(number)] for place, number in enumerate(order) if times[int(number)] > 1 + held[place]
    }
    assert not too_often, "a death repeats only what the dead session had leased, once"
    assert storing.job("deaths").status().state is JobState.SUCCEEDED


def test_a_session_that_is_killed_returns_long_before_its_heartbeat_timeout() -> None:
    script, slow = str(ROOT / "tests/support/programs/endless_session.py"), ["--heartbeat-timeout", "300"]
    with (
        local_cluster(servers=1, workers=0, flags={"coordinator": slow}) as cluster,
        cluster.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        command = [sys.executable, script, client.address, "killed", "leave"]
        other = subprocess.Popen(command)
        try:
            session = client.session("killed", variables={"w": np.zeros(3)}, workers=2)
            for _ in range(2):
                push_ones(session)
                other.kill()
                other.wait()
                other = subprocess.Popen(command)
                for _ in range(2):
                    pool.submit(push_ones, session).result(60)  # a step needs both sessions
            client.cancel("killed")
            with pytest.raises(shoal.Cancelled):
                session.close()
        finally:
            other.kill()
            other.wait()


def push_ones(session: shoal.Session) -> None:
    session.pull()
    session.push({"w": np.ones(3)})


@pytest.mark.parametrize("on_error", ["leave", "fail"])
def test_ctrl_c_of_one_process_leaves_the_others_training_unless_asked_otherwise(
    storing: shoal.Client, on_error: str
) -> None:
    job = f"interrupted-{on_error}"
    script = str(ROOT / "tests/support/programs/endless_session.py")
    # A session of POSIX of its own: processes that a script starts in the background may ignore SIGINT.
    other = subprocess.Popen(
        [sys.executable, script, storing.address, job, on_error], stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        if on_error == "leave":  # once is enough: this takes two seconds
            assert other.stderr
            line = other.stderr.readline().decode()
            assert f"session ended (job {job}) waits for 1 more session of 2 (open: ended, rank 0), since" in line
        with storing.session(job, variables={"w": np.zeros(3)}, workers=2) as session:
            for _ in range(3):
                push_ones(session)
            other.send_signal(signal.SIGINT)
            assert b"KeyboardInterrupt" in other.communicate(timeout=30)[1]
            if on_error == "fail":
                with pytest.raises(shoal.JobFailed, match="worker ended failed: the session raised KeyboardInterrupt"):
                    push_ones(session)
            else:
                before = session.step
                for _ in range(3):
                    push_ones(session)
                assert session.step == before + 3
    finally:
        other.kill()
        other.communicate()
    if on_error == "leave":
        result = storing.job(job).wait(timeout_s=10)
        assert result.reason.endswith("did not finish: ended left: the session raised KeyboardInterrupt")


def test_an_extra_pull_counts_as_no_step_and_blocks_nobody(storing: shoal.Client) -> None:
    def opened(worker: str) -> shoal.Session:
        return storing.session("extra", workers=2, worker=worker, **options())

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(opened, ("ann", "bob"))
    with first, second:
        step(second, np.arange(5))
        values = [first.pull()["layer"]["w"].tolist() for _ in range(3)]  # returns although the step is open
        assert values == [VARIABLES["layer"]["w"].tolist()] * 3
        assert first.step == 0
        step(first, np.arange(5))
        assert first.pull()["layer"]["w"].tolist() == second.pull()["layer"]["w"].tolist() != values[0]
        step(second, np.arange(5))  # does not wait for the pulls of the other


def has_lines(path: Path, lines: int) -> bool:
    return len(path.read_text().splitlines()) >= lines


def test_waits_are_told_with_those_that_are_waited_for(
    storing: shoal.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal._system.waits.NOTICE_AFTER_S", 0.1)

    def told(text: str) -> bool:
        return any(text in line for line in caplog.messages)

    def opened(worker: str) -> shoal.Session:
        return storing.session("told", workers=2, worker=worker, **options())

    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(opened, "ann")
        wait_until(lambda: told("session ann (job told) waits for 1 more session of 2 (open: ann, rank 0), since "))
        bob, ann = opened("bob"), opening.result()
        wait_until(lambda: told("session ann (job told) has waited "))
        step(ann, np.arange(5))
        pulled = pool.submit(ann.pull)
        wait_until(lambda: told("pull of step 1 by ann (rank 0, job told) waits for rank 1 (bob, at step 0), since "))
        step(bob, np.arange(5))
        pulled.result()
    wait_until(lambda: told("pull of step 1 by ann (rank 0, job told) has waited "))
    monkeypatch.setattr("shoal._session.batches.CLOSE_WAIT_S", 1.0)
    batches = ann.batches(100)
    step(ann, next(batches))
    ann.close()
    assert told("wait of step 2 by ann (rank 0, job told) waits for rank 1 (bob, at step 1), since ")
    bob.close()
    job = storing.submit(shoal.Job("digits:Digits", name="later"))
    with pytest.raises(shoal.DeadlineExceeded):
        job.wait(timeout_s=1.5)
    assert told("job later waits for workers: 0 of 1, since ")
    job.cancel()
