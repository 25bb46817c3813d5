"""Command line: its output for people and for machines, and the exit codes that scripts rely on."""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from grpc import ServicerContext
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

import shoal
from shoal._cli import options, output
from shoal._cli.app import app
from shoal._cli.job_watch import follow, summary
from shoal._cli.output import Output
from shoal._security.certificates import make_certificates
from shoal._wire.placement import Placement
from shoal.optim import Optimizer
from shoal.status import Evaluation, JobResult, StepTiming, Timings
from shoal.v1 import coordinator_pb2, job_pb2, token_pb2
from shoal_coordinator.api.codecs import timings_message
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from support.clusters.fake_coordinator import FakeCoordinator
from support.clusters.shard_servers import ShardServers


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def run(coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command against the coordinator; wide, so that tables are not folded."""
    monkeypatch.setenv("SHOAL_COORDINATOR", coordinator.address)
    monkeypatch.setenv("SHOAL_RETRY_FOR", "5")
    monkeypatch.setenv("COLUMNS", "240")
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def job(coordinator: FakeCoordinator) -> str:
    coordinator.add(
        shoal.Job("models.digits:mlp", name="digits", workers=2, consistency=shoal.BoundedStaleness(4), max_steps=10),
        workers=["worker-0", "worker-1"],
        progress=job_pb2.Progress(steps=1234, samples=39488, samples_per_s=5000, loss=0.25, staleness_max=3),
    )
    return "digits"


# Members of a job: name, rank and state.
_MEMBERS: list[tuple[str, int, job_pb2.JobMember.State.ValueType]] = [
    ("b", 0, job_pb2.JobMember.FINISHED),
    ("a", 1, job_pb2.JobMember.PRESENT),
    ("gone", 2, job_pb2.JobMember.LEFT),
]


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def without_times(text: str) -> list[str]:
    """Returns the lines that `--follow` shows, and checks that each begins with its local time of day."""
    times = {time.strftime("%H:%M:%S ", time.localtime(of_event)) for of_event in range(10, 20)}
    assert {line[:9] for line in text.splitlines()} <= times
    return [line[9:] for line in text.splitlines()]


class TestSubmit:
    @pytest.fixture
    def follow_mine(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
    ) -> Callable[..., Result]:
        """Submits a job and follows it to the given end, with further options."""
        submit = coordinator.Submit

        def follow(end: str, *options: str) -> Result:
            def submit_and_train(request: job_pb2.SubmitRequest, context: ServicerContext) -> job_pb2.SubmitReply:
                reply: job_pb2.SubmitReply = submit(request, context)
                coordinator.enter("mine", "PENDING", "waiting for workers: 0 of 1")
                coordinator.log("mine", "hello :x: [b]")
                metrics = job_pb2.Metrics(worker="worker-0", step=1, values={"loss": float("nan")})
                coordinator.emit("mine", metrics=metrics)
                coordinator.enter("mine", end, "worker-0: ValueError: no" if end == "FAILED" else "")
                return reply

            monkeypatch.setattr(coordinator, "Submit", submit_and_train)
            coordinator.stop()
            coordinator.start()
            return run("submit", "models:mlp", "--name", "mine", "--follow", *options)

        return follow

    def test_makes_the_job_that_its_options_say(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        result = run(
            *("submit", "models:mlp", "--name", "mine", "--workers", 3, "--consistency", "ssp:4", "--epochs", 2),
            *("--set", "hidden=64", "--set", "name=mnist", "--set", "layers=[1,2]", "--set", "fast=true"),
            *("--optimizer", "adam:learning_rate=0.01,beta1=0.8", "--batch-size", 16, "--max-steps", 9),
            *(
                "--shards",
                5,
                "--seed",
                7,
                "--wire-dtype",
                "bfloat16",
                "--no-overlap",
                "--min-workers",
                2,
                "--max-workers",
                8,
            ),
        )
        assert result.exit_code == 0, result.output
        assert "submitted mine" in result.stdout
        assert shoal.Job.from_proto(coordinator.jobs["mine"].spec) == shoal.Job(
            "models:mlp",
            name="mine",
            workers=3,
            min_workers=2,
            max_workers=8,
            consistency=shoal.BoundedStaleness(4),
            optimizer=shoal.optim.Adam(0.01, beta1=0.8),
            settings={"hidden": 64, "name": "mnist", "layers": [1, 2], "fast": True},
            epochs=2,
            batch_size=16,
            max_steps=9,
            shards=5,
            seed=7,
            wire_dtype="bfloat16",
            overlap=False,
        )

    def test_checkpoint_options_reach_the_job(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        options = [
            "--checkpoint-every-steps",
            50,
            "--keep-last",
            5,
            "--keep-every",
            10,
            "--from",
            "base/7",
            "--partial-restore",
        ]
        assert run("submit", "models:mlp", "--name", "mine", *options).exit_code == 0
        made = shoal.Job.from_proto(coordinator.jobs["mine"].spec)
        assert made.checkpoints == shoal.CheckpointPolicy(every_s=0, every_steps=50, keep_last=5, keep_every=10)
        assert (made.restore, made.partial_restore) == ("base/7", True)
        on_demand = ["--checkpoint-every-seconds", 0, "--no-checkpoint-at-end"]
        assert run("submit", "models:mlp", "--name", "unsaved", *on_demand).exit_code == 0
        assert shoal.Job.from_proto(coordinator.jobs["unsaved"].spec).checkpoints == shoal.checkpoint_policy.NEVER
        assert run("submit", "models:mlp", "--name", "timed", "--no-checkpoint-at-end").exit_code == 0
        timed = shoal.Job.from_proto(coordinator.jobs["timed"].spec)
        assert timed.checkpoints == shoal.CheckpointPolicy(at_end=False)
        for wrong in (
            ["--from", "../x"],
            ["--partial-restore"],
            ["--keep-last", 0],
            ["--checkpoint-every-seconds", -1],
        ):
            assert run("submit", "models:mlp", *wrong).exit_code == 2

    def test_evaluation_options_reach_the_job(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        options = ["--evaluate-every-steps", 50, "--metric", "accuracy", "--metric-mode", "max", "--patience", 3]
        options += ["--min-delta", 0.001, "--checkpoint-best", "--no-evaluation-at-end", "--from", "base/best"]
        assert run("submit", "models:mlp", "--name", "mine", *options).exit_code == 0
        made = shoal.Job.from_proto(coordinator.jobs["mine"].spec)
        assert made.evaluation == shoal.EvaluationPolicy(
            every_steps=50,
            at_end=False,
            metric="accuracy",
            mode="max",
            patience=3,
            min_delta=0.001,
            checkpoint_best=True,
        )
        assert made.restore == "base/best"
        assert run("submit", "models:mlp", "--name", "at-end", "--metric", "error").exit_code == 0
        at_end = shoal.Job.from_proto(coordinator.jobs["at-end"].spec)
        assert at_end.evaluation == shoal.EvaluationPolicy(metric="error")
        assert run("submit", "models:mlp", "--name", "never", "--no-evaluation-at-end").exit_code == 0
        assert shoal.Job.from_proto(coordinator.jobs["never"].spec).evaluation is None
        for wrong in (
            ["--patience", 3],
            ["--metric-mode", "most"],
            ["--evaluate-every-steps", -1],
            ["--min-delta", "nan"],
        ):
            assert run("submit", "models:mlp", *wrong).exit_code == 2

    def test_defaults_are_those_of_a_job(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        assert run("submit", "models:mlp", "--name", "plain").exit_code == 0
        assert shoal.Job.from_proto(coordinator.jobs["plain"].spec) == shoal.Job("models:mlp", name="plain")

    def test_a_file_is_refused_before_the_coordinator_is_asked(
        self, coordinator: FakeCoordinator, run: Callable[..., Result]
    ) -> None:
        for program, hint in (("digits.py:Digits", "drop .py: digits:Digits"), ("__main__:Digits", "%%writefile")):
            refused = run("submit", program)
            assert refused.exit_code == 2
            assert hint in refused.stderr
        assert not coordinator.jobs

    def test_prints_the_job_for_machines(self, run: Callable[..., Result]) -> None:
        (record,) = records(run("submit", "models:mlp", "--name", "mine", "--json").stdout)
        assert (record["name"], record["state"], record["program"]) == ("mine", "pending", "models:mlp")
        assert (record["wire_dtype"], record["overlap"]) == ("float32", True)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--consistency", "ssp:-1"], "bound is -1"),
            (["--consistency", "ssp:99999999999999999999999"], "a whole number from 0 to"),
            (["--consistency", "fast"], "is not one of sync"),
            (["--workers", "0"], "workers is 0"),
            (["--workers", "2", "--consistency", "sync:2"], "are too many for 2 workers"),
            (["--optimizer", "adamm"], "choose one of"),
            (["--set", "hidden"], "is not KEY=VALUE"),
            (["--name", "No Name"], "job name 'No Name'"),
        ],
    )
    def test_invalid_options_are_refused_before_the_request(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], options: list[str], said: str
    ) -> None:
        result = run("submit", "models:mlp", *options)
        assert result.exit_code == 2
        assert said in result.stderr
        assert "Traceback" not in result.output
        assert coordinator.jobs == {}

    def test_follows_to_the_end(self, follow_mine: Callable[..., Result]) -> None:
        result = follow_mine("SUCCEEDED")
        assert result.exit_code == 0, result.output
        assert without_times(result.stderr) == [
            "mine pending: waiting for workers: 0 of 1",
            "worker-0: hello :x: [b]",
            "mine succeeded",
        ]
        assert "mine succeeded" in result.stdout

    def test_follows_to_a_bad_end(self, follow_mine: Callable[..., Result]) -> None:
        result = follow_mine("FAILED", "--json")
        assert result.exit_code == 7
        assert [record.get("event") for record in records(result.stdout)] == [None, "state", "log", "metrics", "state"]
        (error,) = records(result.stderr)
        assert error["error"]["code"] == "JOB_FAILED"
        assert "ValueError: no" in error["error"]["message"]

    def test_metrics_that_json_cannot_express_are_null(self, follow_mine: Callable[..., Result]) -> None:
        result = follow_mine("SUCCEEDED", "--json")
        assert records(result.stdout)[1]["reason"] == "waiting for workers: 0 of 1"
        assert records(result.stdout)[3]["values"] == {"loss": None}
        assert records(result.stdout)[-1]["state"] == "succeeded"

    def test_shows_on_a_terminal_why_it_waits(
        self,
        coordinator: FakeCoordinator,
        run: Callable[..., Result],
        job: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        monkeypatch.setenv("TERM", "xterm")
        coordinator.enter(job, "PENDING", "waiting for workers: 1 of 2")
        coordinator.log(job, "hello :x: [b]")
        coordinator.enter(job, "SUCCEEDED")
        out = Output(False)
        assert out.errors.is_terminal
        with shoal.Client(coordinator.address) as client:
            follow(client.job(job), out)
        shown = capsys.readouterr().err
        assert "digits pending: waiting for workers: 1 of 2\n" in shown
        assert "worker-0: hello :x: [b]" in shown
        assert "━" in shown  # the bar


class TestOptimizers:
    @pytest.mark.parametrize(
        ("text", "made"),
        [
            ("sgd", shoal.optim.SGD()),
            ("momentum:learning_rate=0.1,momentum=0.8,nesterov=true", shoal.optim.Momentum(0.1, 0.8, True)),
            (
                "adamw:learning_rate=1e-3,schedule=cosine,steps=100,warmup_steps=10",
                shoal.optim.AdamW(shoal.optim.CosineLR(1e-3, steps=100, warmup_steps=10)),
            ),
            ("adam:schedule=exponential,gamma=0.9", shoal.optim.Adam(shoal.optim.ExponentialLR(1e-3, gamma=0.9))),
            (
                "sgd:weight_decay=0.1,decay_exclude=*bias|norm*",
                shoal.optim.SGD(weight_decay=0.1, decay_exclude=("*bias", "norm*")),
            ),
            ("adam:lr=0.01,betas=0.8|0.95", shoal.optim.Adam(0.01, 0.8, 0.95)),
            (
                "sgd:lr=0.1,schedule=piecewise,boundaries=10|20,rates=0.01|0.001",
                shoal.optim.SGD(shoal.optim.PiecewiseLR(0.1, (10, 20), (0.01, 0.001))),
            ),
        ],
    )
    def test_are_read_as_people_write_them(self, text: str, made: Optimizer) -> None:
        assert options.optimizer(text) == made

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("addam", "unknown optimizer 'addam'"),
            ("adam:schedule=cos", "unknown schedule 'cos'"),
            ("adam:beta3=1", "unknown beta3; with this schedule it takes learning_rate"),
            ("adam:0.1", "'0.1' is not KEY=VALUE"),
            ("adam:schedule=cosine", "schedule=cosine needs steps"),
            ("adam:learning_rate=fast", "adam: learning_rate is 'fast'"),
            ("adam:warmup_steps=2.5", "adam: warmup_steps is 2.5"),
            ("adam:learning_rate=fast,schedule=cosine,steps=9", "cosine: learning_rate is 'fast'"),
            ("adam:beta1=2", "beta1"),
            ("adam:lr=1,learning_rate=1", "learning_rate and lr are both given"),
            ("adam:beta1=0.9,betas=0.9|0.99", "beta1 and betas are both given"),
            ("sgd:betas=0.9|0.99", "unknown betas"),
            ("sgd:schedule=piecewise,boundaries=1|x,rates=1|2", "a number of piecewise: boundaries is 'x'"),
        ],
    )
    def test_error_names_the_invalid_part(self, text: str, said: str) -> None:
        with pytest.raises(shoal.InvalidOptimizer, match=said):
            options.optimizer(text)


class TestFailures:
    REASON = "worker w failed: PROGRAM_ERROR: step 0 raised ValueError: no\nTraceback:\nValueError: no"

    def test_are_told_once_under_follow(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        for line in ("PROGRAM_ERROR: step 0 raised ValueError: no", "Traceback:", "ValueError: no"):
            coordinator.log(job, line)
        coordinator.enter(job, "FAILED", self.REASON)
        result = run("wait", job, "--follow")
        assert result.exit_code == 7
        assert result.stderr.count("step 0 raised") == result.stderr.count("Traceback:") == 1
        assert result.stderr.endswith("error: job digits failed: worker w failed, as the lines above say\n")

    def test_are_told_whole_where_no_line_told_them(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        coordinator.log(job, "PROGRAM_ERROR: step 0 raised ValueError: no")  # its traceback was cut off
        coordinator.enter(job, "FAILED", self.REASON)
        assert run("wait", job, "--follow").stderr.endswith(f"error: job digits failed: {self.REASON}\n")
        assert run("wait", job).stderr == f"error: job digits failed: {self.REASON}\n"


class TestJobs:
    def test_are_listed(self, run: Callable[..., Result], job: str) -> None:
        lines = run("jobs").stdout.splitlines()
        assert lines[-1].split()[:6] == ["digits", "running", "models.digits:mlp", "ssp:4", "2/2", "1,234"]
        (record,) = records(run("jobs", "--json").stdout)
        assert (record["name"], record["state"], record["consistency"]) == ("digits", "running", "ssp:4")
        assert record["progress"]["staleness_max"] == 3

    def test_waiting_job_shows_its_reason_and_no_metrics(
        self, coordinator: FakeCoordinator, run: Callable[..., Result]
    ) -> None:
        waiting = "waiting for workers: 2 of 5\nand more"
        coordinator.add(shoal.Job("m:f", name="early", workers=5), "PENDING", workers=["a", "b"], reason=waiting)
        _, row, note = run("jobs").stdout.splitlines()
        assert row.split()[:9] == ["early", "pending", "m:f", "sync", "2/5", "0", "-", "-", "-"]
        assert note == "early: waiting for workers: 2 of 5"

    def test_old_failures_and_long_reasons_do_not_fill_the_list(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        long = "the trainer ended: " + "x" * 5_000
        for number in range(9):
            coordinator.add(shoal.Job("m:f", name=f"failed-{number}"), "FAILED", reason=long, finished_at=3.0)
        shown = run("jobs").stdout
        assert len(shown.splitlines()) == 1 + 1 + 5 + 5 + 1  # columns, the live job, ended ones, their reasons, a note
        assert max(map(len, shown.splitlines())) < 240
        assert job in shown
        assert shown.splitlines()[-1] == "older jobs that have ended are not shown; `shoal jobs --all` shows all jobs"
        assert sum(line.startswith("failed-") for line in run("jobs", "--all").stdout.splitlines()) == 2 * 9
        assert {it["reason"] for it in records(run("jobs", "--json").stdout)} == {"", long}

    def test_show_their_copies(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        def notes(**fields: Any) -> list[str]:
            coordinator.add(shoal.Job("m:f", name="t1", replicas=2), "RUNNING", **fields)
            return [line for line in run("jobs").stdout.splitlines() if line.startswith("t1: ")]

        assert notes(copies=2) == ["t1: copies 2/2"]
        assert notes(copies=1, failovers=1) == ["t1: copies 1/2; continued once with backups"]
        assert notes(copies=2, failovers=3) == ["t1: copies 2/2; continued 3 times with backups"]
        assert notes() == []

    def test_show_their_restarts(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        saved = job_pb2.Checkpoint(number=2, step=6_282)

        def notes(state: str, **fields: Any) -> list[str]:
            coordinator.add(shoal.Job("m:f", name="t1"), state, **fields)
            return [line for line in run("jobs").stdout.splitlines() if line.startswith("t1: ")]

        assert notes("RUNNING", checkpoint=saved) == []
        assert notes("RUNNING", restarts=1, checkpoint=saved) == ["t1: restarted once"]
        point = job_pb2.RestartPoint(job="t1", number=2, step=6_282)
        assert notes("RUNNING", restarts=1, restart_point=point) == [
            "t1: restarted once, continued from checkpoint 2, step 6,282"
        ]
        point.job = "t0"
        assert notes("RUNNING", restarts=2, restart_point=point) == [
            "t1: restarted 2 times, last continued from checkpoint 2 of t0, step 6,282"
        ]
        assert notes("SUCCEEDED", restarts=1_000) == ["t1: restarted 1,000 times"]
        lost = job_pb2.Progress(steps=6_300, lost_steps=1_250)
        assert notes("RUNNING", restarts=1, progress=lost) == [
            "t1: restarted once; lost work, not counted: 1,250 steps"
        ]
        assert notes("PLACING", restarts=1, reason="waiting for servers", checkpoint=saved) == [
            "t1: waiting for servers; continues from checkpoint 2, step 6,282",
            "t1: restarted once",
        ]
        assert notes("PLACING", restarts=2, reason="waiting for servers") == [
            "t1: waiting for servers",
            "t1: restarted 2 times",
        ]

    def test_show_what_they_began_with(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        note = "continues from t0/2, step 5 (the optimizer's arguments differ)"
        done = job_pb2.Progress(steps=12, earlier_steps=10)
        coordinator.add(shoal.Job("m:f", name="t1"), restore_note=note, progress=done)
        assert run("jobs").stdout.splitlines()[2:] == [
            f"t1: {note}",
            "t1: 10 of its steps are those of the checkpoint that it began with",
        ]

    def test_job_without_a_step_has_no_metrics(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        coordinator.add(shoal.Job("m:f", name="empty"), "SUCCEEDED", finished_at=3.0)
        coordinator.enter("empty", "SUCCEEDED")
        assert run("wait", "empty").stdout == "empty succeeded in 10.0 s without a step\n"

    def test_are_waited_for(self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str) -> None:
        assert run("wait", job, "--timeout", 0.1).exit_code == 6
        coordinator.enter(job, "SUCCEEDED")
        result = run("wait", job)
        assert result.exit_code == 0
        assert "digits succeeded in 10.0 s: 1,234 steps" in result.stdout

    def test_are_followed_from_their_start(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        coordinator.log(job, "hello")
        assert run("wait", job, "--follow", "--timeout", 0.1).exit_code == 6
        coordinator.enter(job, "SUCCEEDED")
        result = run("wait", job, "--follow")
        assert result.exit_code == 0
        assert "hello" in result.stderr
        assert "digits succeeded in 10.0 s: 1,234 steps" in result.stdout
        kinds = [record.get("event") for record in records(run("wait", job, "--follow", "--json").stdout)]
        assert kinds[-1] is None
        assert "log" in kinds

    def test_wait_fails_when_the_job_failed(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        coordinator.enter(job, "FAILED", "Traceback:\n[x] ValueError")
        result = run("wait", job)
        assert result.exit_code == 7
        assert "job digits failed: Traceback:\n[x] ValueError" in result.stderr

    def test_have_logs(self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str) -> None:
        coordinator.log(job, "[bold]not markup[/]")
        assert run("logs", job).stdout == "worker-0: [bold]not markup[/]\n"
        (record,) = records(run("logs", job, "--json").stdout)
        assert (record["worker"], record["text"]) == ("worker-0", "[bold]not markup[/]")

    def test_without_logs_say_where_their_events_are(self, run: Callable[..., Result], job: str) -> None:
        result = run("logs", job)
        assert result.stdout == ""
        assert result.stderr == f"{job} has no log lines; `shoal wait --follow {job}` shows the events of a job\n"
        assert run("logs", job, "--json").output == ""

    def test_have_an_account_of_their_data(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        assert run("data", job).stdout.splitlines()[0] == "digits has no data, or no worker has loaded its program yet"
        count = job_pb2.DataCount(done=1000, leased=64, requeued=32, unleased=701)
        coordinator.data = job_pb2.GetDataReply(
            samples=1797,
            epochs=2,
            epoch=0,
            total=job_pb2.DataCount(done=1000, leased=64, requeued=32, unleased=2498),
            in_progress=[job_pb2.EpochData(epoch=0, count=count)],
            held=[job_pb2.HeldRange(worker="worker-1", rank=1, range=job_pb2.DataRange(start=1000, stop=1064))],
        )
        title, _, epoch, total = run("data", job).stdout.splitlines()
        assert title == "digits: 1,797 samples per epoch · 0 of 2 epochs are done · now in epoch 1"
        assert epoch.split() == ["1", "1,000", "64", "32", "701", "worker-1", "[1000,", "1064)"]
        assert total.split() == ["all", "1,000", "64", "32", "2,498"]
        (record,) = records(run("data", job, "--json").stdout)
        assert record["total"] == {"done": 1000, "leased": 64, "requeued": 32, "unleased": 2498}
        assert record["in_progress"] == [{"epoch": 0, "done": 1000, "leased": 64, "requeued": 32, "unleased": 701}]
        assert record["held"] == [{"worker": "worker-1", "rank": 1, "epoch": 0, "start": 1000, "stop": 1064}]
        assert run("data", "nobody").exit_code == 4
        coordinator.data = job_pb2.GetDataReply(samples=9, epochs=1, epoch=0, total=job_pb2.DataCount(done=9))
        assert run("data", job).stdout.splitlines()[0] == "digits: 9 samples per epoch · 1 of 1 epoch is done"

    def test_show_the_metrics_of_the_latest_reports(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        assert run("metrics", job).stdout.splitlines()[0] == "digits has no metrics: no worker has reported any"
        members = [job_pb2.JobMember(worker=name, rank=rank, state=state) for name, rank, state in _MEMBERS]
        coordinator.jobs[job].members.extend(members)
        reports = [("b", 3, {"loss": 0.5}), ("a", 3, {"loss": 1.0}), ("a", 1_005, {"accuracy": 0.75, "loss": 0.25})]
        reports += [("gone", 7, {"loss": 2.0}), ("replaced", 8, {"loss": 3.0})]
        for worker, step, values in reports:
            coordinator.emit(job, metrics=job_pb2.Metrics(worker=worker, step=step, values=values))
        title, _, *rows, note = run("metrics", job).stdout.splitlines()
        assert title == "digits: means of the latest reports"
        assert [row.split() for row in rows] == [
            ["a", "1", "1,005", "loss", "0.25"],
            ["a", "1", "1,005", "accuracy", "0.75"],
            ["b", "0", "3", "loss", "0.5"],
        ]
        assert note == "2 workers left; `shoal metrics digits --json` has all"
        (record,) = records(run("metrics", job, "--json").stdout)
        assert record["name"] == job
        assert [it["values"] for it in record["workers"]][:2] == [{"accuracy": 0.75, "loss": 0.25}, {"loss": 0.5}]
        described = [(it["worker"], it["rank"], it["state"]) for it in record["workers"]]
        assert described == [
            ("a", 1, "present"),
            ("b", 0, "finished"),
            ("gone", 2, "left"),
            ("replaced", None, "left"),
        ]
        assert run("metrics", "nobody").exit_code == 4

    def test_show_on_which_servers_their_variables_are(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        assert run("placement", job).exit_code == 5
        table = shoal.Variable((1000, 4), partitioner=shoal.partitioners.FixedShards(3))
        variables = {"table": table, "b": shoal.Variable((), "float64")}
        layouts = plan_shards(variables, 3, np.dtype(np.float16))
        servers = [Candidate(f"server-{index}", f"h:{index + 1}", 0) for index in range(2)]
        coordinator.placement = Placement(job, 1, variables, assign_shards(layouts, servers)).to_proto()
        title, _, *rows = run("placement", job).stdout.splitlines()
        assert title == "digits: 2 variables on 2 servers"
        assert [row.split() for row in rows] == [
            ["table", "[0,", "334)", "5,344", "0", "server-0", "h:1"],
            ["table", "[334,", "667)", "5,328", "1", "server-1", "h:2"],
            ["table", "[667,", "1,000)", "5,328", "2", "server-0", "h:1"],
            ["b", "all", "8", "1", "server-1", "h:2"],
            ["server-0:", "10,672", "bytes"],
            ["server-1:", "5,336", "bytes"],
        ]
        (record,) = records(run("placement", job, "--json").stdout)
        last = {"variable": "b", "start": 0, "stop": 1, "bytes": 8, "shard": 1, "server": "server-1", "address": "h:2"}
        assert (record["name"], record["rows"][-1]) == (job, last)
        assert run("placement", "nobody").exit_code == 4

    def test_say_that_their_loss_and_their_metrics_are_means(self, run: Callable[..., Result]) -> None:
        assert '"loss" is the mean over the steps of one worker' in " ".join(run("jobs", "--help").stdout.split())
        assert '"wait_share"' in run("metrics", "--help").stdout

    def test_have_timings_and_perhaps_a_straggler(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        none = run("timings", job)
        assert none.stdout.splitlines()[0] == "digits has no timings: its workers have not reported a step"
        slow = tuple(StepTiming(step, 1.0 + step, pull=0.001, read=0.25, compute=0.1) for step in range(10))
        fast = tuple(StepTiming(step, 1.0 + step, pull=0.25, compute=0.1, push=0.001) for step in range(10))
        coordinator.timings = timings_message(Timings({"worker-0": slow, "worker-1": fast}, {0: 20}))
        title, _, first, second = run("timings", job).stdout.splitlines()
        assert coordinator.timings_asked[-1] == 256
        assert title == (
            "digits: worker-0 takes 3.5 times as long as the others: 249 ms more a step, most of it in read"
        )
        phases = ["1.00", "250.00", "100.00", "0.00", "0.00", "0.00"]
        assert first.split() == ["worker-0", "9", *phases, "350.00", "100%"]
        assert second.split()[-2:] == ["101.00", "0%"]
        (record,) = records(run("timings", job, "--json").stdout)
        assert record["straggler"]["worker"] == "worker-0"
        assert (record["straggler"]["phase"], record["straggler"]["ratio"]) == ("read", pytest.approx(0.35 / 0.101))
        worker = record["workers"][1]
        assert (worker["worker"], worker["slowest"], len(worker["steps"])) == ("worker-1", 0.0, 10)
        last = {"step": 9, "began": 10.0, "pull": 0.25, "read": 0.0, "compute": 0.1, "push": 0.001}
        assert worker["steps"][-1] == {**last, "wait": 0.0, "evaluate": 0.0, "own": pytest.approx(0.101)}
        assert worker["typical"] == worker["steps"][-1]
        assert record["staleness"] == {"0": 20}

    def test_have_timings_of_equals(self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str) -> None:
        steps = tuple(StepTiming(step, 1.0 + step, compute=0.1) for step in range(10))
        coordinator.timings = timings_message(Timings({"worker-0": steps, "worker-1": steps}))
        title = run("timings", job).stdout.splitlines()[0]
        assert title == "digits: no worker is noticeably slower than the others"
        coordinator.timings = timings_message(Timings({"worker-0": steps}))
        assert run("timings", job).stdout.splitlines()[-1].split()[-1] == "-", "it is compared with nobody"
        assert run("timings", "nobody").exit_code == 4

    def test_are_saved(self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str) -> None:
        assert run("checkpoint", job).stdout == "digits/3: step 70, 4,096 bytes\n"
        (record,) = records(run("checkpoint", job, "--json").stdout)
        assert record == {"job": "digits", "number": 3, "step": 70, "bytes": 4096, "time": 9.0}
        coordinator.disk = "no space left on device; free some space"
        failed = run("checkpoint", job, "--json")
        assert failed.exit_code == 1
        assert records(failed.stderr)[0]["error"]["code"] == "STORAGE_FAILED"
        assert "free some space" in failed.stderr
        coordinator.jobs[job].checkpoint_failure = coordinator.disk
        assert "digits: the last checkpoint failed: no space left on device" in run("jobs").output
        (record,) = records(run("jobs", "--json").stdout)
        assert (record["checkpoint"], record["checkpoint_failure"]) == (None, coordinator.disk)

    def test_follow_reports_saved_and_failed_checkpoints(
        self, coordinator: FakeCoordinator, job: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        saved = job_pb2.Checkpoint(number=2, step=40, bytes=1000, time=9.0)
        coordinator.emit(job, checkpoint=job_pb2.CheckpointEnd(attempt=2, saved=saved, seconds=1.25))
        coordinator.emit(job, checkpoint=job_pb2.CheckpointEnd(attempt=3, failure="the disk is full\nand more"))
        coordinator.enter(job, "SUCCEEDED")
        with shoal.Client(coordinator.address) as client, Output(False) as out:
            follow(client.job(job), out)
        shown = capsys.readouterr().err
        assert "digits checkpoint 2: step 40, 1,000 bytes in 1.2 s" in shown
        assert "digits checkpoint failed, training continues: the disk is full\n" in shown

    def test_evaluations_are_reported(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], capsys: pytest.CaptureFixture[str]
    ) -> None:
        policy = shoal.EvaluationPolicy(every_steps=20, metric="top1", patience=1)
        latest = job_pb2.Evaluation(number=2, step=40, values={"top1": 0.5, "loss": 1.25, "auc": 0.75}, samples=9)
        best = job_pb2.Evaluation(number=1, step=20, values={"top1": 0.625, "loss": 1.5})
        evaluated = shoal.Job("m:f", name="tested", evaluation=policy)
        progress = job_pb2.Progress(steps=60, samples=40, total_samples=100, samples_per_s=5, loss=1.0)
        coordinator.add(evaluated, evaluation=latest, best=best, progress=progress)
        told = [
            "latest evaluation: step 40, top1 0.5, auc 0.75, loss 1.25",
            "best evaluation: step 20, top1 0.625, loss 1.5",
        ]
        titles, row, *notes = run("jobs").stdout.splitlines()
        assert notes == [f"tested: {line}" for line in told]
        assert "12 s" in row[titles.index("eta") :][:5]
        for result, was_best in ((best, True), (latest, False)):
            end = job_pb2.EvaluationEnd(worker="worker-0", result=result, best=was_best)
            coordinator.emit("tested", evaluation=end)
        coordinator.enter("tested", "SUCCEEDED", "top1 is no better than 0.625 in 1 evaluation")
        with shoal.Client(coordinator.address) as client, Output(False) as out:
            ended = follow(client.job("tested"), out)
        assert without_times(capsys.readouterr().err) == [
            "tested evaluation 1: step 20, top1 0.625, loss 1.5, the best so far",
            "tested evaluation 2: step 40, top1 0.5, auc 0.75, loss 1.25",
            "tested succeeded: top1 is no better than 0.625 in 1 evaluation",
        ]
        assert summary(ended, "top1").splitlines()[1:] == ["top1 is no better than 0.625 in 1 evaluation", *told]
        (record,) = records(run("wait", "tested", "--json").stdout)
        assert (record["reason"], record["best"]["values"]["top1"]) == (
            "top1 is no better than 0.625 in 1 evaluation",
            0.625,
        )
        assert record["evaluation"] == {
            **{"number": 2, "step": 40, "values": {"top1": 0.5, "loss": 1.25, "auc": 0.75}},
            **{"samples": 9, "seconds": 0.0, "time": 0.0},
        }
        assert record["progress"]["seconds_left"] == 0
        (record,) = records(run("jobs", "--json").stdout)
        assert (record["evaluation"]["number"], record["best"]["number"]) == (2, 1)

    def test_print_evaluations_for_machines(
        self, coordinator: FakeCoordinator, job: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = job_pb2.Evaluation(number=1, step=20, values={"top1": 0.5})
        coordinator.emit(job, evaluation=job_pb2.EvaluationEnd(worker="worker-0", result=result, best=True))
        coordinator.enter(job, "SUCCEEDED")
        with shoal.Client(coordinator.address) as client, Output(True) as out:
            follow(client.job(job), out)
        told, _ = records(capsys.readouterr().out)
        assert (told["event"], told["worker"], told["best"]) == ("evaluation", "worker-0", True)
        assert (told["result"]["step"], told["result"]["values"]) == (20, {"top1": 0.5})

    def test_that_began_with_a_checkpoint_count_their_own_steps_too(self) -> None:
        progress = shoal.status.Progress(steps=9_450, earlier_steps=9_150, samples_per_s=10_763)
        line = summary(JobResult("one", progress, 1.3))
        assert line.startswith(
            "one succeeded in 1.3 s: 9,450 steps in all, 300 of them in this job, 10,763 samples/s, "
        )

    def test_whose_best_evaluation_is_the_latest_have_one(self) -> None:
        only = Evaluation(3, 60, {"loss": 0.5})
        progress = shoal.status.Progress()
        lines = summary(JobResult("one", progress, 1.0, only, only)).splitlines()
        assert lines == ["one succeeded in 1.0 s without a step", "latest and best evaluation: step 60, loss 0.5"]

    def test_metrics_are_written_for_tensorboard(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str, tmp_path: Path
    ) -> None:
        coordinator.emit(job, metrics=job_pb2.Metrics(worker="worker-0", step=1, values={"loss": 0.5}))
        coordinator.enter(job, "SUCCEEDED")
        assert run("wait", job, "--tensorboard", tmp_path / "board").exit_code == 0
        assert [path.name for path in (tmp_path / "board").iterdir() if path.is_dir()] == ["worker-0"]
        (tmp_path / "file").touch()
        refused = run("wait", job, "--tensorboard", tmp_path / "file", "--json")
        assert (refused.exit_code, records(refused.stderr)[0]["error"]["code"]) == (1, "STORAGE_FAILED")

    def test_tensorboard_without_its_package_starts_no_job(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        board = ["--tensorboard", tmp_path / "board"]
        unfollowed = run("submit", "m:f", "--name", "mine", *board)
        assert (unfollowed.exit_code, "add --follow" in unfollowed.stderr) == (2, True)
        monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
        missing = run("submit", "m:f", "--name", "mine", "--follow", *board)
        assert (missing.exit_code, "pip install 'shoal[tensorboard]'" in missing.stderr) == (2, True)
        assert coordinator.jobs == {}

    def test_are_cancelled_and_dropped(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        refused = run("drop", job)
        assert refused.exit_code == 5
        assert "cancel it first" in refused.stderr
        assert "digits is cancelled" in run("cancel", job).stdout
        assert records(run("drop", job, "--json").stdout) == [{"name": job, "dropped": True}]
        assert coordinator.jobs == {}

    def test_begin_or_go_on_with_from_auto(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        coordinator.stored = set()
        assert run("submit", "m:f", "--name", "night", "--from", "auto").exit_code == 0
        assert not coordinator.jobs["night"].spec.HasField("restore")
        assert run("cancel", "night").exit_code == 0
        coordinator.stored = {"night"}
        assert run("submit", "m:f", "--name", "night", "--from", "auto").exit_code == 0
        assert coordinator.jobs["night"].spec.restore.job == "night"
        refused = run("submit", "m:f", "--from", "auto")
        assert (refused.exit_code, "give it the same name in each run" in refused.stderr) == (2, True)

    def test_get_a_learning_rate(self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str) -> None:
        assert "digits now has the learning rate 0.005" in run("set-learning-rate", job, "0.005").stdout
        assert [dict(it.parameters) for it in coordinator.learning_rates] == [{"learning_rate": 0.005}]
        for rate in ("nan", "inf", "-1"):
            refused = run("set-learning-rate", job, "--", rate)
            assert refused.exit_code == 2
            assert f"learning_rate is {float(rate)}; it must be finite and at least 0" in refused.stderr
        assert len(coordinator.learning_rates) == 1

    def test_unknown_job_has_its_own_exit_code(self, run: Callable[..., Result]) -> None:
        for command in (["wait", "no"], ["logs", "no"], ["cancel", "no"], ["drop", "no"], ["pull", "no", "x.npz"]):
            result = run(*command, "--json")
            assert result.exit_code == 4, command
            assert records(result.stderr)[0]["error"]["code"] == "UNKNOWN_JOB"

    def test_pull_of_a_forgotten_job_names_what_helps(self, run: Callable[..., Result]) -> None:
        said = " ".join(run("pull", "no", "x.npz").stderr.split())
        assert "`shoal export no FILE` writes the values of its newest checkpoint" in said
        assert "A coordinator without --store forgets all jobs when it restarts" in said

    def test_names_in_use_are_a_conflict(self, run: Callable[..., Result], job: str) -> None:
        assert run("submit", "models:mlp", "--name", job).exit_code == 5

    def test_are_pulled_into_a_file(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str, tmp_path: Path
    ) -> None:
        values: dict[str, np.ndarray] = {"layer/w": np.arange(6, dtype=np.float32).reshape(2, 3), "file": np.ones((2,))}
        variables: dict[str, shoal.Variable | np.ndarray] = dict(values)
        variables["half"] = shoal.Variable((4,), "bfloat16", shoal.initializers.Ones())
        file = tmp_path / "out.npz"
        with ShardServers(variables) as servers:
            coordinator.placement = servers.placement.to_proto()
            result = run("pull", job, file)
        assert result.exit_code == 0, result.output
        with np.load(file, allow_pickle=False) as saved:
            assert sorted(saved) == ["file", "half", "layer/w"]
            np.testing.assert_array_equal(saved["layer/w"], values["layer/w"])
            assert saved["half"].dtype == np.float32
        assert list(tmp_path.iterdir()) == [file]

    def test_are_pulled_to_standard_output(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str
    ) -> None:
        # The servers of this process would log where the command writes.
        with capture_logs(), ShardServers({"w": np.arange(6, dtype=np.float32)}) as servers:
            coordinator.placement = servers.placement.to_proto()
            result = run("pull", job, "-")
            (record,) = records(run("pull", job, "-", "--json").stderr)
        assert (result.exit_code, result.stderr) == (0, "-: 1 variable, 24 bytes\n")
        assert (record["file"], record["bytes"]) == ("-", 24)
        with np.load(io.BytesIO(result.stdout_bytes), allow_pickle=False) as saved:
            np.testing.assert_array_equal(saved["w"], np.arange(6))

    def test_are_not_pulled_into_nowhere(self, run: Callable[..., Result], job: str, tmp_path: Path) -> None:
        for file, why in ((tmp_path / "no" / "x.npz", "there is no folder"), (tmp_path, "it is a folder")):
            result = run("pull", job, file, "--json")
            assert result.exit_code == 2
            (error,) = records(result.stderr)
            assert error["error"]["code"] == "BAD_REQUEST"
            assert f"cannot write {file}: {why}" in error["error"]["message"]

    def test_without_variables_leave_no_file(self, run: Callable[..., Result], job: str, tmp_path: Path) -> None:
        assert run("pull", job, tmp_path / "out.npz").exit_code == 5
        assert list(tmp_path.iterdir()) == []


class TestStatus:
    def test_shows_members_and_their_shards(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        members = coordinator.status.members
        members.add(member="server-0", role=coordinator_pb2.SERVER, alive=True, shards=8, bytes=4096)
        members.add(member="worker-0", role=coordinator_pb2.WORKER, device="cpu", silent_s=12, job="digits")
        shown = run("status").stdout
        assert "cluster reef · generation 7 · 8 shards · 4,096 bytes" in shown
        assert "lost, silent for 12 s" in shown
        (record,) = records(run("status", "--json").stdout)
        assert (record["generation"], record["shards"], record["bytes"]) == (7, 8, 4096)
        assert [member["role"] for member in record["members"]] == ["server", "worker"]

    def test_shows_no_shards_of_a_server_that_is_gone(
        self, coordinator: FakeCoordinator, run: Callable[..., Result]
    ) -> None:
        members = coordinator.status.members
        members.add(member="server-0", role=coordinator_pb2.SERVER, alive=True, shards=8, bytes=4096)
        members.add(member="server-1", role=coordinator_pb2.SERVER, shards=2, bytes=2048)
        shown = run("status").stdout
        gone = next(line for line in shown.splitlines() if "server-1" in line)
        assert "2,048" not in gone
        assert gone.split()[-2:] == ["-", "-"]

    def test_counts_the_sessions_that_have_left(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        members = coordinator.status.members
        members.add(member="session-live", role=coordinator_pb2.SESSION, alive=True)
        members.add(member="session-lost", role=coordinator_pb2.SESSION, silent_s=12)
        for number in range(3):
            members.add(member=f"session-{number}", role=coordinator_pb2.SESSION, silent_s=12, draining=True)
        shown = run("status").stdout
        assert [line.split()[0] for line in shown.splitlines()[2:4]] == ["session-live", "session-lost"]
        assert shown.splitlines()[4:] == ["3 sessions left; `shoal status --all` shows them"]
        assert "session-2" in run("status", "--all").stdout
        assert len(records(run("status", "--json").stdout)[0]["members"]) == 5

    def test_shows_zones_if_servers_have_them(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        members = coordinator.status.members
        members.add(member="server-0", role=coordinator_pb2.SERVER, alive=True)
        assert "zone" not in run("status").stdout
        members.add(member="server-1", role=coordinator_pb2.SERVER, alive=True, zone="rack-4")
        shown = run("status").stdout
        assert "zone" in shown
        assert "rack-4" in shown
        (record,) = records(run("status", "--json").stdout)
        assert [member["zone"] for member in record["members"]] == ["", "rack-4"]

    def test_shows_draining_servers(self, coordinator: FakeCoordinator, run: Callable[..., Result]) -> None:
        members = coordinator.status.members
        members.add(member="server-0", role=coordinator_pb2.SERVER, alive=True, draining=True)
        members.add(member="server-1", role=coordinator_pb2.SERVER, silent_s=12, draining=True)
        shown = run("status").stdout
        assert "draining" in shown
        assert "left 12 s ago" in shown
        (record,) = records(run("status", "--json").stdout)
        assert [member["state"] for member in record["members"]] == ["draining", "left"]
        assert [(member["alive"], member["draining"]) for member in record["members"]] == [(True, True), (False, True)]


class TestDrain:
    @pytest.fixture
    def server(self, coordinator: FakeCoordinator) -> coordinator_pb2.Member:
        fields: dict[str, Any] = {"waiting_jobs": ["a", "b"], "moving_groups": 3, "ended_jobs": ["old"]}
        return coordinator.status.members.add(
            member="server-1", role=coordinator_pb2.SERVER, incarnation=4, alive=True, draining=True, **fields
        )

    @staticmethod
    def later(server: coordinator_pb2.Member, **fields: Any) -> coordinator_pb2.GetStatusReply:
        """Returns a status in which less is left on the server."""
        found = coordinator_pb2.Member()
        found.CopyFrom(server)
        for name in ("waiting_jobs", "moving_groups"):
            found.ClearField(name)
        found.MergeFrom(coordinator_pb2.Member(**fields))
        found.alive = fields.get("alive", True)
        return coordinator_pb2.GetStatusReply(members=[found])

    def test_shows_what_is_left_until_the_server_has_left(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], server: coordinator_pb2.Member
    ) -> None:
        begun = coordinator_pb2.GetStatusReply(members=[server])
        coordinator.statuses = [
            begun,
            begun,
            self.later(server, waiting_jobs=["b"]),
            self.later(server, drained=True),
            self.later(server, drained=True, alive=False),
        ]
        done = run("drain", "server-1")
        assert (done.exit_code, done.stdout.splitlines()) == (
            0,
            [
                "server-1 drains: 2 jobs left (a, b), 3 lock groups to move",
                "server-1 drains: 1 job left (b)",
                "The values of ended jobs leave with it: old",
                "server-1 has left; no job needed it",
            ],
        )
        [order] = coordinator.orders
        assert (order.member, order.incarnation, order.stay, order.force) == ("server-1", 4, False, False)

    def test_waits_only_until_it_is_drained_if_it_stays(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], server: coordinator_pb2.Member
    ) -> None:
        coordinator.statuses = [coordinator.status, self.later(server, drained=True)]
        done = run("drain", "server-1", "--stay", "--force", "--json")
        assert [record["state"] for record in records(done.stdout)] == ["draining", "drained"]
        assert records(done.stdout)[0]["waiting_jobs"] == ["a", "b"]
        assert (coordinator.orders[0].stay, coordinator.orders[0].force) == (True, True)

    def test_does_not_wait_if_it_need_not(self, run: Callable[..., Result], server: coordinator_pb2.Member) -> None:
        done = run("drain", "server-1", "--no-wait")
        assert (done.exit_code, done.stdout.count("left")) == (0, 1)

    def test_ends_at_its_time_limit_and_the_server_drains_on(
        self, run: Callable[..., Result], server: coordinator_pb2.Member
    ) -> None:
        done = run("drain", "server-1", "--timeout", "0.1")
        assert done.exit_code == 6
        assert "was not drained within 0.1 s: 2 jobs left (a, b), 3 lock groups to move. It drains on" in done.stderr

    def test_fails_if_the_server_is_lost(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], server: coordinator_pb2.Member
    ) -> None:
        coordinator.statuses = [coordinator.status, self.later(server, alive=False)]
        done = run("drain", "server-1")
        assert done.exit_code == 1
        assert "server-1 has ended before it was drained: 2 jobs left (a, b)" in done.stderr

    def test_succeeds_if_the_server_has_returned_as_a_new_incarnation(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], server: coordinator_pb2.Member
    ) -> None:
        returned = coordinator_pb2.Member(member="server-1", role=coordinator_pb2.SERVER, incarnation=5, alive=True)
        coordinator.statuses = [
            coordinator.status,
            self.later(server, drained=True),
            coordinator_pb2.GetStatusReply(members=[returned]),
        ]
        done = run("drain", "server-1")
        assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "server-1 has left; no job needed it")

    def test_shows_in_the_status_what_is_left(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], server: coordinator_pb2.Member
    ) -> None:
        assert "draining: 2 jobs, 3 lock groups left" in run("status").stdout
        coordinator.status = self.later(server, drained=True)
        assert "draining: nothing left" in run("status").stdout


class TestTokens:
    def test_show_of_a_revoked_certificate_what_is_known(
        self, coordinator: FakeCoordinator, run: Callable[..., Result]
    ) -> None:
        coordinator.tokens = [
            token_pb2.Token(id="5d0c", name="ann", role="reader", expires_at=86_400.0 * 365),
            token_pb2.Token(id="cert:1a", revoked=True),
        ]
        _, _, ann, certificate = run("token", "ls").stdout.splitlines()
        assert ann.split()[:3] == ["5d0c", "ann", "reader"]
        assert certificate.split() == ["cert:1a", "-", "-", "-", "revoked"]

    def test_revoke_the_certificate_in_a_file(self, run: Callable[..., Result], tmp_path: Path) -> None:
        make_certificates(tmp_path)
        file = tmp_path / "reader.pem"
        serial = x509.load_pem_x509_certificate(file.read_bytes()).serial_number
        revoked = run("token", "revoke", "--certificate", file)
        assert (revoked.stdout.split(), revoked.stderr) == (["revoked", f"cert:{serial:x}"], "")
        for role in ("coordinator", "server"):
            warned = run("token", "revoke", "--certificate", tmp_path / f"{role}.pem").stderr
            assert f"{role}.role.shoal.internal. The cluster" in warned
            assert "make a new CA" in warned
        for bad, why in (("ca.pem", "of a CA"), ("reader-key.pem", "PEM format"), ("none.pem", "No such file")):
            assert why in run("token", "revoke", "--certificate", tmp_path / bad).stderr
        for arguments in ((), ("ann", "--certificate", file)):
            assert "give either TOKEN or --certificate FILE" in run("token", "revoke", *arguments).stderr


class TestTables:
    COLUMNS = ("job", "state", "mode", "note")

    def show(
        self, capsys: pytest.CaptureFixture[str], cells: list[str], *, width: int = 80, **options: Any
    ) -> list[str]:
        Output(False, width=width).rows("", self.COLUMNS, [(cells, {})], **options)
        return capsys.readouterr().out.rstrip("\n").split("\n")

    def test_lose_columns_before_words_are_cut(self, capsys: pytest.CaptureFixture[str]) -> None:
        cells = ["digits", "succeeded", "ssp:4", "x" * 50]
        assert len(self.show(capsys, cells, optional=["mode"])[0].split()) == 4
        heading, row = self.show(capsys, cells, width=20, optional=["mode", "note"])
        assert (heading.split(), row.split()) == (["job", "state"], ["digits", "succeeded"])

    def test_are_wider_than_the_screen_before_words_are_cut(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, row = self.show(capsys, ["d" * 63, "succeeded", "async:scaled", "staleness"])
        assert row.split() == ["d" * 63, "succeeded", "async:scaled", "staleness"]

    def test_tables_show_users_text_unchanged(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, row, note = self.show(capsys, ["a:x:b", "[bold]x[/]", ":smile:", "[/]"], notes=["[red]:x:[/]"])
        assert row.split() == ["a:x:b", "[bold]x[/]", ":smile:", "[/]"]
        assert note == "[red]:x:[/]"

    def test_errors_show_users_text_unchanged(self, capsys: pytest.CaptureFixture[str]) -> None:
        Output(False).error("X", "[red]no :x: here[/]", {})
        assert capsys.readouterr().err == "error: [red]no :x: here[/]\n"

    def test_a_job_fits_a_common_screen(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], job: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(output, "PIPE_COLUMNS", 80)
        lines = run("jobs").stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert lines[1].split()[:2] == ["digits", "running"]


class TestTheCommand:
    def test_has_an_exit_code_for_a_cluster_that_is_not_there(
        self, coordinator: FakeCoordinator, run: Callable[..., Result]
    ) -> None:
        coordinator.stop()
        result = run("jobs", "--retry-for", "0.1")
        assert result.exit_code == 3
        assert f"{coordinator.address} did not answer within 0.1 s" in result.stderr.replace("\n", "")

    def test_tells_that_it_waits_for_a_cluster_that_is_not_there(
        self, coordinator: FakeCoordinator, run: Callable[..., Result], caplog: pytest.LogCaptureFixture
    ) -> None:
        coordinator.stop()
        assert run("jobs", "--retry-for", "1.7").exit_code == 3
        (told,) = caplog.messages
        assert told.startswith(f"the coordinator at {coordinator.address} does not answer (call to")
        assert told.endswith("Connection refused); trying again for up to 1.7 s")
        caplog.clear()
        assert len(records(run("jobs", "--retry-for", "1.7", "--json").stderr)) == 1
        assert not caplog.messages

    @pytest.mark.parametrize("address", ["http://127.0.0.1:7070", "grpc://shoal.example:7070"])
    def test_says_that_an_address_has_no_scheme(self, run: Callable[..., Result], address: str) -> None:
        result = run("jobs", "--coordinator", address)
        assert result.exit_code == 2
        assert f"leave out {address.partition('//')[0]}// and give host:port" in result.stderr.replace("\n", "")

    @pytest.mark.parametrize(
        "address", ["localhost", "127.0.0.1:port", "http://127.0.0.1:7080", "http://127.0.0.1:7080/"]
    )
    def test_an_address_that_is_none_is_wrong_usage(self, run: Callable[..., Result], address: str) -> None:
        result = run("jobs", "--coordinator", address)
        assert result.exit_code == 2
        assert f"{address!r} is not the address of a coordinator" in result.stderr.replace("\n", "")

    def test_says_that_another_cluster_may_have_the_port(
        self, coordinator: FakeCoordinator, run: Callable[..., Result]
    ) -> None:
        result = run("up", "--listen", coordinator.address)
        assert result.exit_code == 3
        assert result.stdout == ""
        assert result.stderr.startswith(
            f"error: cannot listen on {coordinator.address}: another process uses the port; "
        )
        assert "with --listen, or 0 for any free one. Another `shoal up` may be running there" in result.stderr

    def test_up_refuses_an_address_that_is_none(self, run: Callable[..., Result]) -> None:
        result = run("up", "--listen", "localhost")
        assert result.exit_code == 2
        assert "'localhost' is not an address; give host:port" in result.stderr

    def test_has_one_for_wrong_usage(self, run: Callable[..., Result]) -> None:
        assert run("jobs", "--nope").exit_code == 2
        assert run("nope").exit_code == 2

    def test_has_one_for_an_interruption(self, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(shoal.Client, "jobs", interrupted)
        assert run("jobs").exit_code == 130

    def test_has_one_for_an_interruption_of_a_job_that_goes_on(
        self, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        coordinator.add(shoal.Job("m:f", name="digits"), "RUNNING")
        monkeypatch.setattr(shoal.JobHandle, "wait", interrupted)
        result = run("wait", "digits", "--follow")
        assert result.exit_code == 130
        assert "digits continues to run" in result.stderr

    def test_documents_them(self, run: Callable[..., Result]) -> None:
        assert "Exit codes: 0 success" in run("--help").stdout

    def test_has_every_command(self, run: Callable[..., Result]) -> None:
        shown = run("--help").stdout
        jobs = [
            "submit",
            "jobs",
            "wait",
            "logs",
            "metrics",
            "placement",
            "data",
            "timings",
            "cancel",
            "drop",
            "pull",
            "checkpoint",
            "checkpoints",
        ]
        for command in ["up", "status", "version", *jobs, "coordinator", "server", "worker"]:
            assert f" {command} " in shown

    @pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
    def test_finds_the_roles(self, run: Callable[..., Result], role: str) -> None:
        result = run(role, "--help")
        assert result.exit_code == 0
        assert "--metrics-listen" in result.stdout

    def test_says_its_version(self, run: Callable[..., Result]) -> None:
        shown = run("--version").stdout
        assert shown.startswith(f"shoal {shoal.__version__}")
        assert run("version").stdout == shown

    def test_says_its_build_for_machines(self, run: Callable[..., Result]) -> None:
        told = json.loads(run("version", "--json").stdout)
        assert list(told) == ["version", "commit", "python", "platform", "libraries"]
        assert (told["version"], told["libraries"]["numpy"]) == (shoal.__version__, np.__version__)

    def test_answers_on_standard_output_and_logs_beside_it(self) -> None:
        script = """
import structlog
from shoal._cli import app, main
app.app = lambda prog_name: (print("answer"), structlog.get_logger().warning("logged"))
main()
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "answer\n"
        assert "logged" in done.stderr

    def test_is_a_module_too(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.startswith(f"shoal {shoal.__version__}")


# As the first process of a container, which the kernel gives no default for a signal.
FIRST = """
import os, signal, sys, types
os.getpid = lambda: 1
loading = types.ModuleType("shoal._cli.app")
def app(**_):
    print("loaded", flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("and on")
loading.app = app
sys.modules["shoal._cli.app"] = loading
from shoal._cli import main
main()
"""


def test_first_process_of_a_container_ends_on_sigterm() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "loaded\n"), done.stderr


# Ctrl-C while the commands are loaded, while one runs, or after it has ended.
INTERRUPTED = """
import signal, sys, types
def interrupt(now):
    if now == sys.argv[1]:
        signal.raise_signal(signal.SIGINT)
class Loading(types.ModuleType):
    def __getattr__(self, name):
        interrupt("loaded")
        return app
def app(**_):
    try:
        interrupt("run")
    except KeyboardInterrupt:
        print("cleaned up", flush=True)
        raise SystemExit(130)
sys.modules["shoal._cli.app"] = Loading("shoal._cli.app")
from shoal._cli import main
try:
    main()
finally:
    interrupt("ended")
"""


@pytest.mark.parametrize(("moment", "said"), [("loaded", ""), ("run", "cleaned up\n"), ("ended", "")])
def test_an_interrupt_at_any_moment_is_quiet(moment: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, moment], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, said, "")


def test_an_interrupt_stays_ignored_where_the_shell_says_so() -> None:
    ignored = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{INTERRUPTED}"
    done = subprocess.run([sys.executable, "-c", ignored, "loaded"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
