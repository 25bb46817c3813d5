"""Servicers of the coordinator's two gRPC services. Each method decodes, checks, calls the coordinator and encodes."""

from functools import partial

import grpc
import structlog

from shoal import _rpc, errors
from shoal._checkpoint import CheckpointStorage
from shoal._limits import catalogue
from shoal._wire import Cursor, ReportAck
from shoal.optim import Schedule
from shoal.status import ClusterStatus, Evaluation, ServerLoad
from shoal.v1 import coordinator_pb2 as members_pb
from shoal.v1 import coordinator_pb2_grpc, job_pb2_grpc
from shoal.v1 import job_pb2 as pb
from shoal_coordinator.access import Access, revocations_of
from shoal_coordinator.api import checks, codecs
from shoal_coordinator.api.attendance import AttendHandler
from shoal_coordinator.api.callers import registration_of
from shoal_coordinator.api.entry import Descriptions, JoinHandler, Placements
from shoal_coordinator.api.reports import report_of
from shoal_coordinator.api.submission import SubmitHandler
from shoal_coordinator.api.tokens import check_member_role, for_itself, of_its_job
from shoal_coordinator.api.watching import HasEnded, WatchHandler
from shoal_coordinator.cluster import JobLimits, interval_told_s, job_before, member_after, most_ended, page_size
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.decision import Check
from shoal_coordinator.member_holders import speaks_for
from shoal_coordinator.messages import DrainOrder, events

_log = structlog.get_logger(__name__)

# The default number of steps of each worker in a reply.
TIMINGS = 64
# Limits of a request. `shoal._wire.limits` has those of a report.
MAX_ERROR_CHARACTERS = 64 << 10


class CoordinatorService(coordinator_pb2_grpc.CoordinatorServicer):
    """The membership service.

    Args:
        coordinator: The shell.
        heartbeat_timeout_s: Seconds, sent to members.
        access: The cluster's tokens. None means that the cluster asks for none.
    """

    def __init__(self, coordinator: Coordinator, *, heartbeat_timeout_s: float, access: Access | None = None) -> None:
        self._coordinator, self._timeout_s, self._access = coordinator, heartbeat_timeout_s, access
        self._attending = AttendHandler(coordinator)

    def stop(self) -> None:
        """Answers the calls that stay open."""
        self._attending.stop()

    @property
    def Attend(self) -> _rpc.Deferred:
        """Stays open as long as a session lives, without a thread."""
        return self._attending.handler

    @_rpc.servicer
    def Register(self, request: members_pb.RegisterRequest, _: grpc.ServicerContext) -> members_pb.RegisterReply:
        checks.check_registration(request)
        check_member_role(request)
        member = self._coordinator.handle(events.RegistrationReceived(registration_of(request)))
        _log.info("registered", member=request.member, incarnation=member.incarnation, address=request.address)
        interval_s, revoked = self._coordinator.heartbeat_interval_s, revocations_of(self._access)
        return members_pb.RegisterReply(
            incarnation=member.incarnation,
            heartbeat_timeout_s=self._timeout_s,
            heartbeat_interval_s=interval_told_s(interval_s, server=request.role == members_pb.SERVER),
            token_key=self._access.public_key if self._access else b"",
            revoked_tokens=revoked.tokens,
            revoked_revision=revoked.revision,
            secret=self._access.members.of(request.member, member.incarnation) if self._access else "",
        )

    @_rpc.servicer
    def Heartbeat(self, request: members_pb.HeartbeatRequest, _: grpc.ServicerContext) -> members_pb.HeartbeatReply:
        load = ServerLoad.from_proto(request.load) if request.HasField("load") else None
        if load:
            checks.check_load(load)
        heartbeat = events.HeartbeatReceived(request.member, request.incarnation, request.shards, request.bytes, load)
        result = self._coordinator.handle(heartbeat, speaks_for(_rpc.caller(), request.member, request.incarnation))
        interval_s = interval_told_s(self._coordinator.heartbeat_interval_s, server=load is not None)
        return codecs.heartbeat_message(result, interval_s, revocations_of(self._access), request.revoked_revision)

    @_rpc.servicer
    def Leave(self, request: members_pb.LeaveRequest, _: grpc.ServicerContext) -> members_pb.LeaveReply:
        cursor = Cursor.from_proto(request.cursor) if request.HasField("cursor") else None
        left = events.MemberLeft(request.member, request.incarnation, cursor)
        self._coordinator.handle(left, speaks_for(_rpc.caller(), request.member, request.incarnation))
        return members_pb.LeaveReply()

    @_rpc.servicer
    def Drain(self, request: members_pb.DrainRequest, _: grpc.ServicerContext) -> members_pb.DrainReply:
        left_s = request.left_s if request.HasField("left_s") else None
        drain = events.DrainRequested(request.member, request.incarnation, left_s)
        jobs = self._coordinator.handle(drain, speaks_for(_rpc.caller(), request.member, request.incarnation))
        return members_pb.DrainReply(jobs=jobs)

    @_rpc.servicer
    def DrainServer(
        self, request: members_pb.DrainServerRequest, _: grpc.ServicerContext
    ) -> members_pb.DrainServerReply:
        order = DrainOrder(stay=request.stay, force=request.force)
        self._coordinator.handle(events.DrainOrdered(request.member, order, request.incarnation))
        with self._coordinator.reading() as (cluster, now):
            found = cluster.find_member(request.member)
            [server] = cluster.listing.statuses([found] if found else [], now)
        return members_pb.DrainServerReply(server=codecs.member_message(server))

    @_rpc.servicer
    def GetStatus(self, request: members_pb.GetStatusRequest, _: grpc.ServicerContext) -> members_pb.GetStatusReply:
        count, after = page_size(request.page_size), member_after(request.page_token)
        with self._coordinator.reading() as (cluster, now):
            found = cluster.listing.members(now, count + 1, after)  # one more tells whether there is a next page
            name, interval_s = cluster.counts.cluster, cluster.members.heartbeat_interval_s
            status = ClusterStatus(name, cluster.generation, tuple(found), interval_s)
        return codecs.cluster_message(status, count)


class JobsService(job_pb2_grpc.JobsServicer):
    """The service of jobs, for users and for workers.

    Args:
        coordinator: The shell.
        storage: The checkpoint storage. None means that the cluster has none.
        max_watchers: Concurrent calls of Watch. Their threads are separate, so they never delay a heartbeat.
        limits: The limits of jobs.
        has_ended: Returns whether the token of a caller was revoked or has expired. The caller's streams then end.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        storage: CheckpointStorage | None = None,
        *,
        max_watchers: int = catalogue.WATCHERS.default,
        limits: JobLimits = JobLimits(),  # noqa: B008 - it is immutable
        has_ended: HasEnded = lambda _: False,
    ) -> None:
        self._coordinator = coordinator
        self._submitting = SubmitHandler(coordinator, storage)
        self._watching = WatchHandler(coordinator, max_watchers, has_ended)
        self._descriptions, self._placements = Descriptions(limits), Placements()
        self._joining = JoinHandler(coordinator, self._placements)

    def close(self) -> None:
        """Waits for the threads. Call it after the coordinator and the server have stopped."""
        self._submitting.close()
        self._watching.experimental_thread_pool.shutdown(wait=True)

    def end_refused(self) -> None:
        """Ends watches of callers whose tokens have ended, and who do not read. Call it about once a second."""
        self._watching.end_refused()

    @property
    def watchers(self) -> int:
        """The number of open calls of Watch."""
        return self._watching.open

    @property
    def Watch(self) -> WatchHandler:
        """Streams a job's events."""
        return self._watching

    @property
    def Submit(self) -> _rpc.Pooled:
        """Submits a job."""
        return self._submitting.handler

    @property
    def Join(self) -> _rpc.Deferred:
        """Lets a worker enter a job, and waits for that without a thread."""
        return self._joining.handler

    @_rpc.servicer
    def List(self, request: pb.ListRequest, _: grpc.ServicerContext) -> pb.ListReply:
        count, before = page_size(request.page_size), job_before(request.page_token)
        ended = most_ended(request.ended) if request.HasField("ended") else None
        found = self._coordinator.list_jobs(count + 1, before, ended)  # one more tells whether there is a next page
        return codecs.jobs_message(found, count)

    @_rpc.servicer
    @of_its_job
    def Get(self, request: pb.GetRequest, _: grpc.ServicerContext) -> pb.GetReply:
        with self._coordinator.reading() as (cluster, now):
            status = cluster.job(request.job).status(now)
        return pb.GetReply(status=codecs.job_message(status))

    @_rpc.servicer
    @for_itself
    def Cancel(self, request: pb.CancelRequest, check: Check) -> pb.CancelReply:
        job, reason = request.job, request.reason
        event = (
            events.JobAbandoned(job, request.session, reason) if request.session else events.JobCancelled(job, reason)
        )
        status = self._coordinator.handle(event, check)
        return pb.CancelReply(status=codecs.job_message(status))

    @_rpc.servicer
    @for_itself
    def TakeCheckpoint(self, request: pb.TakeCheckpointRequest, check: Check) -> pb.TakeCheckpointReply:
        attempt = self._coordinator.handle(events.CheckpointRequested(request.job), check)
        return pb.TakeCheckpointReply(attempt=attempt.number, after=attempt.after)

    @_rpc.servicer
    @for_itself
    def SetLearningRate(self, request: pb.SetLearningRateRequest, check: Check) -> pb.SetLearningRateReply:
        self._coordinator.handle(
            events.LearningRateRequested(request.job, Schedule.from_proto(request.learning_rate)), check
        )
        return pb.SetLearningRateReply()

    @_rpc.servicer
    @for_itself
    def Drop(self, request: pb.DropRequest, check: Check) -> pb.DropReply:
        self._coordinator.handle(events.JobDropped(request.job), check)
        return pb.DropReply()

    @_rpc.encoded
    @_rpc.servicer
    @of_its_job
    def GetPlacement(self, request: pb.GetPlacementRequest, _: grpc.ServicerContext) -> bytes:
        with self._coordinator.reading() as (cluster, _now):
            placement = cluster.job(request.job).placed
        if request.known_generation == placement.generation:
            return placement.encoded_servers
        return self._placements.encode(placement)

    @_rpc.servicer
    def GetData(self, request: pb.GetDataRequest, _: grpc.ServicerContext) -> pb.GetDataReply:
        with self._coordinator.reading() as (cluster, _now):
            account = cluster.job(request.job).data()
        return codecs.data_message(account)

    @_rpc.servicer
    def GetTimings(self, request: pb.GetTimingsRequest, _: grpc.ServicerContext) -> pb.GetTimingsReply:
        with self._coordinator.reading() as (cluster, _now):
            timings = cluster.job(request.job).timings()
        return codecs.timings_message(timings.latest(request.last or TIMINGS))

    @_rpc.servicer
    @for_itself
    def Describe(self, request: pb.DescribeRequest, check: Check) -> pb.DescribeReply:
        _check_samples(request.job, request.samples)
        description = self._descriptions.decode(request)
        self._descriptions.plan(description, partial(self._coordinator.plan_shards, request.job))
        result = self._coordinator.handle(
            events.JobDescribed(request.job, request.worker, request.incarnation, description, request.assignment),
            check,
        )
        if result.conflict:
            raise errors.InvalidJob(f"job {request.job} failed: {result.conflict}", job=request.job)
        return pb.DescribeReply()

    @_rpc.servicer
    @for_itself
    def Lease(self, request: pb.LeaseRequest, check: Check) -> pb.LeaseReply:
        _check_samples(request.job, request.samples)
        answer = self._coordinator.handle(
            events.LeaseRequested(
                request.job, request.worker, request.incarnation, request.done, request.assignment, request.samples
            ),
            check,
        )
        return codecs.lease_message(answer)

    @_rpc.servicer
    @for_itself
    def ClaimEvaluation(self, request: pb.ClaimEvaluationRequest, check: Check) -> pb.ClaimEvaluationReply:
        checks.check_step(f"the evaluation that {request.worker} claims on job {request.job}", request.step)
        claim = self._coordinator.handle(
            events.EvaluationClaimed(
                request.job,
                request.worker,
                request.incarnation,
                request.step,
                request.finished_training,
                request.assignment,
            ),
            check,
        )
        return pb.ClaimEvaluationReply(number=claim.number, stop=claim.stop)

    @_rpc.servicer
    @for_itself
    def ReportEvaluation(self, request: pb.ReportEvaluationRequest, check: Check) -> pb.ReportEvaluationReply:
        checks.check_evaluation(request)
        result = Evaluation.from_proto(request.result)
        ack = self._coordinator.handle(
            events.EvaluationReported(request.job, request.worker, request.incarnation, result, request.assignment),
            check,
        )
        return pb.ReportEvaluationReply(wait=ack.wait, stop=ack.stop)

    @_rpc.servicer
    @for_itself
    def Report(self, request: pb.ReportRequest, check: Check) -> pb.ReportReply:
        ack = self._coordinator.handle(report_of(request), check)
        ended = None
        if ack is ReportAck.DONE:
            with self._coordinator.reading() as (cluster, now):
                ended = codecs.end_message(cluster.job(request.job), now)
        return codecs.report_reply(ack, self._coordinator.heartbeat_interval_s, ended)

    @_rpc.servicer
    @for_itself
    def Finish(self, request: pb.FinishRequest, check: Check) -> pb.FinishReply:
        # The end of a traceback is its most useful part.
        error = request.error[-MAX_ERROR_CHARACTERS:]
        self._coordinator.handle(
            events.WorkerFinished(
                request.job,
                request.worker,
                request.incarnation,
                error,
                request.assignment,
                shards_lost=request.shards_lost,
                trainer_failed=request.trainer_failed,
                others_go_on=request.others_go_on,
                cursor=Cursor(request.lease, request.consumed) if request.lease else None,
            ),
            check,
        )
        return pb.FinishReply()


def _check_samples(job: str, samples: int) -> None:
    if samples > catalogue.MAX_SAMPLES.default:
        raise catalogue.MAX_SAMPLES.refusal(f"an epoch of job {job} has {samples} samples")
