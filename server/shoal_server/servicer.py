"""The parameter server's RPCs: decode, call, encode."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from shoal import _rpc, consistency, errors, optim, variables
from shoal._layout import ShardLayout
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server import pushes
from shoal_server.metrics import ServerMetrics
from shoal_server.pulls import PullCall, Send
from shoal_server.shard import JobTerms
from shoal_server.shard_state import Admission
from shoal_server.store import ShardStore

SERVICE = "shoal.v1.ParameterServer"

_OUTCOMES = {
    "staged": pb.STAGED,
    "accepted": pb.ACCEPTED,
    "dropped_late": pb.DROPPED_LATE,
    "skipped": pb.SKIPPED,
}
_KINDS = {"pull": pb.Admission.PULL, "push": pb.Admission.PUSH}


class ParameterServerServicer:
    """Translates between the contract and a `ShardStore`.

    Args:
        store: the shards.
        metrics: what is counted.
        senders: threads that send what is pulled; a pull that waits holds none of them.
        receivers: threads that receive what is pushed; a push that stalls holds one, and no other kind of call.
    """

    def __init__(
        self, store: ShardStore, metrics: ServerMetrics, *, senders: ThreadPoolExecutor, receivers: ThreadPoolExecutor
    ) -> None:
        self._store, self._metrics, self._senders = store, metrics, senders
        # grpcio asks no more of a handler than to be callable.
        self.Pull = _rpc.NonBlocking(self._pull, senders)
        self.Push = _rpc.Pooled(self._push, receivers)
        self.Assign = _rpc.Pooled(self._assign, receivers)

    def _pull(self, request: pb.PullRequest, context: grpc.ServicerContext, send: Send) -> None:
        self._metrics.pulls.inc()
        shards = self._store.shards(request.stamp.job, request.shards, request.stamp.epoch)
        call = PullCall(
            shards,
            headers_only=request.headers_only,
            context=context,
            send=send,
            senders=self._senders,
            on_sent=self._metrics.sent.inc,
        )
        call.start(pushes.stamp_of(request.stamp))

    @_rpc.servicer
    def _push(self, request: Iterator[pb.PushRequest], context: grpc.ServicerContext) -> pb.PushReply:
        try:
            return self._reply(pushes.receive(self._store, self._counted(request)))
        except errors.ShoalError as error:
            self._metrics.rejected.labels(reason=error.code.lower()).inc()
            raise

    @_rpc.servicer
    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.PushReply:
        return self._reply(pushes.commit(self._store, request))

    @_rpc.servicer
    def _assign(self, request: Iterator[pb.PushRequest], context: grpc.ServicerContext) -> pb.PushReply:
        shards = pushes.assign(self._store, self._counted(request))
        headers = [header_pb2.ShardHeader(shard=shard.layout.shard, epoch=shard.epoch) for shard in shards]
        return pb.PushReply(shards=[pb.ShardPush(header=header) for header in headers])

    @_rpc.servicer
    def CreateShards(self, request: pb.CreateShardsRequest, context: grpc.ServicerContext) -> pb.CreateShardsReply:
        job_variables = dict(variables.from_proto(variable) for variable in request.variables)
        terms = JobTerms(
            name=request.job,
            epoch=request.epoch,
            variables=job_variables,
            optimizer=optim.from_proto(request.optimizer),
            consistency=consistency.from_proto(request.consistency),
            seed=request.seed,
        )
        held = self._store.create(terms, [ShardLayout.from_proto(shard, job_variables) for shard in request.shards])
        return pb.CreateShardsReply(bytes=held)

    @_rpc.servicer
    def DropShards(self, request: pb.DropShardsRequest, context: grpc.ServicerContext) -> pb.DropShardsReply:
        self._store.drop(request.job)
        return pb.DropShardsReply()

    @_rpc.servicer
    def AdmitWorker(self, request: pb.AdmitWorkerRequest, context: grpc.ServicerContext) -> pb.AdmitWorkerReply:
        shards = self._store.all_shards(request.job)
        steps = [shard.admit(request.worker, request.incarnation, request.rank) for shard in shards]
        return pb.AdmitWorkerReply(step=max(steps))

    @_rpc.servicer
    def FenceWorker(self, request: pb.FenceWorkerRequest, context: grpc.ServicerContext) -> pb.FenceWorkerReply:
        shards = self._store.all_shards(request.job)
        committed = [shard.fence(request.worker, request.incarnation) for shard in shards]
        return pb.FenceWorkerReply(committed_steps=max(committed))

    @_rpc.servicer
    def ReleaseWorker(self, request: pb.ReleaseWorkerRequest, context: grpc.ServicerContext) -> pb.ReleaseWorkerReply:
        for shard in self._store.all_shards(request.job):
            shard.release(request.worker, request.incarnation, request.committed_steps)
        return pb.ReleaseWorkerReply()

    @_rpc.servicer
    def GetHistory(self, request: pb.GetHistoryRequest, context: grpc.ServicerContext) -> pb.GetHistoryReply:
        for shard in self._store.all_shards(request.job):
            if shard.layout.shard == request.shard:
                header = header_pb2.ShardHeader(shard=request.shard, epoch=shard.epoch, version=shard.version)
                return pb.GetHistoryReply(header=header, admissions=map(_encode_admission, shard.history()))
        raise errors.UnknownShard(f"shard {request.shard} of {request.job} is not on this server")

    def _counted(self, stream: Iterator[pb.PushRequest]) -> Iterator[pb.PushRequest]:
        for message in stream:
            self._metrics.received.inc(sum(len(chunk.data) for chunk in message.chunks))
            yield message

    def _reply(self, answers: list[pushes.ShardAnswer]) -> pb.PushReply:
        reply = pb.PushReply()
        for answered in answers:
            answer, layout = answered.answer, answered.shard.layout
            header = header_pb2.ShardHeader(
                shard=layout.shard, epoch=answered.shard.epoch, version=answer.version, step=answer.step
            )
            reply.shards.add(header=header, outcome=_OUTCOMES[answer.outcome], staleness=answer.staleness)
            self._metrics.pushed(answer.outcome, answer.staleness)
        return reply


def _encode_admission(admission: Admission) -> pb.Admission:
    return pb.Admission(
        kind=_KINDS[admission.kind],
        worker=admission.worker,
        step=admission.step,
        slowest=admission.slowest,
        version=admission.version,
    )
