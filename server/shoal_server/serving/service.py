"""Data service: the data-plane calls on one server's shards, independent of the transport."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal, TypeAlias

from shoal import _rpc, _tracing, errors
from shoal._memory.buffers import BufferPool
from shoal._security import Authorizer, open_authorizer
from shoal._wire import Aggregation, SlabArrays
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.metrics import PushTiming, ServerMetrics
from shoal_server.replication import Backups
from shoal_server.serving import pushes
from shoal_server.serving.pending_push import PendingPush, stamp_of
from shoal_server.serving.pending_reply import CallWaits, PendingReply
from shoal_server.serving.pulls import PendingPull
from shoal_server.serving.transfers import Transfers
from shoal_server.shards import AnswerPush, LockGroup, Payload, Selection, ShardStore, Stamp, ValueReader

# Called with a number of bytes.
Counted = Callable[[int], object]
# An encoded `PushReply`, or one that waits for the backup.
PushReply: TypeAlias = bytes | PendingReply[bytes]


class DataService:
    """Carries out pulls, pushes, commits and assignments for every endpoint.

    A transport starts the `PendingPull` that `pull` returns, and sends the values when it wakes.

    Args:
        store: the shards.
        metrics: the server's metrics.
        authorizer: checks that each caller acts for itself.
        backups: the backups that this server keeps; None means that it keeps none yet.

    Attributes:
        store, metrics, backups: as given.
        waits: the waits for backups.
    """

    def __init__(
        self,
        store: ShardStore,
        metrics: ServerMetrics,
        authorizer: Authorizer | None = None,
        backups: Backups | None = None,
    ) -> None:
        self.store, self.metrics, self.backups = store, metrics, backups or Backups(store, authorizer)
        self._authorizer = authorizer or open_authorizer()
        self._authorizer.on_revoked(self.end_refused)
        self._waiting: set[PendingPull] = set()
        self._transfers = Transfers()
        self.waits = CallWaits()

    def pull(
        self,
        request: pb.PullRequest,
        wake: Callable[[], None],
        span: _tracing.Span = _tracing.NOTHING,
        reader: ValueReader | None = None,
    ) -> PendingPull:
        """Returns a pull that was not started yet, and counts it.

        Args:
            request: names the shards.
            wake: called when there is something to take from the pull.
            span: tracing span of the call.
            reader: the caller's host, which counts if the caller has no token, and what ends the call.

        Raises:
            StaleGeneration, UnknownJob, UnknownShard, BadRequest: from the store and the group.
            Forbidden, Unauthenticated: the caller is another one than the stamp says.
        """
        self._check_caller(request.stamp, reading=True)
        self.metrics.pulls.inc()
        group = self.store.hosted.group(request.stamp.job, request.stamp.generation, request.shards)
        caller = _rpc.caller()
        check = partial(self._authorizer.check_valid, caller) if caller else bool
        if reader and caller:
            reader.caller = caller.token
        shards, confirmation = group.select(request.shards, request.slot), partial(self.waits.confirmation, group)
        return PendingPull(group, shards, wake, span, check, self._waiting, reader, confirmation, request.slot)

    def end_refused(self) -> None:
        """Ends waiting pulls of callers whose tokens have expired or were revoked. The server calls it periodically."""
        for pull in [*self._waiting]:
            pull.end_if_refused()

    def push(
        self,
        read: Callable[[], tuple[pb.PushHeader, pushes.PushSource]],
        wait: Callable[[PendingPush], object] = PendingPush.wait,
        *,
        end: Callable[[], object],
    ) -> PushReply:
        """Receives a push: stages it, and commits it if its header says so. Returns its reply.

        Args:
            read: returns the header and the source of the payload.
            wait: called if the push needs a permit and none is free; returns when the push does not wait any longer. An
                endpoint with fewer threads than clients must not wait on its threads: see `open_push`.
            end: ends the call, on any thread, so that the source raises an error; see `Transfers`.

        Raises:
            ShoalError: see `PendingPush` and `pushes.receive`.
        """
        with self.metrics.pushing("push") as timing:
            header, source = read()
            with _tracing.server_span("Push", header.stamp):
                push = self.open_push(header)
                try:
                    if push.waits:
                        wait(push)
                except BaseException:
                    push.withdraw()
                    raise
                self._check_after_wait(push)
                timing.waited_s = push.waited_s
                return self._receive(push, source, end, timing)

    def open_push(self, header: pb.PushHeader) -> PendingPush:
        """Returns a push, which may wait for a permit. The caller then calls `finish_push`, or `withdraw` of the push.

        Args:
            header: header of the push.

        Raises:
            ShoalError: see `PendingPush`.
            Forbidden, Unauthenticated: the caller is another one than the stamp says.
        """
        self._check_caller(header.stamp)
        return PendingPush(self.store, header)

    def finish_push(self, push: PendingPush, source: pushes.PushSource, end: Callable[[], object]) -> PushReply:
        """Receives a push that does not wait any longer.

        Args:
            push: what `open_push` returned.
            source: receives the payload.
            end: ends the call, as for `push`.

        Returns:
            The reply.

        Raises:
            ShoalError: see `pushes.receive`.
            Unauthenticated: the caller's token has expired or was revoked while the push waited.
        """
        self._check_after_wait(push)
        with self.metrics.pushing("push") as timing, _tracing.server_span("Push", push.header.stamp):
            reply = self._receive(push, source, end, timing)
        if push.waited_s:
            self.metrics.push_waited(push.waited_s)
        return reply

    def commit(self, request: pb.CommitRequest) -> PushReply:
        """Commits a staged push. Returns its reply.

        Raises:
            NotStaged: the shards do not hold it.
            ShoalError: see `pushes.find` and the group.
            Forbidden, Unauthenticated: the caller is another one than the stamp says.
        """
        self._check_caller(request.stamp)
        with self.metrics.pushing("commit") as timing:
            group, shards = pushes.find(self.store, request)
            with _tracing.server_span("Commit", request.stamp):
                return self._commit("commit", group, shards, stamp_of(request.stamp), timing)

    def assign(self, header: pb.PushHeader, source: pushes.PushSource) -> bytes:
        """Overwrites values. Returns an encoded `PushReply`.

        Raises:
            ShoalError: see `pushes.assign`.
            Forbidden, Unauthenticated: the caller is another one than the stamp says.
        """
        # Before training begins, values have no stamp of a participant.
        check = partial(self._check_caller, header.stamp, reading=True)
        check()
        shards = pushes.assign(self.store, header, source, check)
        return shards.headers.of_push(0, 0, pb.PUSH_OUTCOME_UNSPECIFIED, 0)

    def share_norm(self, request: pb.ShareNormRequest) -> Sequence[LockGroup]:
        """Receives the squares of a step from another server of the job. Returns the groups that have them.

        Raises:
            StaleGeneration, UnknownJob: from the store.
            BadRequest: from the group.
            Forbidden, Unauthenticated: the caller is another server than the request says.
        """
        caller = _rpc.caller()
        if caller is not None:
            self._authorizer.check_participant(caller, request.job, request.server, request.incarnation, reading=False)
        groups = self.store.hosted.groups_of(request.job, request.generation)
        for group in groups:
            group.receive_norm(request.server, request.step, request.squares)
        return groups

    def sent(self, transport: str) -> Counted:
        """Returns the function that counts bytes of values that a transport sends.

        Args:
            transport: the name under which it is registered.
        """
        return self.metrics.sent[transport]

    def received(self, transport: str) -> Counted:
        """Returns the function that counts bytes of gradients and values that a transport receives; see `sent`."""
        return self.metrics.received[transport]

    def _check_caller(self, stamp: header_pb2.Stamp, *, reading: bool = False) -> None:
        caller = _rpc.caller()
        if caller is not None:
            self._authorizer.check_participant(caller, stamp.job, stamp.worker, stamp.incarnation, reading=reading)

    def _receive(
        self, push: PendingPush, source: pushes.PushSource, end: Callable[[], object], timing: PushTiming
    ) -> PushReply:
        """Receives a push, after an earlier transfer of the same worker has ended, and before it takes memory."""
        if push.known:
            return self._reply("push", push.group, push.shards, push.known, timing)

        def alone(shards: Selection, aggregations: Collection[Aggregation], memory: BufferPool) -> SlabArrays:
            with self._transfers.only(push, end):
                return source(shards, aggregations, memory)

        payload = pushes.receive(push, alone)
        if (sending := self.waits.sending(push.group, payload)) is None:
            return self._stage(push, payload, timing)
        timing.goes_on = True

        def sent() -> PushReply:
            with self.metrics.pushing("push", timing):
                try:
                    sending.check()
                except BaseException:
                    pushes.drop(push, payload)
                    raise
                return self._stage(push, payload, timing)

        return PendingReply([sending], sent, partial(pushes.drop, push, payload))

    def _stage(self, push: PendingPush, payload: Payload | None, timing: PushTiming) -> PushReply:
        answer = pushes.stage(push, payload, partial(self._check_caller, push.header.stamp))
        if push.header.commit:
            return self._commit("push", push.group, push.shards, push.stamp, timing)
        return self._reply("push", push.group, push.shards, answer, timing)

    def _commit(
        self, call: Literal["push", "commit"], group: LockGroup, shards: Selection, stamp: Stamp, timing: PushTiming
    ) -> PushReply:
        """Commits a staged push as soon as no cut holds back commits."""
        with group.commit_gate.passing(self.waits.all) as held:
            if held is None:
                return self._reply(call, group, shards, group.commit(stamp), timing)
        timing.goes_on = True

        def opened() -> PushReply:
            with self.metrics.pushing(call, timing):
                held.check()
                return self._commit(call, group, shards, stamp, timing)

        return PendingReply([held], opened)

    def _check_after_wait(self, push: PendingPush) -> None:
        """Checks the caller of a push again if it asked for a permit, because it may have waited for a long time.

        Its token may have been revoked meanwhile. Whether the push waited does not decide: a permit can arrive between
        the moment that others see the push wait and the moment that its own thread does.
        """
        if push.opened:
            try:
                self._check_caller(push.header.stamp)
            except BaseException:
                push.withdraw()
                raise

    def _reply(
        self,
        call: Literal["push", "commit"],
        group: LockGroup,
        shards: Selection,
        answer: AnswerPush,
        timing: PushTiming,
    ) -> PushReply:
        if (confirmation := self.waits.confirmation(group)) is None:
            self.metrics.answered(answer)
            return pushes.reply_of(shards, answer)
        timing.goes_on = True

        def confirmed() -> bytes:
            with self.metrics.pushing(call, timing):
                confirmation.check()
                self.metrics.answered(answer)
                return pushes.reply_of(shards, answer)

        return PendingReply([confirmation], confirmed)


def required(header: pb.PushHeader | None) -> pb.PushHeader:
    """Returns the header of a push's first message.

    Raises:
        BadRequest: the message has no header.
    """
    if header is None:
        raise errors.BadRequest("the first message of a push has no header")
    return header


__all__ = ["DataService", "required"]
