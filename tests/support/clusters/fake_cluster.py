"""Fake coordinator and parameter server on loopback, which give scripted answers and record requests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shoal import _rpc, errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout, Slice
from shoal._wire.placement import Placement, ShardPlacement
from shoal.job import Job
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, header_pb2, job_pb2, job_pb2_grpc, parameter_server_pb2_grpc
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable


class Record:
    """The requests of all threads of a server, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards requests
        self.requests: list[Any] = []

    def add(self, request: Any) -> None:
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def of(self, kind: type) -> list[Any]:
        with self._changed:
            return [request for request in self.requests if isinstance(request, kind)]

    def wait_for(self, kind: type, count: int = 1, timeout_s: float = 30.0) -> list[Any]:
        """Waits for a number of requests of one kind."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._count(kind) >= count, timeout_s), (
                f"{self._count(kind)} of {count} {kind.__name__} came"
            )
        return self.of(kind)

    def _count(self, kind: type) -> int:
        return sum(isinstance(request, kind) for request in self.requests)


class FakeMembers(coordinator_pb2_grpc.CoordinatorServicer):
    """Registers everybody, with a new incarnation each time, and answers heartbeats with `assignments[incarnation]`."""

    def __init__(self, record: Record, program: str) -> None:
        self.record, self.program, self.submitter, self.submitter_role = record, program, "", ""
        self.incarnation = 0
        self.assignments: dict[int, tuple[str, int]] = {}

    @_rpc.servicer
    def Register(self, request: Any, context: Any) -> Any:
        self.incarnation += 1
        self.record.add(request)
        return coordinator_pb2.RegisterReply(
            incarnation=self.incarnation, heartbeat_timeout_s=5.0, heartbeat_interval_s=0.05
        )

    @_rpc.servicer
    def Heartbeat(self, request: Any, context: Any) -> Any:
        self.record.add(request)
        job, assignment = self.assignments.get(request.incarnation, ("", 0))
        return coordinator_pb2.HeartbeatReply(
            job=job,
            assignment=assignment,
            program=self.program,
            submitter=self.submitter,
            submitter_role=self.submitter_role,
        )

    @_rpc.servicer
    def Leave(self, request: Any, context: Any) -> Any:
        self.record.add(request)
        return coordinator_pb2.LeaveReply()


class FakeJobs(job_pb2_grpc.JobsServicer):
    """One job. Join is answered with each of `joins` in turn, the last one repeatedly; so are leases."""

    def __init__(self, record: Record, job: Job) -> None:
        self.record, self.job = record, job
        self.assign_values = False
        self.joins: list[job_pb2.JoinReply] = []
        self.leases = [job_pb2.LeaseReply(finished=True)]
        self.error: errors.ShoalError | None = None
        self.refused: tuple[type, ...] = (object,)  # the requests that are answered with the error
        self.stop = False
        self.state: job_pb2.JobState.ValueType = job_pb2.FAILED  # what Get says; Join's answers have their own

    def _note(self, request: Any) -> None:
        self.record.add(request)
        if self.error and isinstance(request, self.refused):
            raise self.error

    @_rpc.servicer
    def Get(self, request: Any, context: Any) -> Any:
        self._note(request)
        status = job_pb2.JobStatus(spec=self.job.to_proto(), state=self.state, reason="no luck")
        return job_pb2.GetReply(status=status)

    @_rpc.servicer
    def Describe(self, request: Any, context: Any) -> Any:
        self._note(request)
        return job_pb2.DescribeReply()

    @_rpc.servicer
    def Join(self, request: Any, context: Any) -> Any:
        self._note(request)
        reply = self.joins.pop(0) if len(self.joins) > 1 else self.joins[0]
        reply.assign_values = self.assign_values and not request.assigned
        return reply

    @_rpc.servicer
    def Lease(self, request: Any, context: Any) -> Any:
        self._note(request)
        return self.leases.pop(0) if len(self.leases) > 1 else self.leases[0]

    @_rpc.servicer
    def Report(self, request: Any, context: Any) -> Any:
        self._note(request)
        return job_pb2.ReportReply(done=self.stop)

    @_rpc.servicer
    def Finish(self, request: Any, context: Any) -> Any:
        self._note(request)
        return job_pb2.FinishReply()


class FakeServer(parameter_server_pb2_grpc.ParameterServerServicer):
    """One shard with the variables w (two elements) and b (one element). No push changes it."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.values = np.array([7.0, 7.0, 9.0], np.float32)
        self.error: errors.ShoalError | None = None  # what pushes are answered

    @_rpc.servicer
    def Attach(self, request: Any, context: Any) -> Any:
        return pb.AttachReply()  # no lanes: all is called as below

    def Pull(self, request: Any, context: Any) -> Any:
        self.record.add(request)
        step = request.stamp.step + request.ahead
        yield pb.PullReply(headers=[header_pb2.ShardHeader(shard=0, generation=1, step=step)])
        if not request.headers_only:
            yield pb.PullReply(chunks=[pb.Chunk(shard=0, arena=0, offset=0, data=self.values.tobytes())])

    @_rpc.servicer
    def Push(self, requests: Any, context: Any) -> Any:
        messages = list(requests)
        for message in messages:
            self.record.add(message)
        if self.error:
            raise self.error
        header = messages[0].header
        return pb.PushReply(
            shards=[
                pb.ShardPush(
                    header=header_pb2.ShardHeader(shard=0, generation=1, step=header.stamp.step + 1),
                    outcome=pb.ACCEPTED if header.weight else pb.SKIPPED,
                )
            ]
        )

    @_rpc.servicer
    def Assign(self, requests: Any, context: Any) -> Any:
        messages = list(requests)
        for message in messages:
            self.record.add(message)
        self.values = np.frombuffer(b"".join(chunk.data for m in messages for chunk in m.chunks), np.float32)
        return pb.PushReply()


class FakeCluster:
    """All fake services behind one address.

    Attributes:
        record: all requests to them.
    """

    def __init__(self, job: Job) -> None:
        self.record = Record()
        # The stubs take RPCs that a fake leaves to gRPC's "unimplemented" for abstract methods.
        self.members = FakeMembers(self.record, job.program)  # type: ignore[abstract]
        self.jobs = FakeJobs(self.record, job)  # type: ignore[abstract]
        self.server = FakeServer(self.record)  # type: ignore[abstract]
        services: list[tuple[str, Callable[[Any, Any], None], Any]] = [
            ("shoal.v1.Coordinator", coordinator_pb2_grpc.add_CoordinatorServicer_to_server, self.members),
            ("shoal.v1.Jobs", job_pb2_grpc.add_JobsServicer_to_server, self.jobs),
            (
                "shoal.v1.ParameterServer",
                parameter_server_pb2_grpc.add_ParameterServerServicer_to_server,
                self.server,
            ),
        ]
        self._rpc = _rpc.RpcServer("127.0.0.1:0", services, threads=8)
        self.address = self._rpc.address
        self.jobs.joins = [self.joined(ready=True, state=job_pb2.RUNNING)]
        self._rpc.start()

    def joined(
        self,
        ready: bool,
        *,
        placed: bool = True,
        state: job_pb2.JobState.ValueType = job_pb2.STARTING,
        step: int = 0,
    ) -> job_pb2.JoinReply:
        """Returns an answer to Join."""
        placement = self.placement().to_proto() if placed else None
        spec = self.jobs.job.to_proto()
        return job_pb2.JoinReply(ready=ready, placement=placement, rank=1, step=step, spec=spec, state=state)

    def placement(self) -> Placement:
        """Returns a placement of one shard on this server."""
        slices = (Slice("w", 0, 2, 0), Slice("b", 0, 1, 2))
        arena = ArenaLayout(np.dtype(np.float32), Aggregation.TRAINABLE, slices, 3)
        shard = ShardPlacement(ShardLayout(0, (arena,)), "server-1", self.address)
        return Placement(self.jobs.job.name, 1, {"w": Variable(2), "b": Variable(1)}, (shard,))

    def stop(self) -> None:
        self._rpc.stop()


@contextmanager
def fake_cluster(job: Job) -> Iterator[tuple[FakeCluster, CoordinatorClient]]:
    """Yields a fake cluster that has one job, and a client of it."""
    cluster = FakeCluster(job)
    client = CoordinatorClient(cluster.address, retry_for_s=5.0)
    try:
        yield cluster, client
    finally:
        client.close()
        cluster.stop()
