"""Sessions: the user's own training loop against real servers. The test plays the coordinator."""

import inspect
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from grpc import ServicerContext
from structlog.testing import capture_logs

import shoal
from shoal import _rpc
from shoal._session.batches import DataPosition
from shoal._training import ParameterClient
from shoal._training.participant import Participant
from shoal.status import RankTimes, StepTiming
from shoal.v1 import job_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.api.reports import report_of
from support.clusters.fake_coordinator import FakeCoordinator
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

GRADIENT = {"w": np.ones(3)}


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[shoal.Client]:
    with shoal.Client(coordinator.address, retry_for_s=5) as client:
        yield client


@pytest.fixture
def servers(coordinator: FakeCoordinator) -> Iterator[ShardServers]:
    with ShardServers({"w": np.zeros(3)}) as servers:
        coordinator.placement = servers.placement.to_proto()
        servers.admit("me", incarnation=1)
        yield servers


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> list[ParameterClient]:
    """Receives the parameter clients that participants make."""
    made: list[ParameterClient] = []

    def noted(*given: Any, **options: Any) -> ParameterClient:
        made.append(ParameterClient(*given, **options))
        return made[-1]

    monkeypatch.setattr("shoal._training.participant.ParameterClient", noted)
    return made


@pytest.fixture
def brief_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes participants repeat a call to a server for a tenth of a second only."""
    monkeypatch.setattr("shoal._training.participant.ParameterClient", partial(ParameterClient, retry_for_s=0.1))


@pytest.fixture
def session(client: shoal.Client, servers: ShardServers) -> Iterator[shoal.Session]:
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        yield session


def test_a_loop_trains(session: shoal.Session, servers: ShardServers, client: shoal.Client) -> None:
    for step in range(3):
        assert session.step == step
        np.testing.assert_array_equal(session.pull()["w"], np.full(3, -step, float))
        assert session.push(GRADIENT).outcome == "accepted"
    session.barrier()
    assert session.skip().outcome == "skipped"
    assert session.step == 4
    np.testing.assert_array_equal(client.pull("job")["w"], np.full(3, -3.0))


def test_gradients_may_be_anything_that_numpy_reads(session: shoal.Session, client: shoal.Client) -> None:
    session.push({"w": [1.0, 2.0, 3.0]})
    np.testing.assert_array_equal(client.pull("job")["w"], [-1, -2, -3])


def test_the_first_starts_the_job_and_describes_it(coordinator: FakeCoordinator, session: shoal.Session) -> None:
    assert coordinator.jobs["job"].spec.program == ""
    assert coordinator.jobs["job"].spec.no_overlap, "a loop of one's own sees its own last push"
    (described,) = coordinator.described
    assert [variable.name for variable in described.variables] == ["w"]
    assert described.variables[0].initializer.name == "given"
    assert described.samples == 0


def test_a_session_says_that_it_waits_for_its_name(
    coordinator: FakeCoordinator,
    client: shoal.Client,
    servers: ShardServers,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal._system.waits.NOTICE_AFTER_S", 0.0)
    coordinator.holds_names = lambda: not caplog.messages
    with client.session("job", variables={"w": np.zeros(3)}, worker="me"):
        pass
    assert caplog.messages[0].startswith("session me (job job) waits for its name, which a process that has died holds")


def test_leave_finishes_and_reports(coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers) -> None:
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.push(GRADIENT, weight=32, metrics={"loss": 0.5})
        session.log("first line\nsecond line")
    assert [request.error for request in coordinator.finished] == [""]
    report = coordinator.reports[-1]
    assert (report.accepted, report.samples, report.step, dict(report.values)) == (1, 32, 1, {"loss": 0.5})
    assert list(report.log) == ["first line", "second line"]
    assert coordinator.members == {}
    session.close()  # again: nothing happens
    assert len(coordinator.finished) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_time_of_a_gradient_generator_counts_as_compute(
    coordinator: FakeCoordinator, servers: ShardServers, overlap: bool
) -> None:
    now = 0.0

    def gradients() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal now
        now += 0.5
        yield "w", np.ones(3)
        now += 0.25

    def failing() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal now
        now += 0.125
        raise ValueError("no gradient")
        yield

    with (
        closing(_rpc.CoordinatorClient(coordinator.address)) as client,
        shoal.Session(
            client, "job", {"w": np.zeros(3)}, {"overlap": overlap}, worker="me", clock=lambda: now
        ) as session,
    ):
        session.pull()
        now += 1.0
        with pytest.raises(ValueError, match="no gradient"):
            session.push(failing())
        session.push(gradients())
    (timing,) = [timing for report in coordinator.reports for timing in report.timings]
    assert (timing.compute, timing.push) == (1.875, 0.0)


def test_a_session_tells_where_the_time_of_its_steps_went(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    pause, ranks = threading.Event(), (RankTimes(60.0, 1), RankTimes(60.0, 2))
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.report_ranks(lambda: ranks)
        for _ in range(3):
            session.pull()
            pause.wait(0.01)
            session.barrier()
            pause.wait(0.01)
            session.push(GRADIENT)
        session.barrier()
        session.skip()
    told = [timing for report in coordinator.reports for timing in report.timings]
    *trained, skipped = map(StepTiming.from_proto, told)
    assert [timing.step for timing in trained] == [0, 1, 2]
    assert all(timing.pull > 0 and timing.push > 0 and timing.compute >= 0.019 for timing in trained)
    assert all(one.seconds <= following.began - one.began + 0.01 for one, following in pairwise(trained)), "none twice"
    assert (skipped.step, skipped.compute, skipped.pull) == (3, 0.0, 0.0)
    assert skipped.wait > 0
    began = [timing.began for timing in (*trained, skipped)]
    assert began == sorted(began)
    groups = {tuple(it.steps for it in report.ranks) for report in coordinator.reports if report.timings}
    assert groups == {(1, 2)}, "those of a hybrid group go with the timings"


def test_an_exception_fails_the_job_with_its_traceback(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        client.session("job", variables={"w": np.zeros(3)}, worker="me"),
    ):
        raise ZeroDivisionError("my loop")
    first, *trace = coordinator.finished[0].error.splitlines()
    assert first == "the session raised ZeroDivisionError: my loop", "the line that `shoal jobs` shows"
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ZeroDivisionError: my loop")
    assert [line for report in coordinator.reports for line in report.log] == [first, *trace], "as `shoal logs` shows"


def test_a_gradient_of_nan_is_counted_and_changes_nothing(
    coordinator: FakeCoordinator, session: shoal.Session, client: shoal.Client
) -> None:
    with pytest.raises(shoal.NonFiniteGradient):
        session.push({"w": np.array([1.0, np.nan, 1.0])})
    session.close()
    assert coordinator.reports[-1].rejected == 1
    np.testing.assert_array_equal(client.pull("job")["w"], np.zeros(3))


def answer_reports(
    coordinator: FakeCoordinator, how: Callable[[job_pb2.ReportRequest], object]
) -> list[job_pb2.ReportRequest]:
    """Makes the coordinator call `how` with each report first, which may raise. Returns the list of all reports."""
    asked: list[job_pb2.ReportRequest] = []

    @_rpc.servicer
    def report(_: FakeCoordinator, request: job_pb2.ReportRequest, context: ServicerContext) -> job_pb2.ReportReply:
        asked.append(request)
        how(request)
        coordinator.reports.append(request)
        return job_pb2.ReportReply()

    coordinator.Report = report.__get__(coordinator)  # type: ignore[method-assign]  # of this one alone
    coordinator.stop()
    coordinator.start()
    return asked


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sessions report every 10 ms."""
    monkeypatch.setattr("shoal._session.reports.REPORT_EVERY_S", 0.0)
    monkeypatch.setattr("shoal._system.waits.LOOK_S", 0.01)


def repeat(call: Callable[[], object]) -> None:
    """Repeats a call until it raises, because an answer to a report has arrived."""
    while True:
        call()


def test_whatever_is_logged_or_measured_the_coordinator_takes_it(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    answer_reports(coordinator, report_of)
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.log("é" * 8_000)
        session.log("\n".join(str(number) for number in range(1_001)))
        session.log("half \ud800 a character")
        session.push(GRADIENT, weight=1e300, metrics={f"metric {number}": number for number in range(300)})
        session.push(GRADIENT, metrics={"loss": np.float32(0.5)})  # type: ignore[dict-item]  # taken all the same
    lines = [line for report in coordinator.reports for line in report.log]
    assert "".join(lines[:2]) == "é" * 8_000
    assert lines[2:] == [*map(str, range(1_001)), "half ? a character"]
    assert coordinator.reports[-1].accepted == 2
    assert [request.error for request in coordinator.finished] == [""]


def test_unsent_log_lines_are_sent_later(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    away = [True]

    def how(_: job_pb2.ReportRequest) -> None:
        if away[0]:
            raise shoal.errors.Unreachable("away")

    asked = answer_reports(coordinator, how)
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.log("early")
        session.push(GRADIENT)
        wait_until(lambda: asked[-1:] != [] and asked[-1].accepted == 1, what="a report with both")
        away[0] = False
        session.log("late")
    assert [line for report in coordinator.reports for line in report.log] == ["early", "late"]
    assert coordinator.reports[-1].accepted == 1


def test_counts_reach_a_coordinator_that_returns_while_the_session_closes(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    def how(_: job_pb2.ReportRequest) -> None:
        if len(asked) < 2:
            raise shoal.errors.Unreachable("away")

    asked = answer_reports(coordinator, how)
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.push(GRADIENT)
    assert [request.accepted for request in coordinator.reports] == [1]
    assert [request.error for request in coordinator.finished] == [""]


def test_a_session_that_closes_sends_its_counts_to_a_coordinator_that_has_forgotten_them(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.push(GRADIENT)
        wait_until(lambda: any(it.accepted for it in coordinator.reports), what="the report of the push")
        coordinator.reports.clear()  # as a coordinator that is restarted
    assert coordinator.reports[-1].accepted == 1


def test_a_report_that_is_refused_stops_no_loop_and_no_close(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    def refuse(_: job_pb2.ReportRequest) -> None:
        raise shoal.errors.BadRequest("not like this")

    asked = answer_reports(coordinator, refuse)
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.log("hello")
        wait_until(lambda: bool(asked), what="the report that is refused")
        assert session.push(GRADIENT).outcome == "accepted"
        session.pull()
    assert [request.error for request in coordinator.finished] == [""]


def test_a_report_of_the_dead_is_said_by_the_next_call(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    def fence(_: job_pb2.ReportRequest) -> None:
        raise shoal.Fenced("me is dead")

    answer_reports(coordinator, fence)
    session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
    assert session.push(GRADIENT).outcome == "accepted"
    for _ in range(2):
        with pytest.raises(shoal.Fenced, match="me of job job was declared lost"):
            repeat(session.pull)
    session.close()
    assert coordinator.finished == []


def test_an_end_that_does_not_count_is_said_when_closing(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    def fence(_: job_pb2.ReportRequest) -> None:
        raise shoal.Fenced("me is dead")

    answer_reports(coordinator, fence)
    session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
    session.push(GRADIENT)
    with pytest.raises(shoal.Fenced, match="was declared lost"):
        session.close()
    assert coordinator.members == {}
    session.close()


@pytest.mark.parametrize("weight", ["3", None])
def test_a_weight_that_is_no_number_is_refused(session: shoal.Session, weight: Any) -> None:
    with pytest.raises(shoal.errors.BadRequest, match=r"weight is .*; give a number"):
        session.push(GRADIENT, weight=weight)
    with pytest.raises(shoal.errors.InvalidGradient, match=r"weight 0\.0; it must be larger than 0"):
        session.push(GRADIENT, weight=0)


def test_a_metric_that_is_no_number_is_refused_before_anything_is_sent(
    session: shoal.Session, client: shoal.Client
) -> None:
    with pytest.raises(shoal.errors.BadRequest, match="metric 'loss' is 'low'; give a number"):
        session.push(GRADIENT, metrics={"loss": "low"})  # type: ignore[dict-item]  # what is refused
    np.testing.assert_array_equal(client.pull("job")["w"], np.zeros(3))
    assert session.step == 0


GONE = (
    r"job job and its variables are gone: it was dropped, or the coordinator was restarted with another store"
    r".*Close this session"
)


@pytest.mark.parametrize("call", ["pull", "barrier", "skip", "push"])
def test_a_job_that_servers_have_dropped_is_said_to_be_gone(
    session: shoal.Session, servers: ShardServers, coordinator: FakeCoordinator, call: str
) -> None:
    for stub in servers.used_stubs:
        stub.DropShards(pb.DropShardsRequest(job="job"))
    for _ in range(2):
        with pytest.raises(shoal.UnknownJob, match=GONE):
            session.push(GRADIENT) if call == "push" else getattr(session, call)()
    session.close()
    assert (coordinator.finished, coordinator.members) == ([], {})


def test_a_job_that_the_coordinator_has_lost_is_said_to_be_gone(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    def lost(_: job_pb2.ReportRequest) -> None:
        raise shoal.UnknownJob("there is no job 'job'")

    answer_reports(coordinator, lost)
    session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
    assert session.push(GRADIENT).outcome == "accepted"
    with pytest.raises(shoal.UnknownJob, match=GONE):
        repeat(session.pull)
    session.close()


def test_session_fenced_by_servers_says_how_to_continue(
    session: shoal.Session, servers: ShardServers, coordinator: FakeCoordinator
) -> None:
    servers.remove("me")
    for _ in range(2):
        with pytest.raises(shoal.Fenced, match=r"me of job job was declared lost.*open a new one"):
            session.push(GRADIENT)
    session.close()
    assert coordinator.finished == []


def test_a_session_whose_member_was_declared_lost_pushes_no_more(
    session: shoal.Session, coordinator: FakeCoordinator, client: shoal.Client
) -> None:
    coordinator.fenced.add("me")
    wait_until(lambda: coordinator.members.get("me") == 2, what="another life")

    def refused() -> bool:
        try:
            session.skip()
        except shoal.Fenced:
            return True
        return False

    wait_until(refused, what="the end of the session's life")


def test_fenced_session_raises_on_close(
    client: shoal.Client, servers: ShardServers, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[int] = []  # that the session knows of

    def member(*given: Any, on_incarnation: Callable[[int], None], **options: Any) -> _rpc.MembershipClient:
        def noted(incarnation: int) -> None:
            on_incarnation(incarnation)
            lives.append(incarnation)

        return _rpc.MembershipClient(*given, on_incarnation=noted, **options)

    monkeypatch.setattr("shoal._session.entry.MembershipClient", member)
    session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
    coordinator.fenced.add("me")
    wait_until(lambda: lives == [1, 2], what="another life")
    with pytest.raises(shoal.Fenced, match="was declared lost"):
        session.close()
    assert (coordinator.finished, coordinator.members) == ([], {})


FAILED = r"job job failed: server s1 is about to leave; open the session again"


@pytest.mark.parametrize("how", ["fenced", "dropped", "away"])
def test_push_to_a_failed_job_raises_the_reason(
    brief_retries: None, session: shoal.Session, servers: ShardServers, coordinator: FakeCoordinator, how: str
) -> None:
    coordinator.enter("job", "FAILED", "server s1 is about to leave; open the session again")
    if how == "fenced":
        servers.remove("me")
    elif how == "dropped":
        servers.each("DropShards", pb.DropShardsRequest(job="job"))
    else:
        servers.close()
    for _ in range(2):
        with pytest.raises(shoal.JobFailed, match=FAILED):
            session.push(GRADIENT)
    session.close()
    assert coordinator.finished == []


def test_a_gradient_that_is_missing_says_why_there_must_be_one(session: shoal.Session) -> None:
    advice = r"shoal\.Variable\.of\(array, trainable=False\), and push its values in `updates`"
    with pytest.raises(shoal.InvalidGradient, match=rf"'w' is missing\. Variables of a float dtype are .*{advice}"):
        session.push({})
    with pytest.raises(shoal.InvalidGradient) as raised:
        session.push({"w": np.ones(4)})
    assert "trainable" not in raised.value.message


@pytest.mark.parametrize("how", ["fenced", "report"])
def test_sessions_of_a_cancelled_job_hear_of_it_and_of_its_checkpoint(
    session: shoal.Session, servers: ShardServers, coordinator: FakeCoordinator, at_once: None, how: str
) -> None:
    """Servers fence the workers of a job that has ended: these were not declared lost."""
    coordinator.jobs["job"].checkpoint.CopyFrom(job_pb2.Checkpoint(number=3))
    coordinator.enter("job", "CANCELLED")
    if how == "fenced":
        servers.remove("me")
    else:
        coordinator.over = True
        session.log("a line")
    for _ in range(2):
        with pytest.raises(shoal.Cancelled, match=r"^job job was cancelled; its newest checkpoint is job/3: .*'auto'"):
            repeat(session.pull)
    session.close()


def test_the_reply_to_a_report_says_how_the_job_has_ended(
    session: shoal.Session, coordinator: FakeCoordinator, at_once: None
) -> None:
    """A coordinator that stops with its cluster does not answer a second question."""
    coordinator.over = True
    coordinator.ended = job_pb2.JobStatus(state=job_pb2.FAILED, reason="server s1 is about to leave")
    del coordinator.jobs["job"]  # nothing can be asked
    session.log("a line")
    with pytest.raises(shoal.JobFailed, match="job job failed: server s1 is about to leave"):
        repeat(session.pull)
    session.close()


@pytest.mark.parametrize(("state", "error"), [("FAILED", shoal.JobFailed), ("CANCELLED", shoal.errors.Cancelled)])
@pytest.mark.parametrize("call", ["pull", "barrier", "skip"])
def test_a_call_to_a_dead_server_ends_soon_after_its_job(
    parameters: list[ParameterClient],
    session: shoal.Session,
    servers: ShardServers,
    coordinator: FakeCoordinator,
    call: str,
    state: str,
    error: type[shoal.ShoalError],
) -> None:
    """The call begins before the coordinator knows that the server is lost, so it would be repeated for 30 s."""
    placed, retried = parameters[-1].servers.calls, threading.Event()
    count = placed.on_retry

    def on_retry() -> None:
        count()
        retried.set()

    placed.on_retry = on_retry
    servers.close()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(getattr(session, call))
        assert retried.wait(10)
        assert not waiting.done()
        coordinator.enter("job", state, "server s1 is about to leave; open the session again")
        with pytest.raises(error):
            waiting.result(10)
    session.close()


def test_report_to_a_failed_job_raises_the_reason(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
    coordinator.enter("job", "FAILED", "server s1 is about to leave; open the session again")
    coordinator.over = True
    assert session.push(GRADIENT).outcome == "accepted"
    with pytest.raises(shoal.JobFailed, match=FAILED):
        repeat(session.pull)
    session.close()


def test_close_raises_the_end_that_no_call_has_raised(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
    coordinator.enter("job", "FAILED", "server s1 is about to leave; open the session again")
    coordinator.over = True
    session.push(GRADIENT)
    wait_until(lambda: any(it.accepted for it in coordinator.reports), what="the report that is answered with the end")
    with pytest.raises(shoal.JobFailed, match=FAILED):
        session.close()


def test_a_job_that_is_over_stops_the_loop(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    coordinator.over = True

    def train_forever() -> None:
        with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
            while True:
                session.push(GRADIENT)

    with pytest.raises(shoal.Cancelled, match="stop the loop"):
        train_forever()


def test_a_session_may_ask_for_halves_and_overlap(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    with client.session("job", variables={"w": np.zeros(3)}, wire_dtype="bfloat16", overlap=True, worker="me"):
        asked = shoal.Job.from_proto(coordinator.jobs["job"].spec)
    assert (asked.wire_dtype, asked.overlap) == ("bfloat16", True)


@pytest.fixture
def overlapping(client: shoal.Client, servers: ShardServers) -> Callable[[], shoal.Session]:
    """Opens a session whose pushes overlap with the computation of the next step."""
    options: dict[str, Any] = {"variables": {"w": np.zeros(3)}, "consistency": shoal.Asynchronous(), "overlap": True}
    return lambda: client.session("job", worker="me", **options)


def test_overlapping_session_gets_the_push_result_later(
    overlapping: Callable[[], shoal.Session], coordinator: FakeCoordinator, client: shoal.Client
) -> None:
    with overlapping() as session:
        assert session.settle() is None
        for step in range(4):
            np.testing.assert_array_equal(session.pull()["w"], np.full(3, -max(0, step - 1), float))
            assert session.push(GRADIENT, samples=step + 1, metrics={"loss": step}).outcome == "sent"
            assert session.step == step + 1
        last = session.settle()
        assert last
        assert last.outcome == "accepted"
        np.testing.assert_array_equal(client.pull("job")["w"], np.full(3, -4.0))
        session.pull()
        session.push(GRADIENT, weight=5, metrics={"loss": 4})
    np.testing.assert_array_equal(client.pull("job")["w"], np.full(3, -5.0))
    report = coordinator.reports[-1]
    assert (report.accepted, report.samples, report.step) == (5, 15, 5)
    assert [request.error for request in coordinator.finished] == [""]


def test_a_pull_after_settle_has_the_last_push_of_an_overlapping_session(
    overlapping: Callable[[], shoal.Session],
) -> None:
    with overlapping() as session:
        for step in range(3):
            np.testing.assert_array_equal(session.pull()["w"], np.full(3, -step, float))
            session.push(GRADIENT)
            session.settle()
        np.testing.assert_array_equal(session.pull()["w"], np.full(3, -3.0))


# Every public method, but for those that only say what the session knows, and `close`, which does nothing in a fork.
CALLS: dict[str, Callable[[shoal.Session], object]] = {
    "barrier": lambda session: session.barrier(),
    "batches": lambda session: session.batches(5),
    "ranges": lambda session: session.ranges(5),
    "buffers": lambda session: session.buffers(),
    "checkpoint": lambda session: session.checkpoint(),
    "log": lambda session: session.log("a line"),
    "members": lambda session: session.members,
    "pull": lambda session: session.pull(),
    "push": lambda session: session.push(GRADIENT),
    "report_ranks": lambda session: session.report_ranks(tuple),
    "set_learning_rate": lambda session: session.set_learning_rate(0.1),
    "settle": lambda session: session.settle(),
    "skip": lambda session: session.skip(),
    "optimizer_state": lambda session: session.optimizer_state(),
}


def test_a_fork_of_the_process_cannot_use_its_session(session: shoal.Session, coordinator: FakeCoordinator) -> None:
    assert CALLS.keys() == {name for name in dir(shoal.Session) if name[0] != "_"} - {
        "batch_size",
        "close",
        "overlap",
        "rank",
        "step",
        "updates",
        "workers",
    }
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            session.close()
            for name, call in CALLS.items():
                with suppress(shoal.errors.BadRequest):
                    call(session)
                    os.write(write, f"{name} is allowed. ".encode())
            session.pull()
        except shoal.errors.BadRequest as error:
            os.write(write, error.message.encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)  # so that a child that has failed leaves nothing to wait for
    assert os.waitpid(child, 0)[1] == 0
    said = os.read(read, 4096).decode()
    assert said.startswith("session me of job job was opened by process")
    assert f"was opened by process {os.getpid()}, and this is a fork of it; open a session in" in said
    os.close(read)
    assert coordinator.finished == []
    assert session.push(GRADIENT).outcome == "accepted"


def test_a_session_tells_how_many_sessions_its_job_wants(session: shoal.Session) -> None:
    assert session.workers == 1


def test_a_session_that_overlaps_passes_steps_by_and_waits_at_barriers(
    overlapping: Callable[[], shoal.Session], client: shoal.Client
) -> None:
    with overlapping() as session:
        session.pull()
        session.push(GRADIENT)
        session.barrier()
        assert session.skip().outcome == "skipped"
        assert session.step == 2
        np.testing.assert_array_equal(session.pull()["w"], np.full(3, -1.0))


def test_nan_of_the_last_push_is_said_by_the_next_call_and_counted(
    overlapping: Callable[[], shoal.Session], coordinator: FakeCoordinator, client: shoal.Client
) -> None:
    with overlapping() as session:
        session.pull()
        session.push({"w": np.array([1.0, np.nan, 1.0])})
        session.pull()
        with pytest.raises(shoal.NonFiniteGradient):
            session.push(GRADIENT)
        session.push(GRADIENT)  # the step after the one that was lost
    np.testing.assert_array_equal(client.pull("job")["w"], np.full(3, -1.0))
    assert (coordinator.reports[-1].rejected, coordinator.reports[-1].accepted) == (1, 1)
    assert [request.error for request in coordinator.finished] == [""]


def test_nan_of_the_very_last_push_is_said_when_closing_and_fails_the_job(
    overlapping: Callable[[], shoal.Session], coordinator: FakeCoordinator
) -> None:
    session = overlapping()
    session.pull()
    session.push({"w": np.full(3, np.inf)})
    with pytest.raises(shoal.NonFiniteGradient, match="contains inf"):
        session.close()
    assert coordinator.reports[-1].rejected == 1
    (finished,) = coordinator.finished
    assert "NonFiniteGradient" in finished.error
    assert coordinator.members == {}


def test_a_failed_push_that_no_call_has_raised_is_said_once_beside_the_error_of_the_loop(
    overlapping: Callable[[], shoal.Session], coordinator: FakeCoordinator
) -> None:
    def train() -> None:
        with overlapping() as session:
            session.pull()
            session.push({"w": np.full(3, np.inf)})
            raise ValueError("no data")

    with capture_logs() as logged, pytest.raises(ValueError, match="no data"):
        train()
    (warned,) = [it for it in logged if it["log_level"] == "warning"]
    assert warned["event"] == "closing the session raised a second error"
    assert "contains inf" in warned["reason"]
    (finished,) = coordinator.finished
    assert "no data" in finished.error


def test_job_fails_with_the_exception_of_the_program(
    overlapping: Callable[[], shoal.Session], coordinator: FakeCoordinator
) -> None:
    def train() -> None:
        with overlapping() as session:
            session.push({"w": np.full(3, np.inf)})
            raise ZeroDivisionError("my loop")

    with pytest.raises(ZeroDivisionError):
        train()
    (finished,) = coordinator.finished
    assert "ZeroDivisionError: my loop" in finished.error
    assert coordinator.members == {}


@pytest.mark.parametrize("call", ["settle", "push", "close"])
def test_a_session_that_overlaps_hears_that_it_was_fenced(
    overlapping: Callable[[], shoal.Session], servers: ShardServers, coordinator: FakeCoordinator, call: str
) -> None:
    session = overlapping()
    session.pull()
    servers.remove("me")
    session.push(GRADIENT)
    with pytest.raises(shoal.Fenced, match="was declared lost"):
        session.push(GRADIENT) if call == "push" else getattr(session, call)()
    if call != "close":
        with pytest.raises(shoal.Fenced, match="was declared lost"):
            session.pull()
    session.close()
    assert (coordinator.finished, coordinator.members) == ([], {})


def test_others_join_without_a_description(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, session: shoal.Session
) -> None:
    servers.admit("other", incarnation=1)
    with client.session("job", worker="other") as other:
        other.push(GRADIENT)
    assert len(coordinator.described) == 1


def test_several_threads_of_one_script_open_the_same_job(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    names = ["a", "b", "c"]
    for name in names:
        servers.admit(name, incarnation=1)

    def train(name: str) -> None:
        with client.session("job", variables={"w": np.zeros(3)}, workers=3, worker=name) as session:
            session.push(GRADIENT)

    threads = [threading.Thread(target=train, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    np.testing.assert_array_equal(client.pull("job")["w"], np.full(3, -3.0))
    assert len(coordinator.finished) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 2}, "runs with workers=1, not 2"),
        ({"optimizer": shoal.optim.Adam()}, "runs with optimizer=SGD"),
        ({"consistency": shoal.Asynchronous()}, "runs with consistency=sync"),
        ({"seed": 9}, "runs with seed=0"),
        ({"wire_dtype": "float16"}, "runs with wire_dtype=float32, not float16"),
        ({"overlap": True}, "runs with overlap=False, not True"),
    ],
)
def test_another_description_of_a_live_job_is_refused(
    client: shoal.Client, session: shoal.Session, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(shoal.InvalidJob, match=said):
        client.session("job", worker="other", **options)


def test_a_session_that_is_refused_cancels_the_job_that_it_started_if_no_other_has_a_part_in_it(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    coordinator.refusal = shoal.InvalidJob("another shape")
    with pytest.raises(shoal.InvalidJob, match="another shape"):
        client.session("job", variables={"w": np.zeros(3)}, worker="me")
    assert [(it.job, it.session) for it in coordinator.cancelled] == [("job", "me")], "the coordinator knows the others"
    assert coordinator.members == {}


def test_a_rerun_waits_until_the_last_checkpoint_of_the_run_before_is_written(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers
) -> None:
    coordinator.refusals = [shoal.JobExists("its last checkpoint is being written", ending=1)] * 2
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        assert session.push(GRADIENT).outcome == "accepted"
    assert coordinator.refusals == []


def test_initial_values_are_freed_when_the_session_has_entered(client: shoal.Client, servers: ShardServers) -> None:
    values = np.zeros(3)
    kept = weakref.ref(values)
    with client.session("job", variables={"w": values}, worker="me"):
        del values
        assert kept() is None


@pytest.mark.parametrize("code", [None, 0])
def test_an_exit_without_an_error_closes_the_session(
    coordinator: FakeCoordinator, session: shoal.Session, code: int | None
) -> None:
    with pytest.raises(SystemExit), session:
        raise SystemExit(code)
    assert [request.error for request in coordinator.finished] == [""]


def test_an_exit_with_an_error_ends_the_session_with_it(coordinator: FakeCoordinator, session: shoal.Session) -> None:
    with pytest.raises(SystemExit), session:
        raise SystemExit(3)
    assert coordinator.finished[0].error.startswith("the session raised SystemExit: 3")


def test_updates_that_are_an_array_are_refused(session: shoal.Session) -> None:
    with pytest.raises(shoal.errors.BadRequest, match=r"updates is array.*give a dict of arrays by name"):
        session.push(GRADIENT, updates=np.zeros(3))


def test_a_closed_session_takes_no_lines(session: shoal.Session) -> None:
    session.close()
    with pytest.raises(shoal.Cancelled, match="is closed"):
        session.log("too late")


def test_a_coordinator_that_does_not_answer_reports_delays_no_call(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, at_once: None
) -> None:
    answers = threading.Event()

    def how(_: job_pb2.ReportRequest) -> None:
        answers.wait(20)

    asked = answer_reports(coordinator, how)
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        session.push(GRADIENT, weight=2)
        session.log("first")
        wait_until(lambda: bool(asked), what="the first report")
        began = time.monotonic()
        for _ in range(10):
            session.log("a line")
            session.push(GRADIENT, weight=2)
        assert time.monotonic() - began < 1
        answers.set()
    report = coordinator.reports[-1]
    assert (report.accepted, report.samples, report.step) == (11, 22, 11)
    assert [line for report in coordinator.reports for line in report.log] == ["first"] + ["a line"] * 10


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        (
            "max_steps",
            "sessions do not take the field max_steps of Job, .* Their options are optimizer, .*, partial_restore",
        ),
        ("clip_norm", r"it is an argument of the optimizer: optimizer=shoal\.optim\.Adam\(clip_norm=\.\.\.\)"),
        ("lr", r"it is an argument of the optimizer: optimizer=shoal\.optim\.Adam\(lr=\.\.\.\)"),
        ("optimiser", r"did you mean optimizer\?"),
        ("colour", "options are optimizer, .*, partial_restore"),
    ],
)
def test_an_option_that_there_is_not_is_refused_with_the_nearest(
    client: shoal.Client, coordinator: FakeCoordinator, option: str, advice: str
) -> None:
    options: Any = {"workers": 1, option: 2}
    with pytest.raises(
        TypeError, match=rf"Client\.session\(\) got an unexpected keyword argument '{option}'; {advice}"
    ):
        client.session("job", variables={"w": np.zeros(3)}, **options)
    assert coordinator.jobs == {}


def test_the_options_of_a_session_are_in_its_signature() -> None:
    signature = inspect.signature(shoal.Client.session)
    assert signature.parameters["workers"].annotation == int | None
    assert list(signature.parameters)[-1] == "partial_restore"


def test_session_of_an_unknown_job_cannot_be_joined(client: shoal.Client, coordinator: FakeCoordinator) -> None:
    with pytest.raises(shoal.UnknownJob, match=r"^there is no running job .* can join: pass variables to start it"):
        client.session("job")
    coordinator.add(shoal.Job(name="job"), "SUCCEEDED")
    with pytest.raises(shoal.UnknownJob, match=r"job is succeeded.*pass variables"):
        client.session("job")


def test_a_member_id_is_no_number_of_sessions(client: shoal.Client) -> None:
    with pytest.raises(shoal.errors.BadRequest, match=r"worker is 2; .*`workers`"):
        client.session("job", variables={"w": np.zeros(3)}, worker=cast(Any, 2))


def test_a_session_that_cannot_enter_leaves_nothing_behind(coordinator: FakeCoordinator, client: shoal.Client) -> None:
    with pytest.raises(shoal.InvalidVariable):
        client.session("job", variables={"w" * 300: np.zeros(3)}, worker="me")
    assert coordinator.jobs["job"].state == job_pb2.CANCELLED
    assert coordinator.members == {}


def test_ctrl_c_until_the_session_is_open_leaves_nothing_behind(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: Participant) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Participant, "restore_note", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.session("job", variables={"w": np.zeros(3)}, worker="me")
    assert coordinator.jobs["job"].state == job_pb2.CANCELLED
    assert coordinator.members == {}


def test_ctrl_c_in_the_wait_of_close_still_reports_the_end(
    coordinator: FakeCoordinator, session: shoal.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DataPosition, "await_last", interrupt)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert [request.error for request in coordinator.finished] == [""]
    assert coordinator.members == {}


def test_close_takes_an_exception(coordinator: FakeCoordinator, session: shoal.Session) -> None:
    with pytest.raises(shoal.errors.BadRequest, match="error is 3; give an exception or a text"):
        session.close(cast(Any, 3))
    session.close(ValueError("no such file"))
    (finished,) = coordinator.finished
    assert finished.error.startswith("the session raised ValueError: no such file\n")


def test_a_session_is_a_member(coordinator: FakeCoordinator, session: shoal.Session) -> None:
    assert coordinator.members == {"me": 1}


def test_a_session_sets_the_learning_rate_of_its_job(coordinator: FakeCoordinator, session: shoal.Session) -> None:
    session.set_learning_rate(0.25)
    session.set_learning_rate(shoal.optim.StepLR(1.0, 10))
    assert [it.name for it in coordinator.learning_rates] == ["constant", "step"]
    for rate in (float("nan"), -1.0, float("inf")):
        with pytest.raises(shoal.InvalidOptimizer, match=f"learning_rate is {rate}; it must be finite and at least 0"):
            session.set_learning_rate(rate)
    assert len(coordinator.learning_rates) == 2
