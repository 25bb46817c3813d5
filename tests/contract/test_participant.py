"""Participant against fake servicers on loopback: the calls that it sends, its waits, and its handling of answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._training import ParameterClient
from shoal._training.participant import Participant, Report
from shoal._wire import DataRange, Lease, NoRange, Placement, ReportAck
from shoal.consistency import Asynchronous, BoundedStaleness, Consistency, Synchronous
from shoal.job import Job
from shoal.status import StepTiming
from shoal.v1 import job_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable, variable_from_array
from shoal_coordinator.api.reports import report_of
from support.clusters.fake_cluster import FakeCluster, fake_cluster

SPEC = Job("models.digits:mlp", name="digits", workers=2, settings={"hidden": 3})


class Rig:
    def __init__(self, cluster: FakeCluster, client: CoordinatorClient) -> None:
        self.cluster, self.jobs, self.server, self.record = cluster, cluster.jobs, cluster.server, cluster.record
        self.joined = cluster.joined
        self.client = client
        self.slept: list[float] = []
        self.participant = Participant(client, "digits", "worker-1", 4, sleep=self.slept.append)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with fake_cluster(SPEC) as (cluster, client):
        yield Rig(cluster, client)


def test_the_spec_is_fetched_once(rig: Rig) -> None:
    assert rig.participant.spec == SPEC
    assert rig.participant.spec.settings == {"hidden": 3}
    assert len(rig.record.requests) == 1


def test_describe_turns_arrays_into_given_variables(rig: Rig) -> None:
    array = np.zeros((2, 3))
    kept = Variable.of(np.ones(2), trainable=False)
    rig.participant.describe({"w": array, "b": Variable(1), "kept": kept}, samples=50)
    [request] = rig.record.requests
    assert (request.job, request.worker, request.incarnation, request.samples) == ("digits", "worker-1", 4, 50)
    assert list(request.variables) == [
        variable_from_array(array).to_proto("w"),
        Variable(1).to_proto("b"),
        kept.to_proto("kept"),
    ]
    assert request.variables[2].initializer.name == "given"


def test_enter_waits_longer_and_longer_until_it_is_ready(rig: Rig) -> None:
    rig.jobs.joins = [*[rig.joined(False, placed=False)] * 7, rig.joined(True, state=job_pb2.RUNNING, step=12)]
    with rig.participant.enter() as parameters:
        assert parameters.step == 12
    assert rig.participant.rank == 1
    assert rig.slept == [0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.25]


@pytest.mark.parametrize(
    ("mode", "overlap", "outcome"),
    [
        (Asynchronous(), True, "sent"),
        (BoundedStaleness(1), True, "sent"),
        (Asynchronous(), False, "accepted"),
        (BoundedStaleness(0), True, "accepted"),
        (Synchronous(), True, "accepted"),
    ],
    ids=str,
)
def test_pushes_overlap_where_the_job_asks_for_it_and_the_mode_allows_it(
    mode: Consistency, overlap: bool, outcome: str
) -> None:
    with fake_cluster(replace(SPEC, consistency=mode, overlap=overlap)) as (cluster, client):
        with Participant(client, "digits", "worker-1", 4).enter() as parameters:
            parameters.pull()
            assert parameters.push({"w": np.ones(2, np.float32), "b": np.ones(1, np.float32)}).outcome == outcome
            parameters.settle()
        pulls = cluster.record.of(pb.PullRequest)
        assert [pull.ahead for pull in pulls] == ([0, 1] if outcome == "sent" else [0])


def test_repeated_calls_are_counted_by_method(rig: Rig) -> None:
    gradients = {"w": np.ones(2, np.float32), "b": np.ones(1, np.float32)}
    with rig.participant.enter() as parameters, ThreadPoolExecutor(1) as pool:
        parameters.pull()
        assert rig.client.retries.take() == {}
        rig.jobs.state = job_pb2.RUNNING
        rig.server.error = errors.Unreachable("away")
        pushed = pool.submit(parameters.push, gradients, updates=None, weight=1.0, cursor=None)
        rig.record.wait_for(pb.PushRequest, 2)
        rig.server.error = None
        assert pushed.result(20).outcome == "accepted"
        counts = rig.client.retries.take()
        assert counts.keys() == {"server"}
        assert counts["server"] == len(rig.record.of(pb.PushRequest)) - 1
        assert rig.client.retries.take() == {}
    rig.jobs.error = errors.Unreachable("away")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(rig.participant.lease)
        rig.record.wait_for(job_pb2.LeaseRequest, 2)
        rig.jobs.error = None
        assert answer.result(20) is NoRange.FINISHED
    assert rig.client.retries.take() == {"coordinator": len(rig.record.of(job_pb2.LeaseRequest)) - 1}


def test_a_push_to_a_dead_server_ends_soon_after_its_job(rig: Rig) -> None:
    """The push begins before the coordinator knows that the server is lost, so it would be repeated for 30 s."""
    gradients = {"w": np.ones(2, np.float32), "b": np.ones(1, np.float32)}
    rig.jobs.state = job_pb2.RUNNING
    with rig.participant.enter() as parameters, ThreadPoolExecutor(1) as pool:
        parameters.pull()
        rig.server.error = errors.Unreachable("away")
        pushed = pool.submit(parameters.push, gradients, updates=None, weight=1.0, cursor=None)
        rig.record.wait_for(pb.PushRequest, 2)
        rig.jobs.state = job_pb2.FAILED
        with pytest.raises(errors.JobFailed, match="no luck"):
            pushed.result(10)


def test_the_assigning_worker_sends_the_values_once_and_says_so(rig: Rig) -> None:
    rig.jobs.assign_values = True
    rig.jobs.joins = [rig.joined(False, placed=False), rig.joined(False), rig.joined(False), rig.joined(True)]
    rig.participant.describe({"w": np.ones(2, np.float32), "b": np.full(1, 3.0, np.float32)}, samples=0)
    rig.participant.enter().close()
    np.testing.assert_array_equal(rig.server.values, [1, 1, 3])
    assert sum(request.HasField("header") for request in rig.record.of(pb.PushRequest)) == 1
    assert [join.assigned for join in rig.record.of(job_pb2.JoinRequest)] == [False, False, True, True]


def test_variables_that_are_not_given_keep_their_values(rig: Rig) -> None:
    rig.jobs.assign_values = True
    rig.jobs.joins = [rig.joined(False), rig.joined(True)]
    rig.participant.describe({"w": np.ones(2, np.float32), "b": Variable(1)}, samples=0)
    rig.participant.enter().close()
    np.testing.assert_array_equal(rig.server.values, [1, 1, 9])


def test_values_that_were_restored_are_not_sent(rig: Rig) -> None:
    rig.jobs.assign_values = True
    rig.jobs.joins = [rig.joined(False), rig.joined(True)]
    rig.jobs.joins[0].restored.append("b")
    rig.participant.describe({"w": np.ones(2, np.float32), "b": np.full(1, 3.0, np.float32)}, samples=0)
    rig.participant.enter().close()
    np.testing.assert_array_equal(rig.server.values, [1, 1, 9])


def test_the_other_workers_send_nothing(rig: Rig) -> None:
    rig.jobs.joins = [rig.joined(False), rig.joined(True)]
    rig.participant.describe({"w": np.ones(2, np.float32), "b": Variable(1)}, samples=0)
    rig.participant.enter().close()
    assert rig.record.of(pb.PushRequest) == []


def test_a_job_that_failed_meanwhile_says_why(rig: Rig) -> None:
    rig.jobs.joins = [rig.joined(False, placed=False), rig.joined(False, placed=False, state=job_pb2.FAILED)]
    with pytest.raises(errors.JobFailed, match="digits failed: no luck"):
        rig.participant.enter()


@pytest.mark.parametrize("state", [job_pb2.CANCELLED, job_pb2.SUCCEEDED])
def test_a_job_that_is_over_cannot_be_entered(rig: Rig, state: job_pb2.JobState.ValueType) -> None:
    rig.jobs.joins = [rig.joined(False, placed=False, state=state)]
    rig.jobs.state = state
    said = "digits was cancelled: no luck" if state == job_pb2.CANCELLED else "succeeded"
    with pytest.raises(errors.Cancelled, match=said):
        rig.participant.enter()


def test_enter_ends_when_stopped(rig: Rig) -> None:
    rig.jobs.joins = [rig.joined(False, placed=False)]
    with pytest.raises(errors.Cancelled, match="stopped waiting"):
        rig.participant.enter(stop=lambda: len(rig.slept) == 3)


def test_leases(rig: Rig) -> None:
    leased = job_pb2.DataRange(lease=5, epoch=1, start=32, stop=64)
    rig.jobs.leases = [
        job_pb2.LeaseReply(range=leased, order=1),
        job_pb2.LeaseReply(range=leased),
        job_pb2.LeaseReply(wait=True),
        job_pb2.LeaseReply(finished=True),
    ]
    assert rig.participant.lease() == Lease(5, DataRange(epoch=1, start=32, stop=64), order=1)
    assert rig.participant.lease() == Lease(5, DataRange(epoch=1, start=32, stop=64), order=0)
    assert rig.participant.lease(done=5) is NoRange.WAIT
    assert rig.participant.lease() is NoRange.FINISHED
    assert [request.done for request in rig.record.requests] == [0, 0, 5, 0]


def test_a_report_carries_everything_and_brings_the_end(rig: Rig) -> None:
    rig.jobs.stop = True
    timing = StepTiming(2, 1_000.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    report = Report(3, 4, 5, 6, 7, {"loss": 0.5}, {0: 3, 2: 1}, ("hello",), (timing,))
    assert rig.participant.report(report) is ReportAck.DONE
    [request] = rig.record.requests
    assert (request.step, request.accepted, request.rejected, request.dropped, request.samples) == (3, 4, 5, 6, 7)
    assert dict(request.values) == {"loss": 0.5}
    assert dict(request.staleness) == {0: 3, 2: 1}
    assert list(request.log) == ["hello"]
    assert [StepTiming.from_proto(each) for each in request.timings] == [timing]
    rig.participant.report(Report(4, 1))
    assert list(rig.record.requests[-1].timings) == [], "they are told once"


def test_an_error_keeps_its_first_line_and_its_end_however_long_it_is(rig: Rig) -> None:
    rig.participant.finish("the reason\n" + "é" * 50_000 + "the end")
    [request] = rig.record.requests
    assert len(request.error.encode()) < 33_000
    assert request.error.startswith("the reason\n")
    assert request.error.endswith("the end")


def test_an_error_of_halves_of_characters_is_sent_all_the_same(rig: Rig) -> None:
    rig.participant.finish("no \ud800 way")
    assert rig.record.requests[0].error == "no ? way"


def test_whatever_a_report_is_made_of_it_can_be_sent(rig: Rig) -> None:
    values: Any = {"x\ud800" + "é" * 300: 1.0, 7: 2.0, **{f"m{number}": 0.0 for number in range(300)}, "loss": 0.5}
    staleness = {0: 1, 1_021: 10**30, 1_022: 2, 1_023: 3, 1_024: 4, 10**6: 5}
    timings = tuple(StepTiming(step, 0.0) for step in [*range(200), 3])
    rig.participant.report(Report(samples=10**30, values=values, staleness=staleness, timings=timings))
    [request] = rig.record.requests
    report_of(request)
    assert request.samples == 2**53 - 1
    assert dict(request.staleness) == {0: 1, 1_021: 2**53 - 1, 1_022: 2, 1_023: 12}
    assert len(request.values) == 256
    assert (request.values["loss"], request.values["7"], request.values["m0"]) == (0.5, 2.0, 0.0)
    assert max(len(name.encode()) for name in request.values) <= 256
    assert [timing.step for timing in request.timings] == [*range(136, 200)]


def test_steps_out_of_range_leave_no_client(rig: Rig) -> None:
    rig.participant.report(Report(step=2**64 - 1, timings=(StepTiming(2**53, 0.0), StepTiming(5, 0.0))))
    [request] = rig.record.requests
    report_of(request)
    assert (request.step, [timing.step for timing in request.timings]) == (2**53 - 1, [5])
    placement = Placement.from_proto(rig.jobs.joins[0].placement)
    for step in (2**53, 2**64 - 1, 2**64, -1):
        with (
            ParameterClient(
                placement, worker="worker-1", incarnation=4, step=step, refresh=lambda: placement
            ) as client,
            pytest.raises(errors.BadRequest, match=f"step {step} of worker-1 .* the limit MAX_STEP is {2**53}"),
        ):
            client.pull()
    assert rig.record.of(pb.PullRequest) == []


def test_a_fenced_participant_hears_so(rig: Rig) -> None:
    rig.jobs.error = errors.Fenced("worker-1 was declared lost")
    for call in (rig.participant.lease, lambda: rig.participant.report(Report()), rig.participant.finish):
        with pytest.raises(errors.Fenced, match="declared lost"):
            call()


def test_report_without_a_coordinator_fails_at_once(rig: Rig) -> None:
    client = CoordinatorClient("127.0.0.1:1", retry_for_s=600)
    with pytest.raises(errors.Unreachable, match=r"127\.0\.0\.1:1"):
        Participant(client, "digits", "worker-1", 4).report(Report())
    client.close()


def test_reports_join_into_one() -> None:
    early = Report(2, 3, 1, 0, 30, {"loss": 1.0, "old": 5.0}, {0: 3}, ("a",))
    late = Report(5, 1, 0, 2, 10, {"loss": 2.0, "new": 6.0}, {0: 1, 4: 1}, ("b",))
    values, given = {"loss": 1.25, "old": 5.0, "new": 6.0}, {"loss": 4, "old": 3, "new": 1}
    assert early.merged_with(late) == Report(5, 4, 1, 2, 40, values, {0: 4, 4: 1}, ("a", "b"), given=given)
    assert Report().merged_with(late) == late
    assert early.merged_with(Report()) == early
