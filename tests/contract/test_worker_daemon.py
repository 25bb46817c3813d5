"""Worker daemon with real trainers against a fake cluster: jobs that it starts, reports, failures, and its end."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import psutil
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from shoal import errors
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.v1 import coordinator_pb2, job_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_worker.daemon import Daemon, WorkerConfig
from shoal_worker.isolation import TrainerIsolation, TrainerLimits
from shoal_worker.process import start_worker
from shoal_worker.trainer_process import TrainerProcess
from support.clusters.fake_cluster import FakeCluster, fake_cluster
from support.waiting import wait_until

JOB = Job("trained:program", name="digits", batch_size=4)

PROGRAM = """
import os, signal, sys
import numpy as np

class Samples:
    def __len__(self):
        return 16
    def batch(self, indices):
        return indices

class Program:
    dataset = Samples()
    def variables(self):
        return {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
    def loss_and_gradients(self, params, batch):
        BODY
        return 0.5, {name: np.ones_like(value) for name, value in params.items()}

def program() -> Program:
    print("the factory speaks")
    return Program()
"""


# A step that goes on once it is told to, by a signal.
BATCH_IN_HAND = (
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print('pid', os.getpid()); "
    "signal.sigwait([signal.SIGUSR1])"
)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster(JOB) as (cluster, _):
        cluster.jobs.leases = [
            job_pb2.LeaseReply(range=job_pb2.DataRange(lease=1, start=0, stop=16)),
            job_pb2.LeaseReply(finished=True),
        ]
        cluster.members.assignments[1] = ("digits", 1)
        yield cluster


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def start(cluster: FakeCluster, registry: CollectorRegistry, tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts a daemon whose program runs this code in its `loss_and_gradients`."""
    daemons: list[Daemon] = []

    def go(body: str = "pass", **options: Any) -> Daemon:
        (tmp_path / "trained.py").write_text(PROGRAM.replace("BODY", body))
        paths = (str(tmp_path),)
        config = WorkerConfig(cluster.address, "worker-1", device="cpu", paths=paths, retry_for_s=5.0, **options)
        daemons.append(start_worker(config, registry))
        return daemons[-1]

    yield go
    for daemon in daemons:
        daemon.stop()
    assert [child for child in psutil.Process().children() if "shoal_worker" in child.cmdline()] == []


def has_thread() -> bool:
    """Returns whether a daemon's thread is alive."""
    return any(thread.name == "daemon" for thread in threading.enumerate())


def test_job_is_trained_reported_and_finished(
    cluster: FakeCluster, start: Callable[..., Daemon], registry: CollectorRegistry
) -> None:
    start("print('batch', sorted(batch)[0] >= 0)")
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert (finish.job, finish.worker, finish.incarnation, finish.error) == ("digits", "worker-1", 1, "")
    reports = cluster.record.of(job_pb2.ReportRequest)
    assert cluster.record.requests.index(reports[-1]) < cluster.record.requests.index(finish)
    assert sum(report.accepted for report in reports) == 4
    assert sum(report.samples for report in reports) == 16
    assert [line for report in reports for line in report.log] == ["the factory speaks", *["batch True"] * 4]
    timings = [timing for report in reports for timing in report.timings]
    assert [timing.step for timing in timings] == [0, 1, 2, 3]
    assert all(timing.compute > 0 and timing.pull > 0 and timing.push > 0 for timing in timings)
    assert {push.header.weight for push in cluster.record.of(pb.PushRequest)} == {4.0}
    assert [lease.done for lease in cluster.record.of(job_pb2.LeaseRequest)] == [0, 1]
    assert registry.get_sample_value("shoal_worker_steps_total") == 4
    assert registry.get_sample_value("shoal_worker_samples_total") == 16
    assert registry.get_sample_value("shoal_worker_compute_seconds_count") == 4
    assert registry.get_sample_value("shoal_worker_device_info", {"device": "cpu"}) == 1


def test_metrics_tell_of_the_trainer_and_of_lines_that_wait(
    cluster: FakeCluster, start: Callable[..., Daemon], registry: CollectorRegistry
) -> None:
    sample = registry.get_sample_value
    start(BATCH_IN_HAND)
    trainer = pid_of(cluster)
    assert sample("shoal_worker_trainers") == 1
    assert sample("shoal_worker_log_lines_waiting") == 0
    cluster.jobs.error = errors.Unreachable("away")  # nobody takes reports
    psutil.Process(trainer).send_signal(signal.SIGUSR1)
    wait_until(lambda: (sample("shoal_worker_log_lines_waiting") or 0) > 0, what="lines that wait")
    cluster.jobs.error = None
    wait_until(lambda: sample("shoal_worker_log_lines_waiting") == 0, what="lines that were sent")
    psutil.Process(trainer).kill()
    wait_until(lambda: sample("shoal_worker_trainers") == 0, what="the trainer's end")


def test_a_job_that_runs_out_of_memory_fails_and_the_daemon_lives_on(
    cluster: FakeCluster, start: Callable[..., Daemon]
) -> None:
    start("np.empty(1 << 57)")
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert "ran out of memory on cpu, with a batch of 4 samples: Unable to allocate 1.00 EiB" in finish.error
    assert has_thread()


def test_overlapping_job_is_trained_reported_and_finished(
    cluster: FakeCluster, start: Callable[..., Daemon], registry: CollectorRegistry
) -> None:
    cluster.jobs.job = replace(JOB, consistency=Asynchronous())
    cluster.jobs.joins = [cluster.joined(ready=True, state=job_pb2.RUNNING)]
    start()
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert finish.error == ""
    reports = cluster.record.of(job_pb2.ReportRequest)
    assert (sum(report.accepted for report in reports), sum(report.samples for report in reports)) == (4, 16)
    pushes = [push.header for push in cluster.record.of(pb.PushRequest)]
    assert [push.stamp.step for push in pushes] == [0, 1, 2, 3]
    assert max(pull.ahead for pull in cluster.record.of(pb.PullRequest)) == 1
    assert registry.get_sample_value("shoal_worker_steps_total") == 4


def test_pushes_say_how_far_the_data_is(cluster: FakeCluster, start: Callable[..., Daemon]) -> None:
    start()
    cluster.record.wait_for(job_pb2.FinishRequest)
    cursors = [(push.header.cursor.lease, push.header.cursor.consumed) for push in cluster.record.of(pb.PushRequest)]
    assert cursors == [(1, 4), (1, 8), (1, 12), (1, 16)]


def test_a_trainer_that_ends_by_its_steps_says_how_far_the_data_is(
    cluster: FakeCluster, start: Callable[..., Daemon]
) -> None:
    cluster.jobs.job = replace(JOB, max_steps=2)
    cluster.jobs.joins = [cluster.joined(ready=True, state=job_pb2.RUNNING)]
    start()
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert (finish.lease, finish.consumed, finish.error) == (1, 8, "")


def test_a_daemon_that_leaves_finishes_the_batch_in_hand_and_says_how_far_it_is(
    cluster: FakeCluster, start: Callable[..., Daemon], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    daemon = start(f"print('pid', os.getpid()); open({str(tmp_path / 'gate')!r}).read()")
    pid_of(cluster)
    enough = threading.Event()
    draining = threading.Thread(target=daemon.leave, args=[enough])
    with capture_logs() as logs:
        draining.start()
        asked = "draining: finishing the current batch"
        wait_until(lambda: asked in [entry["event"] for entry in logs], what="the trainer's being asked")

    def left() -> bool:
        """Ends the batch in hand, and another one if the trainer began it before it read the request."""
        with suppress(OSError):  # no batch is in hand
            os.close(os.open(tmp_path / "gate", os.O_WRONLY | os.O_NONBLOCK))
        return not draining.is_alive()

    wait_until(left, timeout_s=20, what="the trainer's end")
    assert enough.is_set()
    daemon.stop()
    [leave] = cluster.record.of(coordinator_pb2.LeaveRequest)
    pushes = cluster.record.of(pb.PushRequest)
    assert len(pushes) >= 1
    assert leave.cursor == pushes[-1].header.cursor
    assert cluster.record.of(job_pb2.FinishRequest) == []
    assert cluster.record.requests[-1] is leave, "all else was told before"


@pytest.mark.parametrize("way", ["told", "late"])
def test_a_daemon_that_leaves_does_not_wait_forever(
    cluster: FakeCluster, start: Callable[..., Daemon], way: str
) -> None:
    daemon = start(BATCH_IN_HAND, leave_grace_s=0.2 if way == "late" else 60.0)
    pid_of(cluster)
    enough = threading.Event()
    if way == "told":
        enough.set()
    daemon.leave(enough)
    daemon.stop()
    [leave] = cluster.record.of(coordinator_pb2.LeaveRequest)
    assert not leave.HasField("cursor")


def test_a_daemon_stops_though_its_trainer_does_not_end(
    cluster: FakeCluster, start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a process that is stuck in a driver, signals have no effect until the daemon has stopped."""
    stuck: list[TrainerProcess] = []
    monkeypatch.setattr("shoal_worker.daemon.KILLED_S", 0.1)
    monkeypatch.setattr(TrainerProcess, "stop", lambda process, _: stuck.append(process))
    daemon = start(BATCH_IN_HAND, stop_grace_s=0.1)
    trainer = psutil.Process(pid_of(cluster))
    with capture_logs() as logs:
        daemon.stop()
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
        "trainer does not end although it was killed; leaving without it"
    ]
    assert [process.pid for process in stuck] == [trainer.ppid()], "its guard"
    trainer.kill()
    wait_until(lambda: not is_alive(trainer))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "loss_and_gradients, step 0, raised ZeroDivisionError: division by zero"),
        ("return 1.0, {'w': params['w']}", "INVALID_GRADIENT"),
        ("sys.exit('enough')", "raised SystemExit: enough"),
        ("os._exit(3)", "exit status 3"),
        ("os._exit(0)", "exit status 0"),
    ],
)
def test_a_program_that_fails_fails_its_job_and_not_the_daemon(
    cluster: FakeCluster, start: Callable[..., Daemon], body: str, said: str
) -> None:
    start(body)
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert said in finish.error
    beats = len(cluster.record.of(coordinator_pb2.HeartbeatRequest))
    cluster.record.wait_for(coordinator_pb2.HeartbeatRequest, beats + 2)
    assert len(cluster.record.of(coordinator_pb2.RegisterRequest)) == 1


@pytest.mark.parametrize(
    "program", ["subprocess:run", "os:system", "builtins:eval", "yaml:load", "shoal.client:Client"]
)
def test_a_program_that_is_not_allowed_is_refused_before_a_process_is_made(
    cluster: FakeCluster, start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    cluster.members.program = program
    cluster.jobs.job = replace(JOB, program=program, settings={"args": ["touch", "owned"]})
    start()
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert finish.error.startswith(f"PROGRAM_NOT_ALLOWED: program {program}: ")
    assert not finish.trainer_failed
    beats = len(cluster.record.of(coordinator_pb2.HeartbeatRequest))
    cluster.record.wait_for(coordinator_pb2.HeartbeatRequest, beats + 2)
    assert has_thread()


SECRETS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "GOOGLE_APPLICATION_CREDENTIALS": "/key.json",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
    "SHOAL_TOKEN": "secret",
    "SHOAL_TLS_KEY": "/key.pem",
    "SHOAL_CHECKPOINTS": "s3://bucket",
    "DATABASE_URL": "postgres://me:secret@host",
}
HARMLESS = {
    "PATH": os.defpath,
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "SHOAL_TRANSPORT": "auto",
}


@pytest.mark.parametrize(
    ("options", "further"),
    [
        ((), {}),
        (
            ("AWS_ACCESS_KEY_ID", "MY_SETTING=a=b", "NOT_SET"),
            {"AWS_ACCESS_KEY_ID": "key", "MY_SETTING": "a=b"},
        ),
    ],
)
def test_a_trainer_gets_the_allowed_variables_of_its_daemon_and_no_other(
    cluster: FakeCluster, start: Callable[..., Daemon], options: tuple[str, ...], further: dict[str, str]
) -> None:
    with mock.patch.dict(os.environ, {**SECRETS, **HARMLESS}, clear=True):
        start(
            "import json; print('environment', json.dumps([dict(os.environ), "
            "open(f'/proc/{os.getppid()}/environ').read().split(chr(0))]))",
            isolation=TrainerIsolation(options),
        )
        cluster.record.wait_for(job_pb2.FinishRequest)
    lines = [line for report in cluster.record.of(job_pb2.ReportRequest) for line in report.log]
    [first, *_] = [line.partition(" ")[2] for line in lines if line.startswith("environment ")]
    own, parents = json.loads(first)
    assert own == HARMLESS | further
    assert {line.partition("=")[0] for line in parents if line} == own.keys(), "of the process that started it"


@pytest.mark.parametrize("passed", [False, True])
def test_a_program_reads_an_object_store_with_the_keys_that_the_operator_passes(
    cluster: FakeCluster, start: Callable[..., Daemon], s3: str, passed: bool
) -> None:
    names = [name for name in os.environ if name.startswith("AWS_")]
    with fsspec.open(f"{s3}/rows.csv", "w") as file:
        file.write("x\n1\n2\n")
    options = [name for name in names if passed or "KEY" not in name]
    start(
        f"import shoal.data; print('rows', len(shoal.data.Csv('{s3}/rows.csv')))",
        isolation=TrainerIsolation(tuple(options)),
    )
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    if passed:
        assert finish.error == ""
        assert "rows 2" in [line for report in cluster.record.of(job_pb2.ReportRequest) for line in report.log]
    else:
        assert f"{s3}/rows.csv cannot be read: Unable to locate credentials" in finish.error
        assert "--trainer-env AWS_ACCESS_KEY_ID" in finish.error


@pytest.mark.parametrize(
    ("limits", "body", "said"),
    [
        (
            TrainerLimits(memory=600 << 20),
            "np.ones(1 << 27)",
            "the limit of a trainer's memory on this worker is 629,145,600 bytes (--trainer-memory)",
        ),
        (
            TrainerLimits(open_files=64),
            "kept = [open(os.devnull) for _ in range(64)]",
            "the limit of a trainer's open files on this worker is 64 (--trainer-open-files)",
        ),
    ],
)
def test_a_trainer_that_exceeds_a_limit_fails_its_job_with_the_limit_and_its_option(
    cluster: FakeCluster, start: Callable[..., Daemon], limits: TrainerLimits, body: str, said: str
) -> None:
    start(body, isolation=TrainerIsolation(limits=limits))
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert "loss_and_gradients, step 0" in finish.error
    assert finish.error.endswith(said)


NAMED = ("alice=of_alice", "bob=of_bob:program")
BY_ROLE = ("@admin=of_alice", "@submitter=of_bob:program")


@pytest.mark.parametrize(
    ("submitter", "role", "other", "patterns"),
    [("alice", "", "bob", NAMED), ("bob", "", "alice", NAMED), ("alice", "admin", "bob", BY_ROLE)],
)
def test_a_submitter_runs_its_own_programs_and_is_refused_those_of_others_before_import(
    cluster: FakeCluster,
    start: Callable[..., Daemon],
    tmp_path: Path,
    submitter: str,
    role: str,
    other: str,
    patterns: tuple[str, ...],
) -> None:
    for each in ("alice", "bob"):
        (tmp_path / f"of_{each}.py").write_text(
            f"open({str(tmp_path / each)!r}, 'w').close()\n" + PROGRAM.replace("BODY", "pass")
        )
    cluster.members.submitter, cluster.members.submitter_role = submitter, role
    cluster.members.program = f"of_{other}:program"
    cluster.jobs.job = replace(JOB, program=f"of_{other}:program")
    start(allow_programs=patterns)
    [refused] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert refused.error.startswith(f"PROGRAM_NOT_ALLOWED: program of_{other}:program: ")
    assert f"to jobs of {submitter}" in refused.error
    assert f"of_{other}" not in refused.error.partition("this worker allows")[2], "it does not name others' patterns"
    cluster.members.program = f"of_{submitter}:program"
    cluster.jobs.job = replace(JOB, program=f"of_{submitter}:program")
    cluster.members.assignments[1] = ("digits", 2)
    [_, trained] = cluster.record.wait_for(job_pb2.FinishRequest, 2)
    assert trained.error == ""
    assert (tmp_path / submitter).exists()
    assert not (tmp_path / other).exists()


def test_a_trainer_that_is_killed_means_a_new_incarnation(
    cluster: FakeCluster, start: Callable[..., Daemon], registry: CollectorRegistry
) -> None:
    start("print('about to die'); sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)")
    cluster.record.wait_for(coordinator_pb2.RegisterRequest, 2)
    assert cluster.record.of(job_pb2.FinishRequest) == []
    lines = [line for report in cluster.record.of(job_pb2.ReportRequest) for line in report.log]
    assert "about to die" in lines
    assert lines[-1].startswith("the trainer was killed by SIGKILL")
    assert registry.get_sample_value("shoal_worker_trainer_crashes_total") == 1


@pytest.mark.parametrize("way", ["heartbeat", "report"])
def test_a_job_that_is_taken_back_is_killed(cluster: FakeCluster, start: Callable[..., Daemon], way: str) -> None:
    # The program, and a child that it leaves behind, would run forever; when asked, it writes a line first.
    start(
        "import subprocess; subprocess.Popen(['sleep', '1000']); "
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print('pid', os.getpid()); "
        "signal.sigwait([signal.SIGUSR1]); print('asked'); signal.pause()"
    )
    trainer = psutil.Process(pid_of(cluster))
    family = [trainer, *trainer.children()]
    if way == "heartbeat":
        del cluster.members.assignments[1]
    else:
        cluster.jobs.stop = True
        trainer.send_signal(signal.SIGUSR1)
    # Not psutil's own waiting: that would take the trainer's exit status away from the daemon.
    wait_until(lambda: not any(is_alive(process) for process in family), what="the family's end")
    assert [finish.error for finish in cluster.record.of(job_pb2.FinishRequest)] == []


def test_end_is_reported_after_a_long_absence_of_the_coordinator(
    cluster: FakeCluster, start: Callable[..., Daemon]
) -> None:
    cluster.jobs.refused = (job_pb2.ReportRequest, job_pb2.FinishRequest)  # the daemon's: the trainer comes to its end
    cluster.jobs.error = errors.Unreachable("away")
    start("pass")
    cluster.record.wait_for(job_pb2.ReportRequest, 3)
    cluster.jobs.error = None
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert finish.error == ""


def test_counts_of_a_trainer_that_ends_while_the_coordinator_is_away_reach_it_when_it_returns(
    cluster: FakeCluster, start: Callable[..., Daemon]
) -> None:
    cluster.jobs.refused = (job_pb2.ReportRequest,)
    cluster.jobs.error = errors.Unreachable("away")
    start(BATCH_IN_HAND)
    trainer = psutil.Process(pid_of(cluster))

    def begun() -> int:
        log = cluster.record.of(job_pb2.ReportRequest)[-1].log
        return sum(line.startswith("pid") for line in log)

    trainer.send_signal(signal.SIGUSR1)
    wait_until(lambda: begun() == 2, what="the second step")
    cluster.server.error = errors.Fenced("incarnation 1 of worker-1 is not admitted")
    trainer.send_signal(signal.SIGUSR1)
    wait_until(lambda: cluster.record.of(job_pb2.ReportRequest)[-1].log[-1].startswith("the trainer cannot continue"))
    assert len(cluster.record.of(coordinator_pb2.RegisterRequest)) == 1
    cluster.jobs.error = None
    cluster.record.wait_for(coordinator_pb2.RegisterRequest, 2)
    assert cluster.record.of(job_pb2.ReportRequest)[-1].accepted == 1


def test_a_fenced_trainer_means_a_new_incarnation(cluster: FakeCluster, start: Callable[..., Daemon]) -> None:
    cluster.server.error = errors.Fenced("incarnation 1 of worker-1 is not admitted")
    start()
    cluster.record.wait_for(coordinator_pb2.RegisterRequest, 2)
    assert cluster.record.of(job_pb2.FinishRequest) == []


def test_a_trainer_that_is_fenced_because_its_job_ended_means_no_new_incarnation(
    cluster: FakeCluster, start: Callable[..., Daemon], registry: CollectorRegistry
) -> None:
    """Servers fence the workers of a cancelled job, and the daemon's next report or heartbeat comes later."""
    cluster.server.error = errors.Fenced("incarnation 1 of worker-1 is not admitted")
    add, told = cluster.record.add, threading.Event()

    def end_the_job(request: Any) -> None:
        if isinstance(request, job_pb2.ReportRequest) and "the trainer cannot continue" in "".join(request.log):
            cluster.jobs.stop = True
            told.set()
        add(request)

    cluster.record.add = end_the_job  # type: ignore[method-assign]  # of this one alone
    start()
    assert told.wait(20)
    beats = len(cluster.record.of(coordinator_pb2.HeartbeatRequest))
    cluster.record.wait_for(coordinator_pb2.HeartbeatRequest, beats + 4)
    assert len(cluster.record.of(coordinator_pb2.RegisterRequest)) == 1
    assert cluster.record.of(job_pb2.FinishRequest) == []
    assert registry.get_sample_value("shoal_worker_trainer_crashes_total") in {None, 0}


def test_a_job_that_ended_before_the_trainer_came_is_left_alone(
    cluster: FakeCluster, start: Callable[..., Daemon]
) -> None:
    cluster.jobs.joins = [cluster.joined(ready=False, placed=False, state=job_pb2.CANCELLED)]
    start()
    [finish] = cluster.record.wait_for(job_pb2.FinishRequest)
    assert finish.error == ""


def test_a_device_that_is_not_there_stops_the_start(cluster: FakeCluster, registry: CollectorRegistry) -> None:
    with pytest.raises(errors.ShoalError, match="cuda:99 does not exist"):
        start_worker(WorkerConfig(cluster.address, "worker-1", device="cuda:99"), registry)


@pytest.mark.parametrize(("wish", "reason"), [("auto", "CuPy cannot be imported"), ("cpu", None)])
def test_log_has_the_device_and_why_it_is_no_gpu(
    cluster: FakeCluster, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, wish: str, reason: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    cluster.members.assignments.clear()
    with capture_logs() as logs:
        start_worker(WorkerConfig(cluster.address, "worker-1", device=wish), registry).stop()
    [line] = [line for line in logs if line["event"] == "device chosen"]
    assert line["device"] == "cpu"
    assert line["reason"] is reason or line["reason"].startswith(reason)


def test_a_trainer_ends_when_its_parent_is_killed(cluster: FakeCluster, tmp_path: Path) -> None:
    (tmp_path / "trained.py").write_text(PROGRAM.replace("BODY", "print('pid', os.getpid()); signal.pause()"))
    script = f"""
        from prometheus_client import CollectorRegistry
        from shoal_worker.daemon import WorkerConfig
        from shoal_worker.process import start_worker
        start_worker(WorkerConfig({cluster.address!r}, "worker-1", "cpu", ({str(tmp_path)!r},)), CollectorRegistry())
        import signal
        signal.pause()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)]) as parent:
        trainer = os.pidfd_open(pid_of(cluster))
        try:
            parent.kill()
            ended, _, _ = select.select([trainer], [], [], 20)
        finally:
            os.close(trainer)
    assert ended


def pid_of(cluster: FakeCluster) -> int:
    """Returns the process id of the trainer, which its program prints when it computes."""
    count = 0
    while True:
        count += 1
        report = cluster.record.wait_for(job_pb2.ReportRequest, count)[count - 1]
        for line in report.log:
            if line.startswith("pid "):
                return int(line.split()[1])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
