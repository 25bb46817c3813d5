"""The parameter server's RPCs: decode, call, encode."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import structlog

from shoal import _rpc, _tracing, consistency, errors, optim, variables
from shoal._transport.inflow import take_message
from shoal._transport.lane import STALL_S
from shoal._wire.chunks import decode_push
from shoal._wire.framing import Assembler
from shoal._wire.layout import ShardLayout
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from shoal_server.checkpoints import Saver, saving
from shoal_server.metrics import ServerMetrics
from shoal_server.serving import pushes
from shoal_server.serving.pulls import PullCall, Send
from shoal_server.shards import JobTerms, ShardStore
from shoal_server.stalls import Stalls

_log = structlog.get_logger(__name__)

SERVICE = "shoal.v1.ParameterServer"


class ParameterServerServicer:
    """Translates between the contract and a `ShardStore`.

    Args:
        store: the shards.
        metrics: what is counted.
        senders: threads that send what is pulled; a pull that waits holds none of them.
        receivers: threads that receive what is pushed; a push that stalls holds one, and no other kind of call.
        committers: threads that commit what was pushed; a cut holds commits back, and must be reached meanwhile.
        saver: writes checkpoints.
        offer: how to reach this server's lanes; None: it has none.
        stall_s: seconds after which `end_stalled` ends a pull or push that does not move.
    """

    def __init__(
        self,
        store: ShardStore,
        metrics: ServerMetrics,
        *,
        senders: ThreadPoolExecutor,
        receivers: ThreadPoolExecutor,
        committers: ThreadPoolExecutor,
        saver: Saver | None = None,
        offer: pb.AttachReply | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._store, self._metrics, self._senders = store, metrics, senders
        self._saver = saver or Saver(None)
        self._offer = offer or pb.AttachReply()
        self._stalls = Stalls(stall_s)
        # grpcio asks no more of a handler than to be callable.
        self.Pull = _rpc.NonBlocking(self._pull, senders)
        self.Push = _rpc.Pooled(self._push, receivers)
        self.Assign = _rpc.Pooled(self._assign, receivers)
        self.Commit = _rpc.Pooled(self._commit, committers)

    def end_stalled(self) -> None:
        """Ends pulls that nobody reads and pushes that do not go on; to be called once in a while."""
        if ended := self._stalls.end():
            _log.warning("ended calls whose callers stalled", calls=ended)

    def _pull(self, request: pb.PullRequest, context: grpc.ServicerContext, send: Send) -> None:
        self._metrics.pulls.inc()
        shards = self._store.shards(request.stamp.job, request.shards, request.stamp.epoch)
        call = PullCall(
            shards,
            headers_only=request.headers_only,
            context=context,
            send=self._watched_send(send, context),
            senders=self._senders,
            on_sent=self._metrics.sent["grpc"],
            on_end=self._metrics.pulled,
            span=_tracing.served("Pull", request.stamp),
        )
        call.start(pushes.stamp_of(request.stamp), request.ahead)

    @_rpc.servicer
    def Attach(self, request: pb.AttachRequest, context: grpc.ServicerContext) -> pb.AttachReply:
        return self._offer

    @_rpc.servicer
    def _push(self, request: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushReply:
        with self._metrics.pushing("push"):
            header, source = self._messages(self._watched(request, context))
            return self._reply(pushes.receive(self._store, header, source))

    @_rpc.servicer
    def _commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.PushReply:
        with self._metrics.pushing("commit"):
            return self._reply(pushes.commit(self._store, request))

    def _reply(self, answers: list[pushes.ShardAnswer]) -> pb.PushReply:
        return pushes.reply_of(answers, self._metrics.answered)

    @_rpc.servicer
    def _assign(self, request: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushReply:
        header, source = self._messages(self._watched(request, context))
        shards = pushes.assign(self._store, header, source)
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
        self._saver.drop(request.job)
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
    def Hold(self, request: pb.HoldRequest, context: grpc.ServicerContext) -> pb.HoldReply:
        return saving.hold(self._store, self._saver, request)

    @_rpc.servicer
    def GiveUpHold(self, request: pb.GiveUpHoldRequest, context: grpc.ServicerContext) -> pb.GiveUpHoldReply:
        saving.give_up(self._store, request)
        return pb.GiveUpHoldReply()

    @_rpc.servicer
    def Save(self, request: pb.SaveRequest, context: grpc.ServicerContext) -> pb.SaveReply:
        return saving.save(self._store, self._saver, request)

    @_rpc.servicer
    def CollectFiles(self, request: pb.CollectFilesRequest, context: grpc.ServicerContext) -> pb.CollectFilesReply:
        return saving.collect(self._store, self._saver, request)

    @_rpc.servicer
    def Restore(self, request: pb.RestoreRequest, context: grpc.ServicerContext) -> pb.RestoreReply:
        saving.restore(self._store, self._saver.folder, request)
        return pb.RestoreReply()

    def _messages(self, stream: Iterator[bytes]) -> tuple[pb.PushHeader, pushes.Source]:
        """The header of a push, and what it brings."""
        header, first = decode_push(next(stream, b""))
        if header is None:
            raise errors.BadRequest("a push begins with a header; this stream has none")

        def rest(assembler: Assembler) -> Iterator[tuple[pb.PushRequest, int]]:
            return (take_message(pb.PushRequest, message, assembler) for message in stream)

        return header, pushes.from_wire(first, rest, self._metrics.received["grpc"])

    def _watched_send(self, send: Send, context: grpc.ServicerContext) -> Send:
        def watched(message: bytes | None) -> None:
            with self._stalls.waiting(context.cancel):
                send(message)

        return watched

    def _watched(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        while True:
            with self._stalls.waiting(context.cancel):
                message = next(stream, None)
            if message is None:
                return
            yield message


def add_to_server(servicer: ParameterServerServicer, server: grpc.Server) -> None:
    """Adds the service to a server. Messages with chunks come and go as bytes: `shoal._wire.chunks` knows them."""
    raw: Any = _rpc.RawMessages(server, requests={"Push", "Assign"}, replies={"Pull"})
    untyped: Any = servicer  # generated types know neither bytes nor handlers that are no methods
    add_ParameterServerServicer_to_server(untyped, raw)
