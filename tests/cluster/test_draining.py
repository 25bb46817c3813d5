"""Server that drains and returns: no step is trained twice, and the job has the same result as without a drain."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors, optim
from shoal._role import RoleProcess
from support import run_lengths
from support.clusters.cluster_probe import placement
from support.clusters.local import Mended, local_cluster
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

NEVER = shoal.CheckpointPolicy(every_s=0, at_end=False)


def plane(name: str, **settings: Any) -> shoal.Job:
    return shoal.Job(
        "support.programs.recovery:Plane",
        name=name,
        settings={"size": 256, **settings},
        optimizer=optim.Adam(0.01, clip_norm=1e6),  # servers that exchange norms keep their shards, so it is saved
        batch_size=8,
        epochs=4,
        seed=5,
        workers=2,
        shards=2,
        consistency=shoal.Synchronous(),
        checkpoints=NEVER,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints") / "saved"


@pytest.fixture(scope="module")
def mended(saved: Path) -> Iterator[Mended]:
    cluster = Mended(servers=2, workers=2, checkpoints=saved)
    yield cluster
    cluster.stop()


def homes(client: shoal.Client, name: str) -> list[str]:
    return [shard.server for shard in placement(client, name).shards]


def test_terminated_server_leaves_checkpoint_of_the_last_step(
    small_cluster: shoal.LocalCluster, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    with small_cluster.client() as client:
        unbroken = client.submit(plane("unbroken"))
        full = unbroken.wait(timeout_s=30).progress
        expected = unbroken.pull()
        job = client.submit(plane("broken", seconds=0.02, hurry=str(hurry)))
        wait_until(lambda: job.status().progress.steps >= 10, timeout_s=20, what="10 steps")
        before, server = homes(client, "broken"), small_cluster.process("server", 1)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: server.returncode is not None, timeout_s=20, what="the server's end")
        assert server.returncode == 0
        saved = job.status().checkpoint
        assert saved, "it was taken because the server went: the job asks for none"
        wait_until(lambda: "server-1 to restart" in job.status().reason, what="the reason why it waits")
        small_cluster.restart("server", 1)
        hurry.touch()
        progress = job.wait(timeout_s=30).progress
        assert (progress.steps, progress.samples) == (full.steps, full.samples), "each step counts once"
        events = list(job.events(follow=False))
        reasons = [event.reason for event in events if isinstance(event, shoal.events.StateChanged)]
        assert f"server server-1 is about to leave; the job continues from checkpoint {saved.number}" in reasons
        assert f"continues from broken/{saved.number}, step {saved.step}" in reasons
        assert homes(client, "broken") == before
        left = next(it.sequence for it in events if "about to leave" in getattr(it, "reason", ""))
        steps = [it.step for it in events if isinstance(it, shoal.events.MetricsReported) and it.sequence < left]
        assert max(steps) <= saved.step, "what was trained after the cut would be done again"
        found = job.pull()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def draining(client: shoal.Client, server: str) -> bool:
    return any(member.draining for member in client.status().members if member.member == server)


# In the short form, the contract tests let the grace period end.
@pytest.mark.parametrize("signals", run_lengths.size([2], [1, 2]))
def test_server_that_cannot_save_its_jobs_waits_for_grace_period_or_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: int
) -> None:
    monkeypatch.setenv("SHOAL_GRACE_PERIOD", "2" if signals == 1 else "60")
    saved = tmp_path / "saved"
    with local_cluster(servers=2, workers=2, checkpoints=saved) as cluster, cluster.client() as client:
        job = client.submit(plane("kept", seconds=0.02, hurry=str(tmp_path / "hurry")))
        wait_until(lambda: job.status().progress.steps >= 1, what="a step")
        saved.rename(tmp_path / "away")
        saved.touch()  # where the folder was
        server, began = cluster.process("server", 1), time.monotonic()
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: bool(job.status().checkpoint_failure), what="an attempt")
        assert server.returncode is None
        if signals == 2:
            server.send_signal(signal.SIGTERM)
        wait_until(lambda: server.returncode is not None, timeout_s=20, what="the server's end")
        assert server.returncode == 0
        assert signals == 2 or time.monotonic() - began >= 2
        reasons = [getattr(event, "reason", "") for event in job.events(follow=False)]
        assert any(reason.startswith("server server-1 has left") for reason in reasons)


def test_session_is_saved_and_continues_when_opened_again(small_cluster: shoal.LocalCluster) -> None:
    spec: dict[str, Any] = {
        "variables": {name: np.zeros(4, np.float32) for name in "wv"},
        "optimizer": optim.SGD(1.0, clip_norm=1e6),  # as above
        "consistency": shoal.Synchronous(),
        "shards": 2,
    }
    taken = 0
    ended: list[RoleProcess] = []

    def train_forever(client: shoal.Client) -> None:
        nonlocal taken
        with client.session("s", **spec) as session:
            server = small_cluster.process("server", 1)
            assert server.name in homes(client, "s")
            ended.append(server)
            while True:
                session.pull()
                session.push({name: np.ones(4, np.float32) for name in "wv"})
                taken += 1
                if taken == 3:
                    server.send_signal(signal.SIGTERM)

    with small_cluster.client() as client:
        with pytest.raises(errors.JobFailed, match="open the session again with restore='s/1'"):
            train_forever(client)
        [server] = ended
        wait_until(lambda: server.returncode is not None, what="the server's end")
        assert server.returncode == 0
        small_cluster.restart("server", server.index)
        with client.session("s", **spec, restore="s/1") as session:
            values = session.pull()
            # The push that was not answered is in the checkpoint if one server had committed it.
            assert values["w"][0] in (-taken, -taken - 1)
            for each in values.values():
                np.testing.assert_array_equal(each, np.full(4, values["w"][0]))


def test_session_moves_with_its_server(small_cluster: shoal.LocalCluster) -> None:
    with (
        small_cluster.client() as client,
        client.session("m", variables={"w": np.zeros(4, np.float32)}, optimizer=optim.SGD(1.0)) as session,
    ):
        [home] = homes(client, "m")
        [server] = [process for process in small_cluster.processes if process.name == home]
        server.send_signal(signal.SIGTERM)
        taken = 0
        while server.returncode is None or taken < 20:
            session.push({"w": np.ones(4, np.float32)})
            taken += 1
        assert server.returncode == 0
        assert homes(client, "m") != [home]
        np.testing.assert_array_equal(session.pull()["w"], np.full(4, -taken, np.float32))


def drain(cluster: shoal.LocalCluster, *arguments: str) -> list[dict[str, Any]]:
    """Runs `shoal drain`. Returns the records that it prints."""
    command = [sys.executable, "-m", "shoal", "drain", *arguments, "--json", "--coordinator", cluster.address]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_drain_by_command_ends_the_server_while_jobs_with_replicas_train_on(tmp_path: Path) -> None:
    """Without checkpoint storage, a job that lost a shard would fail."""
    spec: dict[str, Any] = {"variables": {"w": np.zeros(4, np.float32)}, "optimizer": optim.SGD(1.0), "replicas": 2}
    hurry, enough, pushes = tmp_path / "hurry", threading.Event(), 0
    with local_cluster(servers=2, workers=2) as cluster, cluster.client() as client:
        job = client.submit(replace(plane("of-workers", size=8192, seconds=0.02, hurry=str(hurry)), replicas=2))
        session = client.session("of-a-session", **spec)

        def train() -> np.ndarray:
            nonlocal pushes
            with session:
                while not enough.is_set():
                    session.pull()
                    session.push({"w": np.ones(4, np.float32)})
                    pushes += 1
                return np.asarray(session.pull()["w"])

        with ThreadPoolExecutor(1) as pool:
            trained = pool.submit(train)
            try:
                of_session = client.job("of-a-session")
                wait_until(lambda: job.status().progress.steps >= 5 and pushes >= 5, timeout_s=30, what="steps")
                wait_until(lambda: job.status().copies == of_session.status().copies == 2, timeout_s=30, what="copies")
                told = drain(cluster, "server-1")
                assert [record["state"] for record in told][-1] == "left"
                server = cluster.process("server", 1)
                wait_until(lambda: server.returncode is not None, what="the end of the process")
                assert server.returncode == 0
                assert drain(cluster, "server-1")[-1]["state"] == "left", "a repeat has no effect"
                before = pushes
                wait_until(lambda: pushes >= before + 5 or trained.done(), what="pushes to the other server")
            finally:
                enough.set()
            np.testing.assert_array_equal(trained.result(20), np.full(4, -pushes, np.float32))
        hurry.touch()
        job.wait(timeout_s=60)
        for name in ("of-workers", "of-a-session"):
            status = client.job(name).status()
            assert (status.restarts, status.failovers) == (0, 0), name


def test_drained_server_may_stay_and_its_job_continues_on_the_other_one(
    small_cluster: shoal.LocalCluster, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    with small_cluster.client() as client:
        job = client.submit(plane("stays", size=8192, seconds=0.02, hurry=str(hurry)))
        wait_until(lambda: job.status().progress.steps >= 5, timeout_s=20, what="steps")
        told = drain(small_cluster, "server-1", "--stay")
        assert (told[0]["state"], told[-1]["state"]) == ("draining", "drained")
        wait_until(lambda: job.status().state is shoal.JobState.RUNNING, timeout_s=20, what="its restart")
        assert set(homes(client, "stays")) == {"server-0"}
        server = small_cluster.process("server", 1)
        assert server.returncode is None
        with pytest.raises(errors.ServerNeeded, match="server-0 is the last server"):
            client.drain_server("server-0")
        hurry.touch()
        job.wait(timeout_s=30)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: server.returncode == 0, what="the server's end")
