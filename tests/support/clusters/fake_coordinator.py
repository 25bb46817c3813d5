"""Fake coordinator on real gRPC, whose jobs, events and members are plain attributes."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from shoal import _rpc, errors
from shoal.job import Job
from shoal.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    group_pb2_grpc,
    job_pb2,
    job_pb2_grpc,
    tensor_pb2,
    token_pb2,
    token_pb2_grpc,
)
from shoal_coordinator.api.groups import GroupsService
from shoal_coordinator.groups import GroupRegistry


class FakeCoordinator(
    coordinator_pb2_grpc.CoordinatorServicer, job_pb2_grpc.JobsServicer, token_pb2_grpc.TokensServicer
):
    """Fake coordinator: `start` or `with` starts it. `stop` and then `start` restarts it with its port and state.

    Attributes:
        jobs: the jobs, by name.
        placement: the placement of every job; None: not placed.
        members: the number of incarnations of each registered member, by id.
        beats: the heartbeats that it received.
        interval_s: the heartbeat interval that replies to reports state; 0: they state none.
        fenced: ids of members whose next heartbeat is refused.
        drains: answers to the next calls of Drain: names of jobs, or an error. Later calls are told to wait for no job.
        drained: the members that called Drain.
        left_s: how long each of them would still wait, as it told.
        beat: the reply to each heartbeat.
        orders: the requests of all DrainServer calls, which get the first member of `status` as their answer.
        statuses: answers to the next calls of GetStatus; `status` is the answer to later ones.
        breaks: for each of the next Watch calls, the number of events after which it breaks. Later calls do not break.
        watched: the requests of all Watch calls.
        described, finished, reports, cancelled: what members sent.
        over, ended: what replies to reports say: whether the job is over for the worker, and how it has ended.
        data: the data account of every job.
        timings: the step timings of every job.
        groups: the elastic groups.
        timings_asked: for each request of timings, the number of steps that it asked for.
        stored: names of the jobs that have checkpoints; None: any job has.
        disk: the error of the disk of checkpoints; empty: none.
        disk_hangs: whether attempts at checkpoints never end.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, job_pb2.JobStatus] = {}
        self.placement: tensor_pb2.Placement | None = None
        self.status = coordinator_pb2.GetStatusReply(cluster="reef", generation=7)
        self.members: dict[str, int] = {}
        self.beats = 0
        self.interval_s = 0.0
        self.fenced: set[str] = set()
        self.drains: list[list[str] | errors.ShoalError] = []
        self.holds_names: Callable[[], bool] = lambda: False  # whether Register refuses all names
        self.drained: list[tuple[str, int]] = []
        self.left_s: list[float] = []
        self.beat = coordinator_pb2.HeartbeatReply()
        self.orders: list[coordinator_pb2.DrainServerRequest] = []
        self.statuses: list[coordinator_pb2.GetStatusReply] = []
        self.breaks: list[int] = []
        self.watched: list[job_pb2.WatchRequest] = []
        self.described: list[job_pb2.DescribeRequest] = []
        self.refusal: errors.ShoalError | None = None  # the answer to each description, if set
        self.refusals: list[errors.ShoalError] = []  # answers to the next submissions
        self.cancelled: list[job_pb2.CancelRequest] = []
        self.finished: list[job_pb2.FinishRequest] = []
        self.reports: list[job_pb2.ReportRequest] = []
        self.over, self.ended = False, job_pb2.JobStatus()
        self.data = job_pb2.GetDataReply()
        self.timings = job_pb2.GetTimingsReply()
        self.groups = GroupRegistry()
        self.timings_asked: list[job_pb2.GetTimingsRequest] = []
        self.stored: set[str] | None = None
        self.disk = ""
        self.learning_rates: list[job_pb2.Schedule] = []
        self.tokens: list[token_pb2.Token] = []
        self.disk_hangs = False
        self._events: dict[str, list[job_pb2.Event]] = {}
        self._changed = threading.Condition()  # guards _events and _stopping
        self._stopping = False
        self._server: _rpc.RpcServer | None = None
        self.address = "127.0.0.1:0"

    def start(self) -> None:
        services: list[tuple[str, Callable[[Any, Any], None], Any]] = [
            ("shoal.v1.Coordinator", coordinator_pb2_grpc.add_CoordinatorServicer_to_server, self),
            ("shoal.v1.Groups", group_pb2_grpc.add_GroupsServicer_to_server, GroupsService(self.groups)),
            ("shoal.v1.Jobs", job_pb2_grpc.add_JobsServicer_to_server, self),
            ("shoal.v1.Tokens", token_pb2_grpc.add_TokensServicer_to_server, self),
        ]
        self._stopping = False
        self._server = _rpc.RpcServer(self.address, services, threads=8)
        self.address = self._server.address
        self._server.start()

    def GetLoginLink(self, _request: object, _context: object) -> token_pb2.GetLoginLinkReply:
        return token_pb2.GetLoginLinkReply()

    def GetTicket(self, _request: object, _context: object) -> token_pb2.GetTicketReply:
        return token_pb2.GetTicketReply()  # this cluster asks for no tokens

    def CreateToken(self, _request: object, _context: object) -> token_pb2.CreateTokenReply:
        raise AssertionError("this cluster asks for no tokens")

    def RevokeToken(self, request: token_pb2.RevokeTokenRequest, _context: object) -> token_pb2.RevokeTokenReply:
        return token_pb2.RevokeTokenReply(tokens=[token_pb2.Token(id=request.token, revoked=True)])

    def ListTokens(self, _request: object, _context: object) -> token_pb2.ListTokensReply:
        return token_pb2.ListTokensReply(tokens=self.tokens)

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._server:
            self._server.stop(0.1)
            self._server = None

    def __enter__(self) -> "FakeCoordinator":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def add(self, job: Job, state: str = "RUNNING", **fields: Any) -> None:
        """Adds a job as if it had been submitted."""
        self.jobs[job.name] = job_pb2.JobStatus(
            spec=job.to_proto(), state=job_pb2.JobState.Value(state), submitted_at=1.0, started_at=2.0, **fields
        )

    def emit(self, job: str, **kind: Any) -> None:
        """Adds an event: state=, metrics=, log=, checkpoint= or evaluation=. A state becomes the job's."""
        with self._changed:
            events = self._events.setdefault(job, [])
            event = job_pb2.Event(sequence=len(events) + 1, time=10.0, **kind)
            events.append(event)
            if event.HasField("state"):
                self.jobs[job].state = event.state.state
                self.jobs[job].reason = event.state.reason
                self.jobs[job].finished_at = 12.0
            self._changed.notify_all()

    def log(self, job: str, text: str) -> None:
        self.emit(job, log=job_pb2.LogLine(worker="worker-0", text=text))

    def enter(self, job: str, state: str, reason: str = "") -> None:
        """Brings a job into a state."""
        self.emit(job, state=job_pb2.StateChange(state=job_pb2.JobState.Value(state), reason=reason))

    # Coordinator.

    @_rpc.servicer
    def Register(self, request: Any, context: Any) -> Any:
        if self.holds_names():
            raise errors.DuplicateMember(f"{request.member} is alive", retry_in_s=0.01)
        self.members[request.member] = self.members.get(request.member, 0) + 1
        return coordinator_pb2.RegisterReply(
            incarnation=self.members[request.member], heartbeat_timeout_s=1.0, heartbeat_interval_s=0.02
        )

    @_rpc.servicer
    def Heartbeat(self, request: Any, context: Any) -> Any:
        self.beats += 1
        if request.member in self.fenced:
            self.fenced.discard(request.member)
            raise errors.Fenced(f"{request.member} is dead")
        return self.beat

    @property
    def Attend(self) -> _rpc.Deferred:
        return _rpc.Deferred(lambda _request, _context: b"", lambda _request, go_on: go_on)

    @_rpc.servicer
    def Leave(self, request: Any, context: Any) -> Any:
        self.members.pop(request.member, None)
        return coordinator_pb2.LeaveReply()

    @_rpc.servicer
    def Drain(self, request: Any, context: Any) -> Any:
        self.drained.append((request.member, request.incarnation))
        self.left_s.append(request.left_s)
        answer = self.drains.pop(0) if self.drains else []
        if isinstance(answer, errors.ShoalError):
            raise answer
        return coordinator_pb2.DrainReply(jobs=answer)

    @_rpc.servicer
    def DrainServer(self, request: Any, context: Any) -> Any:
        self.orders.append(request)
        return coordinator_pb2.DrainServerReply(server=self.status.members[0])

    @_rpc.servicer
    def GetStatus(self, request: Any, context: Any) -> Any:
        return self.statuses.pop(0) if self.statuses else self.status

    # Jobs, for users.

    @_rpc.servicer
    def Submit(self, request: Any, context: Any) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        name, source = request.spec.name, request.spec.restore.job
        if source and self.stored is not None and source not in self.stored:
            raise errors.UnknownCheckpoint(f"there is no checkpoint {source}", checkpoint=source)
        if name in self.jobs and self.jobs[name].state < job_pb2.SUCCEEDED:
            raise errors.JobExists(f"job {name} is running", job=name)
        self.add(Job.from_proto(request.spec), "PENDING")
        return job_pb2.SubmitReply(status=self.jobs[name])

    @_rpc.servicer
    def List(self, request: Any, context: Any) -> Any:
        live = [job for job in self.jobs.values() if job.state < job_pb2.SUCCEEDED]
        ended = [job for job in self.jobs.values() if job.state >= job_pb2.SUCCEEDED]
        return job_pb2.ListReply(jobs=live + ended[: request.ended if request.HasField("ended") else None])

    @_rpc.servicer
    def Get(self, request: Any, context: Any) -> Any:
        return job_pb2.GetReply(status=self._job(request.job))

    @_rpc.servicer
    def SetLearningRate(self, request: Any, context: Any) -> Any:
        self._job(request.job)
        self.learning_rates.append(request.learning_rate)
        return job_pb2.SetLearningRateReply()

    @_rpc.servicer
    def TakeCheckpoint(self, request: Any, context: Any) -> Any:
        """The first attempt fails with the test's error, if any. Otherwise the checkpoint is complete at once."""
        self._job(request.job)
        after = len(self._events.get(request.job, []))
        end = job_pb2.CheckpointEnd(attempt=1, seconds=0.5, failure=self.disk)
        if not self.disk:
            end.saved.CopyFrom(job_pb2.Checkpoint(number=3, step=70, bytes=4096, time=9.0))
        if not self.disk_hangs:
            self.emit(request.job, checkpoint=end)
        return job_pb2.TakeCheckpointReply(attempt=1, after=after)

    @_rpc.servicer
    def Cancel(self, request: Any, context: Any) -> Any:
        self.cancelled.append(request)
        if self._job(request.job).state < job_pb2.SUCCEEDED:
            self.enter(request.job, "CANCELLED", request.reason)
        return job_pb2.CancelReply(status=self.jobs[request.job])

    @_rpc.servicer
    def Drop(self, request: Any, context: Any) -> Any:
        if self._job(request.job).state < job_pb2.SUCCEEDED:
            raise errors.JobRunning(f"job {request.job} runs; cancel it first", job=request.job)
        del self.jobs[request.job]
        return job_pb2.DropReply()

    @_rpc.servicer
    def GetPlacement(self, request: Any, context: Any) -> Any:
        self._job(request.job)
        if self.placement is None:
            raise errors.NotPlaced(f"job {request.job} has no variables on servers yet", job=request.job)
        return self.placement

    @_rpc.servicer
    def GetData(self, request: Any, context: Any) -> Any:
        self._job(request.job)
        return self.data

    @_rpc.servicer
    def GetTimings(self, request: Any, context: Any) -> Any:
        self._job(request.job)
        self.timings_asked.append(request.last)
        return self.timings

    def Watch(self, request: Any, context: grpc.ServicerContext) -> Iterator[job_pb2.Event]:
        self.watched.append(request)
        left = self.breaks.pop(0) if self.breaks else None
        try:
            self._job(request.job)
        except errors.ShoalError as error:
            _rpc.refuse(context, error)
            return
        sequence = request.after
        while context.is_active():
            with self._changed:
                new = self._events.get(request.job, [])[sequence:]
                if not new and left is None:
                    if request.no_wait or self._stopping or self.jobs[request.job].state >= job_pb2.SUCCEEDED:
                        return
                    self._changed.wait(0.05)
            if left is not None:
                yield from new[:left]
                context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
            yield from new
            sequence += len(new)

    # Jobs, for members.

    @_rpc.servicer
    def Describe(self, request: Any, context: Any) -> Any:
        self.described.append(request)
        if self.refusal:
            raise self.refusal
        return job_pb2.DescribeReply()

    @_rpc.servicer
    def Join(self, request: Any, context: Any) -> Any:
        job = self._job(request.job)
        return job_pb2.JoinReply(ready=True, placement=self.placement, spec=job.spec, state=job.state)

    def Lease(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("no job of it has data")

    def ClaimEvaluation(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("no job of it evaluates")

    def ReportEvaluation(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("no job of it evaluates")

    @_rpc.servicer
    def Report(self, request: Any, context: Any) -> Any:
        self.reports.append(request)
        return job_pb2.ReportReply(done=self.over, ended=self.ended, heartbeat_interval_s=self.interval_s)

    @_rpc.servicer
    def Finish(self, request: Any, context: Any) -> Any:
        self.finished.append(request)
        return job_pb2.FinishReply()

    def _job(self, name: str) -> job_pb2.JobStatus:
        if name not in self.jobs:
            raise errors.UnknownJob(f"there is no job {name!r}", job=name)
        return self.jobs[name]
