"""Client against a coordinator on a real wire: its results, its errors, and the failures that it survives."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shoal
from shoal._training import ParameterClient
from shoal.events import EvaluationEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.status import Evaluation, JobState, Role, StepTiming, Timings
from shoal.v1 import coordinator_pb2, job_pb2
from shoal_coordinator.api.codecs import timings_message
from support.clusters.fake_coordinator import FakeCoordinator
from support.faults.killable_roles import placement_on
from support.waiting import wait_until


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[shoal.Client]:
    with shoal.Client(coordinator.address, retry_for_s=5) as client:
        yield client


@pytest.fixture
def job(coordinator: FakeCoordinator, client: shoal.Client) -> shoal.JobHandle:
    coordinator.add(shoal.Job("models:linear", name="linear"))
    return client.job("linear")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class TestJobs:
    def test_cluster_has_the_submitted_job(self, client: shoal.Client) -> None:
        submitted = shoal.Job(
            "models:linear",
            workers=3,
            consistency=shoal.BoundedStaleness(4),
            optimizer=shoal.optim.Adam(0.01),
            settings={"hidden": 64},
        )
        handle = client.submit(submitted)
        assert handle.name == submitted.name
        assert handle.status().job == submitted
        assert [status.name for status in client.jobs()] == [submitted.name]

    def test_a_name_that_runs_is_refused(self, client: shoal.Client) -> None:
        client.submit(shoal.Job("models:linear", name="twice"))
        with pytest.raises(shoal.JobExists, match="twice"):
            client.submit(shoal.Job("models:linear", name="twice"))

    def test_a_job_is_cancelled_and_then_dropped(self, client: shoal.Client, job: shoal.JobHandle) -> None:
        with pytest.raises(shoal.JobRunning):
            job.drop()
        assert job.cancel().state is JobState.CANCELLED
        client.drop(job)
        with pytest.raises(shoal.UnknownJob):
            client.cancel("linear")

    def test_an_unknown_job_is_unknown_to_every_call(self, client: shoal.Client) -> None:
        nobody = client.job("nobody")
        reads = (nobody.status, nobody.wait, nobody.result, nobody.data, nobody.timings, nobody.pull)
        for call in (*reads, nobody.cancel, nobody.drop):
            with pytest.raises(shoal.UnknownJob, match="nobody"):
                call()
        with pytest.raises(shoal.UnknownJob):
            next(nobody.events())

    def test_timings_are_by_worker(
        self, coordinator: FakeCoordinator, client: shoal.Client, job: shoal.JobHandle
    ) -> None:
        steps = {name: tuple(StepTiming(step, 1.0 + step, compute=0.1) for step in (3, 4)) for name in ("w0", "w1")}
        coordinator.timings = timings_message(Timings(steps, {5: 2, 0: 1}))
        assert client.timings(job) == job.timings() == Timings(steps, {0: 1, 5: 2})
        job.timings(last=1_000)
        assert coordinator.timings_asked == [64, 64, 256]
        with pytest.raises(shoal.errors.BadRequest, match="last is 0; it must be a whole number, 1 or more"):
            job.timings(last=0)

    def test_variables_that_are_nowhere_cannot_be_pulled(self, client: shoal.Client, job: shoal.JobHandle) -> None:
        with pytest.raises(shoal.NotPlaced):
            client.pull("linear")

    @pytest.mark.parametrize("failure", [shoal.Unreachable("no answer"), shoal.UnknownJob("no shards")])
    def test_a_pull_that_fails_says_whether_the_values_are_lost(
        self,
        coordinator: FakeCoordinator,
        client: shoal.Client,
        job: shoal.JobHandle,
        failure: shoal.ShoalError,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        placed = placement_on("127.0.0.1:1").to_proto()
        for then, raised in ((placed, type(failure)), (None, shoal.NotPlaced)):
            coordinator.placement = placed

            def fail(_: ParameterClient, then: Any = then) -> None:
                coordinator.placement = then
                raise failure

            monkeypatch.setattr(ParameterClient, "pull", fail)
            with pytest.raises(raised):
                client.pull("linear")


class TestTheEnd:
    def test_of_a_job_that_succeeds(self, coordinator: FakeCoordinator, job: shoal.JobHandle) -> None:
        coordinator.jobs["linear"].progress.steps = 9
        coordinator.enter("linear", "SUCCEEDED")
        result = job.wait()
        assert (result.job, result.progress.steps, result.seconds) == ("linear", 9, 10.0)
        assert job.result() == result

    def test_of_one_that_fails_has_the_reason_and_the_traceback(
        self, coordinator: FakeCoordinator, job: shoal.JobHandle
    ) -> None:
        coordinator.enter("linear", "FAILED", "worker-0 raised:\nTraceback ...\nValueError: bad batch")
        with pytest.raises(shoal.JobFailed, match=r"job linear failed: worker-0 raised:\n.*\nValueError: bad batch"):
            job.wait()

    def test_of_one_that_is_cancelled(self, coordinator: FakeCoordinator, job: shoal.JobHandle) -> None:
        coordinator.enter("linear", "CANCELLED")
        with pytest.raises(shoal.Cancelled, match="linear was cancelled"):
            job.wait()

    def test_that_does_not_come_in_time(self, job: shoal.JobHandle) -> None:
        with pytest.raises(shoal.DeadlineExceeded, match=r"linear has not ended within 0\.1 s"):
            job.wait(timeout_s=0.1)

    def test_that_does_not_come_in_time_has_the_state_and_what_the_job_waits_for(
        self, coordinator: FakeCoordinator, job: shoal.JobHandle
    ) -> None:
        coordinator.enter("linear", "PENDING", "waiting for workers: 2 of 5")
        with pytest.raises(shoal.DeadlineExceeded) as late:
            job.wait(timeout_s=0.1)
        assert late.value.message == (
            "job linear has not ended within 0.1 s; it is pending: waiting for workers: 2 of 5"
        )

    def test_of_a_checkpoint_that_does_not_come_in_time(
        self, coordinator: FakeCoordinator, job: shoal.JobHandle
    ) -> None:
        coordinator.disk_hangs = True
        with pytest.raises(shoal.DeadlineExceeded, match=r"checkpoint of job linear was not complete within 0\.1 s"):
            job.checkpoint(timeout_s=0.1)

    def test_that_has_not_come(self, job: shoal.JobHandle) -> None:
        with pytest.raises(shoal.JobRunning, match="linear is running"):
            job.result()


class TestEvents:
    def test_are_typed(self, coordinator: FakeCoordinator, job: shoal.JobHandle) -> None:
        progress = job_pb2.Progress(steps=5, samples=160, loss=0.5)
        coordinator.log("linear", "epoch 0")
        coordinator.emit(
            "linear", metrics=job_pb2.Metrics(worker="worker-1", step=5, values={"loss": 0.5}, progress=progress)
        )
        coordinator.enter("linear", "FAILED", "why")
        log, metrics, state = job.events()
        assert log == LogLine(1, 10.0, "worker-0", "epoch 0")
        assert isinstance(metrics, MetricsReported)
        assert metrics == MetricsReported(2, 10.0, "worker-1", 5, {"loss": 0.5}, metrics.progress)
        assert (metrics.progress.steps, metrics.progress.samples, metrics.progress.loss) == (5, 160, 0.5)
        assert state == StateChanged(3, 10.0, JobState.FAILED, "why")

    def test_end_with_the_last_event_when_not_followed(
        self, coordinator: FakeCoordinator, job: shoal.JobHandle
    ) -> None:
        coordinator.log("linear", "a")
        coordinator.log("linear", "b")
        assert [event.sequence for event in job.events(follow=False)] == [1, 2]
        assert [event.sequence for event in job.events(after=1, follow=False)] == [2]
        assert list(job.logs()) == ["worker-0: a", "worker-0: b"]

    @pytest.mark.parametrize("breaks", [[0], [1], [2], [0, 0, 0], [1, 1, 1]])
    def test_come_once_each_though_the_stream_breaks(
        self, coordinator: FakeCoordinator, job: shoal.JobHandle, breaks: list[int]
    ) -> None:
        for text in "abc":
            coordinator.log("linear", text)
        coordinator.enter("linear", "SUCCEEDED")
        coordinator.breaks = list(breaks)
        assert [event.sequence for event in job.events()] == [1, 2, 3, 4]
        assert len(coordinator.watched) == len(breaks) + 1

    def test_go_on_after_the_coordinator_was_away(self, coordinator: FakeCoordinator, job: shoal.JobHandle) -> None:
        seen: list[str] = []
        watcher = threading.Thread(target=lambda: seen.extend(job.logs(follow=True)))
        coordinator.log("linear", "before")
        watcher.start()
        wait_until(lambda: bool(coordinator.watched), what="the first watch")
        coordinator.stop()
        coordinator.log("linear", "meanwhile")
        coordinator.start()
        coordinator.enter("linear", "SUCCEEDED")
        watcher.join(timeout=20)
        assert seen == ["worker-0: before", "worker-0: meanwhile"]

    def test_after_the_last_are_none(self, coordinator: FakeCoordinator, job: shoal.JobHandle) -> None:
        coordinator.enter("linear", "SUCCEEDED")
        assert list(job.events(after=1)) == []

    def test_end_with_an_error_when_the_coordinator_stays_away(self, coordinator: FakeCoordinator) -> None:
        coordinator.add(shoal.Job("models:linear", name="linear"))
        with shoal.Client(coordinator.address, retry_for_s=0.2) as client:
            coordinator.log("linear", "last words")
            events = client.job("linear").events()
            assert next(events).sequence == 1
            coordinator.stop()
            with pytest.raises(shoal.Unreachable, match=coordinator.address):
                next(events)


class TestCallbacks:
    def test_get_every_event_in_order_until_the_end(self, coordinator: FakeCoordinator, job: shoal.JobHandle) -> None:
        coordinator.log("linear", "a")
        coordinator.breaks = [1]
        found = job_pb2.Evaluation(number=1, step=5, values={"loss": 0.5})
        coordinator.emit("linear", evaluation=job_pb2.EvaluationEnd(worker="worker-1", result=found, best=True))
        coordinator.enter("linear", "SUCCEEDED")
        first: list[Event] = []
        second: list[Event] = []
        assert job.wait(5, [first.append, second.append]).job == "linear"
        assert [event.sequence for event in first] == [1, 2, 3]
        assert first == second
        assert first[1] == EvaluationEnded(2, 10.0, "worker-1", Evaluation(1, 5, {"loss": 0.5}), True)

    def test_that_raise_end_the_waiting_and_not_the_job(
        self, coordinator: FakeCoordinator, job: shoal.JobHandle
    ) -> None:
        coordinator.log("linear", "a")
        later: list[Event] = []
        with pytest.raises(ZeroDivisionError):
            job.wait(callbacks=[lambda event: 1 / 0, later.append])
        assert later == []
        assert job.status().state is JobState.RUNNING


class TestTheWayThere:
    def test_an_unreachable_coordinator_is_named_with_the_time(self) -> None:
        address = f"127.0.0.1:{free_port()}"
        with (
            shoal.Client(address, retry_for_s=0.2) as client,
            pytest.raises(shoal.Unreachable, match=rf"{address} did not answer within 0\.2 s"),
        ):
            client.jobs()

    def test_connect_finds_out_at_once(self) -> None:
        with pytest.raises(shoal.Unreachable, match="did not answer"):
            shoal.connect(f"127.0.0.1:{free_port()}", retry_for_s=0.1)

    def test_a_call_waits_for_a_coordinator_that_comes_late(
        self, coordinator: FakeCoordinator, client: shoal.Client
    ) -> None:
        coordinator.stop()
        late = threading.Thread(target=coordinator.start)
        late.start()
        assert client.status().cluster == "reef"
        late.join()

    @pytest.mark.parametrize("address", ["localhost", ":7070", "host:http", "host:"])
    def test_invalid_address_is_refused(self, address: str) -> None:
        with pytest.raises(shoal.errors.BadRequest, match="give host:port"):
            shoal.Client(address)

    def test_the_address_comes_from_the_environment(
        self, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SHOAL_COORDINATOR", coordinator.address)
        with shoal.connect() as client:
            assert client.address == coordinator.address


def test_restore_auto_begins_a_first_run_and_goes_on_in_a_rerun(
    coordinator: FakeCoordinator, client: shoal.Client
) -> None:
    coordinator.stored = set()
    job = shoal.Job("m:f", name="night", restore="auto", partial_restore=True)
    first = client.submit(job).status().job
    assert (first.restore, first.partial_restore) == ("", False)
    client.cancel("night")
    coordinator.stored = {"night"}
    rerun = client.submit(job).status().job
    assert (rerun.restore, rerun.partial_restore) == ("night", True)
    with pytest.raises(shoal.JobExists):  # a rerun does not begin a running job again
        client.submit(job)
    with pytest.raises(shoal.InvalidJob, match='restore is "auto", but the job has no name; give it the same name'):
        shoal.Job("m:f", restore="auto")


def test_a_learning_rate_is_a_number_or_a_schedule(coordinator: FakeCoordinator, client: shoal.Client) -> None:
    handle = client.submit(shoal.Job("m:f", name="a"))
    handle.set_learning_rate(0.5)
    client.job("a").set_learning_rate(shoal.optim.StepLR(1.0, 10))
    assert [it.name for it in coordinator.learning_rates] == ["constant", "step"]
    with pytest.raises(shoal.InvalidOptimizer, match="learning_rate is nan; it must be finite and at least 0"):
        handle.set_learning_rate(float("nan"))
    with pytest.raises(shoal.UnknownJob):
        client.job("b").set_learning_rate(0.5)


def test_status_lists_the_members(coordinator: FakeCoordinator, client: shoal.Client) -> None:
    coordinator.status.members.add(
        member="server-0", role=coordinator_pb2.SERVER, address="h:1", alive=True, shards=4, bytes=100
    )
    coordinator.status.members.add(member="server-1", role=coordinator_pb2.SERVER, alive=False, shards=4, bytes=100)
    coordinator.status.members.add(member="worker-0", role=coordinator_pb2.WORKER, device="cpu", alive=True)
    status = client.status()
    assert (status.cluster, status.generation, status.shards, status.bytes) == ("reef", 7, 4, 100)
    assert [member.member for member in status.alive(Role.SERVER)] == ["server-0"]
    assert [member.device for member in status.alive(Role.WORKER)] == ["cpu"]


def test_numbers_that_are_not_finite_survive(
    coordinator: FakeCoordinator, client: shoal.Client, job: shoal.JobHandle
) -> None:
    coordinator.jobs["linear"].progress.loss = float("nan")
    assert np.isnan(job.status().progress.loss)


def test_who_follows_a_job_that_does_not_run_is_told_what_it_waits_for(
    coordinator: FakeCoordinator,
    client: shoal.Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("shoal._system.waits.NOTICE_AFTER_S", 0.0)
    handle = client.submit(shoal.Job("m:f", name="a"))
    coordinator.enter("a", "PENDING", "waiting for workers: 0 of 1")
    events = handle.events()
    next(events)
    wait_until(lambda: any("job a waits for workers: 0 of 1, since " in line for line in caplog.messages))
    client.cancel("a")
    assert [*events]
    assert not any(line.startswith("job a has waited ") for line in caplog.messages), "it did not go on"
    assert not any(thread.name == "wait-notices" for thread in threading.enumerate())
