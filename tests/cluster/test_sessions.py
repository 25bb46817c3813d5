"""Sessions in a real cluster: how they end, go on from checkpoints, and divide the data."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.status import JobState
from support.clusters.local import local_cluster

VARIABLES = {"layer": {"w": np.linspace(0, 1, 5), "b": np.zeros(())}}


@pytest.fixture(scope="module")
def saving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.Client]:
    """Yields a client of a cluster without workers that has checkpoint storage."""
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    with local_cluster(servers=1, workers=0, checkpoints=str(folder)) as cluster, cluster.client() as client:
        yield client


def step(session: shoal.Session, numbers: np.ndarray) -> None:
    """Takes a step on some samples."""
    params = session.pull()
    x = np.cos(numbers)[:, None] * np.arange(1, 6)
    error = x @ params["layer"]["w"] + params["layer"]["b"] - 1
    gradients = {"layer": {"w": x.T @ error / len(numbers), "b": np.asarray(error.mean())}}
    session.push(gradients, weight=len(numbers))


def train(session: shoal.Session) -> list[int]:
    """Trains until the data ends. Returns the sample numbers of all batches."""
    seen: list[int] = []
    for numbers in session.batches(100):
        step(session, numbers)
        seen += numbers.tolist()
    return seen


def options(**changes: Any) -> dict[str, Any]:
    return {"variables": VARIABLES, "batch_size": 5, "optimizer": shoal.optim.Adam(0.01), "seed": 3, **changes}


def train_and_crash(client: shoal.Client) -> list[int]:
    """Crashes two steps after a checkpoint at step 7. Returns the sample numbers before the checkpoint."""
    seen: list[int] = []
    session = client.session("again", restore="auto", **options())
    for numbers in session.batches(100):
        step(session, numbers)
        if session.step == 9:
            break
        if session.step <= 7:
            seen += numbers.tolist()
        if session.step == 7:
            assert session.checkpoint(timeout_s=20).step == 7
    session.close("a crash")
    return seen


def test_a_rerun_with_restore_auto_ends_with_the_bits_of_an_uninterrupted_run(saving: shoal.Client) -> None:
    with saving.session("whole", restore="auto", **options()) as session:
        assert sorted(train(session)) == list(range(100))
        expected = session.pull()["layer"]
    seen = train_and_crash(saving)
    with saving.session("again", restore="auto", **options()) as session:
        assert session.step == 7
        assert sorted(seen + train(session)) == list(range(100))
        for name, value in session.pull()["layer"].items():
            assert value.tobytes() == expected[name].tobytes()


def test_an_exception_of_one_session_leaves_the_others_training(saving: shoal.Client) -> None:
    def open_session(_: int) -> shoal.Session:
        return saving.session("two", workers=2, consistency=shoal.Asynchronous(), **options())

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(open_session, range(2))
    assert first.workers == 2
    assert set(second.members) == {first.worker, second.worker}
    step(first, next(first.batches(100)))
    with pytest.raises(ValueError, match="my loop"), first:
        raise ValueError("my loop")
    job = saving.job("two")
    assert any("ValueError: my loop" in line for line in job.logs())
    assert any("in test_an_exception" in line for line in job.logs()), "the traceback"
    assert second.members == (second.worker,)
    assert job.status().state is JobState.RUNNING
    with second:
        assert sorted(train(second)) == list(range(100)), "also the range of the other"
    result = job.wait(timeout_s=10)
    rank = first.rank
    assert result.reason == f"rank {rank} did not finish: {first.worker} left: the session raised ValueError: my loop"


def test_with_fail_an_exception_fails_the_job(saving: shoal.Client) -> None:
    def open_session(_: int) -> shoal.Session:
        return saving.session("both", workers=2, on_error="fail", consistency=shoal.Asynchronous(), **options())

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(open_session, range(2))
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    with pytest.raises(shoal.JobFailed, match="the session raised KeyboardInterrupt"):
        saving.job("both").wait(timeout_s=10)
    with pytest.raises(shoal.JobFailed), second:
        second.pull()


def test_a_job_tells_how_much_of_its_data_was_not_trained_on(saving: shoal.Client) -> None:
    with saving.session("part", **options(range_size=20)) as session:
        for numbers in session.batches(100):
            step(session, numbers)
            if session.step == 6:
                break
    assert saving.job("part").wait(timeout_s=10).reason == "80 of 100 samples were not trained on"


def test_sessions_need_the_same_number_of_samples(saving: shoal.Client) -> None:
    with saving.session("numbers", **options()) as session:
        next(session.batches(100))
        with pytest.raises(shoal.InvalidJob, match="job numbers has 100 samples in an epoch, not 99: all its sessions"):
            next(session.batches(99))


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(saving: shoal.Client) -> None:
    with saving.session("model", variables={"w": np.zeros(3)}) as session:
        session.checkpoint(timeout_s=20)
    saving.job("model").wait(timeout_s=20)
    with pytest.raises(shoal.JobFailed, match=r"'w' was saved as float64\[3\], but is float64\[4\]"):
        saving.session("model", variables={"w": np.zeros(4)}, restore="auto")
