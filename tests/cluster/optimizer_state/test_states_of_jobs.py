"""States of optimizers in a real cluster: jobs go on from them bit for bit, and give them back."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import shoal
from shoal import optim
from shoal.optim import OptimizerState
from support.clusters.local import local_cluster
from support.training.optimizer_states import same_arrays, same_state
from support.waiting import wait_until

STEPS = 5
OPTIMIZERS = [
    optim.SGD(0.1),
    optim.Momentum(0.1, nesterov=True),
    optim.Adagrad(0.1, initial_accumulator_value=0.5),
    optim.RMSProp(1e-2, momentum=0.9, centered=True),
    optim.Adam(optim.CosineLR(1e-2, steps=3 * STEPS)),
    optim.AdamW(1e-2, clip_norm=0.5),
    optim.FTRL(0.1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[shoal.Client]:
    with local_cluster(servers=2, workers=0, checkpoints=str(folder)) as cluster, cluster.client() as client:
        yield client


def values() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {"w": draw.normal(size=(30, 4)), "b": draw.normal(size=5).astype(np.float32), "s": np.array(1.0)}


def gradients(step: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(100 + step)
    return {name: np.asarray(draw.normal(size=it.shape), it.dtype) for name, it in values().items()}


def train(session: shoal.Session, first: int) -> dict[str, np.ndarray]:
    found = session.pull()
    for step in range(first, first + STEPS):
        session.push(gradients(step))
        found = session.pull()
    return {name: it.copy() for name, it in found.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda it: it.name)
def test_a_job_goes_on_from_another_one(client: shoal.Client, optimizer: optim.Optimizer) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "shards": 6}
    with client.session(f"whole-{optimizer.name}", variables=values(), **options) as session:
        half, state = train(session, 0), session.optimizer_state()
        assert session.updates == state.updates == STEPS
        wanted, end = train(session, STEPS), session.optimizer_state()
    assert same_state(client.job(f"whole-{optimizer.name}").optimizer_state(), end)
    later = f"later-{optimizer.name}"
    with client.session(later, variables=half, optimizer_state=state, **options) as session:
        assert session.step == 0
        assert same_arrays(train(session, STEPS), wanted)
        assert same_state(session.optimizer_state(), end)
        assert session.updates == 2 * STEPS


def test_a_state_goes_through_files(client: shoal.Client, folder: Path, tmp_path: Path) -> None:
    optimizer, checkpoints = optim.Adam(1e-2), shoal.Checkpoints(folder)
    with client.session("filed", variables=values(), optimizer=optimizer) as session:
        half = train(session, 0)
        session.checkpoint()
        state = session.optimizer_state()
        wanted = train(session, STEPS)
    name = "filed/1"
    assert same_state(checkpoints.optimizer_state(name), state)
    checkpoints.export_state(name, tmp_path / "state.safetensors")
    save_file(half, tmp_path / "values.safetensors")
    given: dict[str, Any] = {"optimizer": optimizer, "optimizer_state": tmp_path / "state.safetensors"}
    checkpoints.import_file(tmp_path / "values.safetensors", "imported", **given)
    with client.session("restored", variables=values(), optimizer=optimizer, restore="imported") as session:
        assert same_arrays(train(session, STEPS), wanted)
    with pytest.raises(shoal.JobFailed, match="imported/1 was trained with adam, but other uses momentum"):
        client.session("other", variables=values(), optimizer=optim.Momentum(0.1), restore="imported")


def test_a_checkpoint_counts_the_updates_before_the_job(client: shoal.Client) -> None:
    optimizer = optim.Momentum(0.1)
    given = OptimizerState({"momentum_buffer": values()}, 1_000)
    options: dict[str, Any] = {"variables": values(), "optimizer": optimizer, "optimizer_state": given}
    with client.session("again", restore="auto", **options) as session:
        train(session, 0)
        session.checkpoint()
        state = session.optimizer_state()
    with client.session("again", restore="auto", **options) as session:
        assert session.step == STEPS
        assert same_state(session.optimizer_state(), state)
    assert state.updates == 1_000 + STEPS


def test_two_sessions_have_to_give_the_same_state(client: shoal.Client) -> None:
    options: dict[str, Any] = {"variables": values(), "optimizer": optim.Momentum(0.1), "workers": 2}

    def opened(updates: int) -> str:
        try:
            given = OptimizerState({"momentum_buffer": values()}, updates)
            with client.session("both", optimizer_state=given, **options) as session:
                return str(session.optimizer_state().updates)
        except (shoal.InvalidJob, shoal.JobFailed, shoal.Cancelled) as error:
            return error.message

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(opened, 7)
        wait_until(lambda: any(it.job.name == "both" for it in client.jobs()) and client.job("both").status().members)
        with pytest.raises(shoal.InvalidJob, match="given values instead of given values with an optimizer_state of 7"):
            client.session("both", **options)
        assert opened(7) == first.result() == "7"
