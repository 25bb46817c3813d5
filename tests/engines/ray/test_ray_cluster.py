"""Cluster on Ray: it trains, scales, explains a failed start, and leaves nothing behind."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import errors, optim
from shoal._role.worker_options import THREADS
from shoal._security import Credentials
from shoal.status import Role
from support.clusters.given_access import check_colleagues_get_access
from support.clusters.local import PROGRAMS, QUICK
from support.ray.leftovers import alive, our_files, watch_for_leftovers
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
pytest.importorskip("ray", reason="Ray is not installed")
shoal_ray: Any = importlib.import_module("shoal.ray")


def driver(ray: Any, script: str) -> "subprocess.CompletedProcess[str]":
    """Runs a script in another process, which finds the cluster of Ray by RAY_ADDRESS."""
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)


def folder_of(cluster: Any, name: str) -> Path:
    """The private folder of a role on this machine."""
    arguments = Path(f"/proc/{cluster.report(name)['pid']}/cmdline").read_text().split("\0")
    return Path(arguments[arguments.index("--tls-ca") + 1]).parent


def test_digits_trains_and_nothing_is_left(ray: Any) -> None:
    note, busy, began = watch_for_leftovers(ray, "shoal"), os.getloadavg()[0] >= 1, time.monotonic()
    with shoal_ray.cluster(servers=2, workers=2, path=PROGRAMS) as cluster, cluster.client() as client:
        up_s = time.monotonic() - began
        options: dict[str, Any] = {"epochs": 60, "optimizer": optim.Adam(0.003), "seed": 1}
        job = shoal.Job("digits:Digits", workers=2, evaluation=shoal.EvaluationPolicy(), **options)
        result = client.submit(job).wait(timeout_s=120)
        check = note(cluster)
        assert [*cluster.metrics] == ["coordinator", "server-0", "server-1", "worker-0", "worker-1"]
        assert cluster.login_link().startswith(f"{cluster.page}/#login=")
        zones = {member.zone for member in client.status().members if member.role is Role.SERVER}
        assert zones == {ray.get_runtime_context().get_node_id()}
    accuracy = result.evaluation.values["accuracy"]
    print(f"up in {up_s:.1f} s, accuracy {accuracy:.4f}")
    assert accuracy >= 0.97
    assert up_s < (30 if busy else 10)
    check()


def test_each_role_has_its_own_key_and_clients_need_a_certificate(cluster: Any) -> None:
    keys = set()
    for name in cluster.actors:
        folder = folder_of(cluster, name)
        assert folder.stat().st_mode & 0o777 == 0o700
        pems = sorted(it.name for it in folder.iterdir() if it.suffix == ".pem")
        assert pems == ["ca.pem", "certificate.pem", "key.pem"]
        assert (folder / "key.pem").stat().st_mode & 0o077 == 0
        keys.add((folder / "key.pem").read_bytes())
    assert len(keys) == len(cluster.actors)
    ca = cluster.variables["SHOAL_TLS_CA"]
    with (
        shoal.Client(cluster.address, retry_for_s=0, credentials=Credentials.find(ca)) as client,
        pytest.raises((errors.Unauthenticated, errors.Unreachable)),
    ):
        client.status()
    worker = folder_of(cluster, "worker-0")
    found = Credentials.find(ca, str(worker / "certificate.pem"), str(worker / "key.pem"))
    with shoal.Client(cluster.address, credentials=found) as client, pytest.raises(errors.Forbidden):
        client.submit(shoal.Job("digits:Digits"))


def test_colleagues_get_certificates_and_tokens(cluster: Any, tmp_path: Path) -> None:
    check_colleagues_get_access(cluster.address, cluster.variables, tmp_path)


def test_workers_are_added_and_removed(cluster: Any, tmp_path: Path) -> None:
    with cluster.client() as client:
        name = cluster.add_worker()
        assert name == "worker-2"
        assert {it.member for it in client.status().alive(Role.WORKER)} == {"worker-0", "worker-1", "worker-2"}
        cluster.remove_worker()
        assert {it.member for it in client.status().alive(Role.WORKER)} == {"worker-0", "worker-1"}
    with pytest.raises(errors.BadRequest, match="there is no worker 'worker-7'"):
        cluster.remove_worker("worker-7")


def test_a_worker_that_waits_for_resources_holds_up_nothing_else(ray: Any, cluster: Any) -> None:
    group = ray.util.placement_group([{"CPU": 1}] * 6)
    assert group.wait(30)

    def pending() -> bool:
        return "PENDING" in {it["state"] for it in ray.util.placement_group_table().values()}

    added: list[str] = []
    waits = threading.Thread(target=lambda: added.append(cluster.add_worker()))
    try:
        waits.start()
        wait_until(pending, what="the wait for resources")
        began = time.monotonic()
        assert len(cluster.actors) == 5
        assert len(cluster.metrics) == 5
        assert time.monotonic() - began < 10
        with pytest.raises(errors.BadRequest, match="there is no worker 'worker-2'"):
            cluster.remove_worker("worker-2")
        assert pending()
    finally:
        ray.util.remove_placement_group(group)
        waits.join(60)
    assert added == ["worker-2"]
    cluster.remove_worker("worker-2")


def test_the_number_of_workers_follows_the_jobs(ray: Any, tmp_path: Path) -> None:
    """It follows `shoal_coordinator_wanted_workers`, in both directions."""
    options: dict[str, Any] = {"path": PROGRAMS, "flags": QUICK, "name": "scaled", "idle_s": 0.5}
    with (
        shoal_ray.cluster(servers=1, workers=0, max_workers=2, **options) as cluster,
        cluster.client() as client,
    ):

        def names() -> set[str]:
            return {it.member for it in client.status().alive(Role.WORKER)}

        gate = tmp_path / "gate"
        options = {"settings": {"gate": str(gate), "seconds": 0.05, "size": 1_024}, "workers": 2, "min_workers": 1}
        job = client.submit(shoal.Job("support.programs.broken:Paced", batch_size=8, **options))
        wait_until(lambda: set(job.status().workers) == {"worker-0", "worker-1"}, timeout_s=90, what="two workers")
        assert names() == {"worker-0", "worker-1"}
        gate.touch()
        job.wait(timeout_s=120)
        wait_until(lambda: not names(), timeout_s=60, what="the end of the idle workers")
        wait_until(lambda: [*cluster.actors] == ["coordinator", "server-0"], what="the end of their actors")


def test_a_server_that_was_asked_to_stop_stays_away(ray: Any) -> None:
    with (
        shoal_ray.cluster(servers=2, workers=0, flags=QUICK, name="drained") as cluster,
        cluster.client() as client,
    ):

        def has_left() -> bool:
            try:
                cluster.report("server-1")
            except errors.StartFailed as error:
                return error.message == "server-1 was asked to stop, and has left the cluster"
            return False

        os.kill(cluster.report("server-1")["pid"], signal.SIGTERM)
        wait_until(has_left, what="the server's end")
        assert {it.member for it in client.status().alive(Role.SERVER)} == {"server-0"}


def test_members_follow_a_coordinator_with_another_address(ray: Any, tmp_path: Path) -> None:
    """Without the file of its ports, it starts as on another node that has its store."""
    options: dict[str, Any] = {"path": PROGRAMS, "flags": QUICK, "store": tmp_path / "store.db"}
    with shoal_ray.cluster(servers=1, workers=1, name="moved", **options) as cluster:
        address, members = cluster.address, [cluster.report(name) for name in ("server-0", "worker-0")]
        with cluster.client() as client:
            first = client.submit(shoal.Job("digits:Digits")).wait(timeout_s=100)
        (folder_of(cluster, "coordinator") / "ports.json").unlink()
        os.kill(cluster.report("coordinator")["actor"], signal.SIGKILL)
        wait_until(lambda: cluster.address != address, what="the new address")
        for old in members:
            wait_until(lambda: not alive(old["pid"]), what="the end of a member")  # noqa: B023
        assert cluster.report("server-0")
        assert cluster.report("worker-0")
        with cluster.client() as client:
            client.submit(shoal.Job("digits:Digits")).wait(timeout_s=100)
            assert first.job in {status.job.name for status in client.jobs()}


def test_too_few_resources_are_named_at_once(ray: Any) -> None:
    began, before = time.monotonic(), our_files()
    lacking = r"the roles need 2 GPU, and there are 0 \(2 missing\)"
    with pytest.raises(errors.StartFailed, match=lacking):
        shoal_ray.cluster(servers=1, workers=2, resources={"worker": {"GPU": 1}}).start()
    with pytest.raises(errors.StartFailed, match=r"the roles need 40\.5 CPU, and there are 8 \(32\.5 missing\)"):
        shoal_ray.cluster(servers=1, workers=4, resources={"worker": {"CPU": 10}}).start()
    assert time.monotonic() - began < 5
    assert our_files() == before


def test_resources_that_others_use_end_the_wait(ray: Any) -> None:
    group = ray.util.placement_group([{"CPU": 1}] * 6)
    assert group.wait(30)
    try:
        lacking = (
            r"timed out waiting for resources: .*worker-0 needs 5 CPU, .* CPU are free; stop other programs or raise"
        )
        with pytest.raises(errors.StartFailed, match=lacking):
            shoal_ray.cluster(workers=1, name="late", resources={"worker": {"CPU": 5}}, start_timeout_s=2).start()
    finally:
        ray.util.remove_placement_group(group)


def test_nodes_that_join_later_are_waited_for(ray: Any) -> None:
    """The groups wait in Ray meanwhile, so its autoscaler sees what is missing."""
    large: dict[str, Any] = {"resources": {"worker": {"CPU": 40}}, "wait_for_nodes": True, "start_timeout_s": 2}
    before, began = our_files(), time.monotonic()
    with pytest.raises(errors.StartFailed, match="timed out waiting for resources: worker-0 needs 40 CPU"):
        shoal_ray.cluster(workers=1, name="waiting", **large).start()
    assert time.monotonic() - began > 2
    assert our_files() == before


def test_a_number_of_threads_in_the_environment_of_ray_stays(ray: Any) -> None:
    """Ray's own number for two CPUs does not reach the role."""
    given = {"worker": {"CPU": 2}}
    with shoal_ray.cluster(servers=1, workers=1, name="threads", resources=given) as cluster:
        variables = Path(f"/proc/{cluster.report('worker-0')['pid']}/environ").read_text().split("\0")
    expected = {f"{name}={os.environ[name]}" for name in THREADS if name in os.environ}
    assert expected, "tests/conftest.py sets one"
    assert {it for it in variables if it.partition("=")[0] in THREADS} == expected


def test_a_second_cluster_of_the_name_is_refused(ray: Any, cluster: Any) -> None:
    with pytest.raises(
        errors.StartFailed, match="the namespace 'tests' of Ray has a cluster 'shared' already; stop it"
    ):
        shoal_ray.cluster(name="shared").start()
    assert cluster.report("coordinator")["page"]


def test_a_role_that_cannot_start_says_why(ray: Any) -> None:
    before = our_files()
    with pytest.raises(errors.StartFailed, match=r"(?s)server-0 ended with exit status 2.*No such option: --nonsense"):
        shoal_ray.cluster(servers=1, workers=0, name="wrong", flags={"server": ["--nonsense", "1"]}).start()
    assert our_files() == before


def test_ray_of_another_python_is_explained(ray: Any) -> None:
    script = (
        "import sys, shoal.ray; sys.version_info = (3, 99, 1, 'final', 0)\n"
        "try: shoal.ray.connect()\n"
        "except shoal.errors.StartFailed as error: print(error.message)"
    )
    ran = driver(ray, script)
    assert "another version of Ray or Python" in ran.stdout
    assert "3.99.1" in ran.stdout


def test_the_command_runs_a_cluster_until_it_should_end(ray: Any) -> None:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-m", "shoal", "up", "--on", "ray", "--servers", "1", "--workers", "1", "--json"]
    command += ["--resources", "worker:CPU=1", "--namespace", "another", "--start-timeout", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=PROGRAMS[1]) as up:
        try:
            assert up.stdout
            ready = up.stdout.readline()
            assert '"address"' in ready
            variables = json.loads(ready)["variables"]
            submit = [sys.executable, "-m", "shoal", "submit", "digits:Digits", "--follow", "--workers", "1"]
            subprocess.run(submit, env={**os.environ, **variables}, check=True, timeout=100, capture_output=True)
            up.terminate()  # as Ctrl-C, which a shell can make a test ignore
            assert up.wait(60) == 0
        finally:
            up.kill()


def test_nothing_is_left_when_the_driver_is_killed(ray: Any) -> None:
    before = our_files()

    def new_files() -> list[str]:
        return [it for it in our_files() if it not in before]

    script = (
        "import os, ray, shoal.ray; ray.init(log_to_driver=False)\n"
        "cluster = shoal.ray.cluster(servers=1, workers=1, name='orphan'); cluster.start()\n"
        "print(*[cluster.report(it)['pid'] for it in cluster.actors], flush=True); os.kill(os.getpid(), 9)"
    )
    ran = driver(ray, script)
    pids = [int(pid) for pid in ran.stdout.split()]
    assert len(pids) == 3, ran.stderr
    wait_until(lambda: not any(map(alive, pids)), what="the end of the roles")
    # The folder of the coordinator stays for two minutes, as if Ray could start it again.
    wait_until(lambda: all("-coordinator." in it for it in new_files()), what="the end of the folders")
    (left,) = new_files()
    shutil.rmtree(Path(tempfile.gettempdir(), left))
