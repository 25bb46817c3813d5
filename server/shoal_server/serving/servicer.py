"""RPC servicer of the parameter server: decodes each request, carries it out, and encodes the reply."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import grpc

from shoal import _rpc, errors, optim
from shoal._limits import catalogue
from shoal._wire import ShardLayout, check_address, check_text
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from shoal_server.checkpoints import CheckpointWriter, cut_session
from shoal_server.replication import Copies, Splits
from shoal_server.serving.endpoint import Endpoint
from shoal_server.serving.pending_reply import PendingReply
from shoal_server.serving.service import DataService
from shoal_server.shards import JobShardConfig, LockGroup, ShardStore

SERVICE = "shoal.v1.ParameterServer"
# Workers in one call of AdmitWorkers, FenceWorkers or ReleaseWorkers.
MAX_WORKERS = catalogue.CALL_WORKERS.default

# The calls that have threads of their own, by kind, so that no other call delays them. A cut can wait for norms. The
# allocation of shards takes seconds, and calls that let workers in and out must not wait for it: a job whose calls are
# not answered restarts. A split waits for the end of a step.
_THREADS = {
    "ShareNorm": "norm",
    "CreateShards": "creation",
    "AdmitWorkers": "workers",
    "FenceWorkers": "workers",
    "ReleaseWorkers": "workers",
    "AddBackup": "copies",
    "DropBackup": "copies",
    "DropCopy": "copies",
    "Promote": "copies",
    "SplitGroup": "splits",
}

R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W", pb.WorkerAdmission, pb.WorkerFence, pb.WorkerRelease)
# A reply, or one that waits for the backups.
_Reply: TypeAlias = R | PendingReply[R]


class ParameterServerServicer:
    """Translates between the protobuf contract and a `ShardStore`.

    The transports' server halves answer Pull, Push, Assign and Commit.

    Args:
        store: the shards.
        endpoints: the transports' server halves.
        writer: writes checkpoints; None means that this server has no checkpoint storage.
        service: receives the norms of other servers, and has the backups.
        copies: the backups of this server's groups on other servers.
        threads: answer the kinds of calls `norm`, `creation`, `workers`, `copies` and `splits`. A kind without threads
            of its own uses those of all other calls.
    """

    def __init__(
        self,
        store: ShardStore,
        endpoints: Endpoint,
        *,
        service: DataService,
        copies: Copies,
        threads: Mapping[str, ThreadPoolExecutor],
        writer: CheckpointWriter | None = None,
    ) -> None:
        self._store, self._endpoints, self._service, self._copies = store, endpoints, service, copies
        self._splits = Splits(store, copies)
        self._writer = writer or CheckpointWriter(None)
        # A storage that hangs must not take the threads of other calls.
        self.Restore = _rpc.Pooled(self._restore, self._writer.restore_threads)
        for method, kind in _THREADS.items():
            if kind in threads:
                setattr(self, method, _rpc.Pooled(getattr(self, method), threads[kind]))
        for method, handler in endpoints.handlers().items():
            setattr(self, method, handler)

    @_rpc.servicer
    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        offer = pb.AttachReply()
        self._endpoints.contribute(offer)
        return offer

    @_rpc.servicer
    def CreateShards(self, request: pb.CreateShardsRequest, context: grpc.ServicerContext) -> pb.CreateShardsReply:
        check_text("the name of the job", request.job)
        if not context.is_active():  # it waited for earlier calls, and its caller has abandoned it
            raise errors.Cancelled(f"the caller does not wait for the shards of {request.job} any more")
        config = JobShardConfig.from_proto(request)
        held = self._store.create(config, [ShardLayout.from_proto(it, config.variables) for it in request.shards])
        return pb.CreateShardsReply(bytes=held)

    @_rpc.servicer
    def DropShards(self, request: pb.DropShardsRequest, context: grpc.ServicerContext) -> pb.DropShardsReply:
        _check_awaited(request.job, context)
        self._store.drop(request.job)
        self._copies.forget(request.job)
        self._writer.drop(request.job)
        return pb.DropShardsReply()

    @_rpc.servicer
    def AdmitWorkers(
        self, request: pb.AdmitWorkersRequest, context: grpc.ServicerContext
    ) -> _Reply[pb.AdmitWorkersReply]:
        _check_awaited(request.job, context)
        workers = _bounded(request.workers)
        return self._on_groups(
            request.job,
            lambda groups: [_admitted(groups, worker) for worker in workers],
            lambda results: pb.AdmitWorkersReply(results=results),
        )

    @_rpc.servicer
    def FenceWorkers(
        self, request: pb.FenceWorkersRequest, context: grpc.ServicerContext
    ) -> _Reply[pb.FenceWorkersReply]:
        _check_awaited(request.job, context)
        workers = _bounded(request.workers)
        return self._on_groups(
            request.job,
            lambda groups: [max(group.fence(it.worker, it.incarnation) for group in groups) for it in workers],
            lambda committed: pb.FenceWorkersReply(committed_steps=committed),
        )

    @_rpc.servicer
    def ReleaseWorkers(
        self, request: pb.ReleaseWorkersRequest, context: grpc.ServicerContext
    ) -> _Reply[pb.ReleaseWorkersReply]:
        _check_awaited(request.job, context)
        workers = _bounded(request.workers)

        def release_all(groups: Sequence[LockGroup]) -> None:
            for it in workers:
                for group in groups:
                    group.release(it.worker, it.incarnation, it.committed_steps)

        return self._on_groups(request.job, release_all, lambda _: pb.ReleaseWorkersReply())

    @_rpc.servicer
    def AddBackup(self, request: pb.AddBackupRequest, context: grpc.ServicerContext) -> pb.AddBackupReply:
        _check_awaited(request.job, context)
        check_text("the name of a server", request.backup.server)
        check_address("the address of a server", request.backup.address)
        return self._copies.add(request)

    @_rpc.servicer
    def DropBackup(self, request: pb.DropBackupRequest, context: grpc.ServicerContext) -> pb.DropBackupReply:
        _check_awaited(request.job, context)
        self._copies.drop(request)
        return pb.DropBackupReply()

    @_rpc.servicer
    def DropCopy(self, request: pb.DropCopyRequest, context: grpc.ServicerContext) -> pb.DropCopyReply:
        self._copies.drop_copy(request)
        return pb.DropCopyReply()

    @_rpc.servicer
    def Promote(self, request: pb.PromoteRequest, context: grpc.ServicerContext) -> pb.PromoteReply:
        _check_awaited(request.job, context)
        return pb.PromoteReply(version=self._service.backups.promote(request))

    @_rpc.servicer
    def SplitGroup(self, request: pb.SplitGroupRequest, context: grpc.ServicerContext) -> pb.SplitGroupReply:
        _check_awaited(request.job, context)
        self._splits.split(request, context.is_active)
        return pb.SplitGroupReply()

    @_rpc.servicer
    def SetRate(self, request: pb.SetRateRequest, context: grpc.ServicerContext) -> _Reply[pb.SetRateReply]:
        learning_rate = optim.Schedule.from_proto(request.learning_rate)

        def set_all(groups: Sequence[LockGroup]) -> None:
            for group in groups:
                group.set_learning_rate(learning_rate)

        return self._on_groups(request.job, set_all, lambda _: pb.SetRateReply())

    @_rpc.servicer
    def ShareNorm(self, request: pb.ShareNormRequest, context: grpc.ServicerContext) -> _Reply[pb.ShareNormReply]:
        return self._service.waits.reply(self._service.share_norm(request), pb.ShareNormReply)

    @_rpc.servicer
    def HoldCommits(self, request: pb.HoldCommitsRequest, context: grpc.ServicerContext) -> _Reply[pb.HoldCommitsReply]:
        cut_session.check_storage(self._writer)
        return self._on_groups(
            request.job,
            lambda groups: cut_session.hold(groups, request.cut),
            cut_session.progress_reply,
            request.generation,
        )

    @_rpc.servicer
    def ResumeCommits(self, request: pb.ResumeCommitsRequest, context: grpc.ServicerContext) -> pb.ResumeCommitsReply:
        cut_session.resume_commits(self._store, request)
        return pb.ResumeCommitsReply()

    @_rpc.servicer
    def Save(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> pb.SaveReply:
        return cut_session.save(self._store, self._writer, request)

    @_rpc.servicer
    def CollectFiles(self, request: pb.CollectFilesRequest, context: grpc.ServicerContext) -> pb.CollectFilesReply:
        return cut_session.collect(self._store, self._writer, request)

    def _on_groups(
        self,
        job: str,
        call: Callable[[list[LockGroup]], T],
        reply: Callable[[T], R],
        generation: int | None = None,
    ) -> _Reply[R]:
        """Makes a call on all lock groups of a job here, and returns its reply, which may wait for the backups.

        Args:
            job, call, generation: as for `HostedGroups.on_groups`.
            reply: returns the reply, given the result of the call.
        """

        def made(groups: list[LockGroup]) -> _Reply[R]:
            def again(error: errors.Moved) -> _Reply[R]:
                if self._store.hosted.groups_of(job, generation) == groups:
                    raise error
                return self._on_groups(job, call, reply, generation)

            result = call(groups)
            return self._service.waits.reply(groups, lambda: reply(result), again)

        return self._store.hosted.on_groups(job, made, generation)

    @_rpc.servicer
    def _restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext) -> pb.RestoreReply:
        cut_session.restore(self._store, self._writer.storage, request, context.is_active)
        return pb.RestoreReply()


def _check_awaited(job: str, context: grpc.ServicerContext) -> None:
    """Raises Cancelled if the caller has abandoned its call while the call waited for a thread.

    The job may have restarted meanwhile. The call would then change the shards of its new generation: drop them, fence
    a worker that may enter, or admit one that nobody releases.
    """
    if not context.is_active():
        raise errors.Cancelled(f"the caller does not wait for the change of {job} any more")


def _admitted(groups: Sequence[LockGroup], it: pb.WorkerAdmission) -> pb.AdmissionResult:
    try:
        return pb.AdmissionResult(step=max(group.admit(it.worker, it.incarnation, it.rank) for group in groups))
    except (errors.Fenced, errors.BadRequest) as error:  # of this worker alone
        return pb.AdmissionResult(error=_rpc.detail_of(error))


def _bounded(workers: Sequence[W]) -> Sequence[W]:
    """Returns the workers of a request.

    Raises:
        LimitExceeded: they are too many, or a name is too long.
        BadRequest: a name has control characters.
    """
    if len(workers) > MAX_WORKERS:
        raise catalogue.CALL_WORKERS.refusal(f"the request names {len(workers)} workers")
    for it in workers:
        check_text("the name of a worker", it.worker)  # the group remembers it
    return workers


def add_to_server(servicer: ParameterServerServicer, server: grpc.Server) -> None:
    """Adds the service to a server. Messages with chunks pass as bytes, which `shoal._wire.chunks` decodes."""
    raw: Any = _rpc.RawMessages(server, requests={"Push", "Assign"}, replies={"Pull"})
    untyped: Any = servicer  # generated types do not allow bytes, or handlers that are not methods
    add_ParameterServerServicer_to_server(untyped, raw)
