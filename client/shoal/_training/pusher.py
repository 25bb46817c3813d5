"""Pusher: sends one participant's gradients to all servers. A push takes effect on all servers or on none.

A push to several servers has two phases: every server stages its part, then every server commits it. With one server,
both happen in one call.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from shoal import errors
from shoal._memory.buffers import BufferPool
from shoal._system.logs import Log
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.placed_servers import PlacedServers
from shoal._training.push_norm import PushNorm, check_pushed
from shoal._transport import ServerConnection
from shoal._wire import Aggregation, CompleteArrays, Cursor, Memory, PushPayload, PushStream
from shoal.v1 import parameter_server_pb2 as pb

_log = Log(__name__)

# Errors of a push whose gradients are still being computed, after which it is repeated.
_INTERRUPTED = (errors.Unreachable, errors.DeadlineExceeded, errors.Unauthenticated)
_NON_TRAINABLE = (Aggregation.MEAN, Aggregation.SUM, Aggregation.LAST)


@dataclass(frozen=True, slots=True)
class PushResult:
    """Result of a push.

    Attributes:
        outcome: accepted; dropped_late (synchronous with backup workers: the step had closed); skipped; or sent (the
            push continues while the next step is computed).
        staleness: versions applied between the gradient's pull and its push, the largest of all shards.
        step: the next step.
    """

    outcome: Literal["accepted", "dropped_late", "skipped", "sent"]
    staleness: int
    step: int


@dataclass(frozen=True, slots=True)
class Push:
    """One step's push, ready to be sent.

    Attributes:
        step: number of the step.
        weight: weight in a synchronous step's mean; 0 means that the push skips the step.
        versions: by shard, the version that the gradients were computed from.
        payload_for: returns the payload for a server.
        aggregations: aggregations of the arenas that the push carries.
        push_stream: the arrays, if they are given one by one; None means that all are available.
        cursor: the worker's position in its data after this push; None means that it has no data.
        squares: returns the sum of the squares of all gradients; called once, when the push is sent. None means that
            servers do not need it.
        learning_rate: that of the update; None means that of the job.
    """

    step: int
    weight: float
    versions: Mapping[int, int]
    payload_for: Callable[[ServerConnection], PushPayload]
    aggregations: Sequence[Aggregation]
    push_stream: PushStream | None = None
    cursor: Cursor | None = None
    squares: Callable[[], float] | None = None
    learning_rate: float | None = None

    def give_up(self) -> None:
        """Abandons the push if arrays are missing; otherwise does nothing."""
        if self.push_stream:
            self.push_stream.fail()


class Pusher:
    """Prepares and sends pushes of a job's variables.

    One thread sends at a time. Another thread may prepare the next push meanwhile.

    Args:
        servers: servers of the job.
        norm: measures pushes to several servers; None means that servers do not need their norms.
    """

    def __init__(self, servers: PlacedServers, norm: PushNorm | None = None) -> None:
        self._servers, self._norm = servers, norm
        self._staged_step = -1  # the last step with gradients that servers may have staged

    def prepare(
        self,
        step: int,
        versions: Mapping[int, int],
        gradients: Mapping[str, np.ndarray],
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None = None,
        *,
        memory: Memory | None = None,
    ) -> Push:
        """Checks a step's push, and makes it ready to send.

        Args:
            step, versions: as for `Push`.
            gradients, updates, weight, cursor: as for `ParameterClient.push`.
            memory: allocates memory for copies, so that the arrays may change before the push is sent. None means that
                they will not change.

        Returns:
            The push.

        Raises:
            InvalidGradient: as for `ParameterClient.push`.
        """
        servers = self._servers
        aggregations = self._brought(weight, updates or {})
        buffers = gradients if isinstance(gradients, GradientBuffers) else None
        unchanged = buffers is not None and buffers.unchanged
        if buffers is not None and not unchanged:
            buffers.convert()
        arrays = {**gradients, **updates} if updates else gradients
        if updates or not unchanged:
            servers.packer.check(arrays, aggregations)

        def payload(connection: ServerConnection) -> PushPayload:
            return connection.prepare(servers.payload(connection, CompleteArrays(arrays), aggregations), memory)

        lent: Mapping[ServerConnection, PushPayload] | None = None
        if buffers is not None:
            lent = buffers.take(servers.connections, updates or {}, aggregations, unchanged=unchanged)
        part: Callable[[ServerConnection], PushPayload] = payload
        if lent:
            part = partial(self._packed, lent, memory, payload)
        elif memory:
            part = partial(self._packed, servers.before_push(payload), memory, None)
        squares: Callable[[], float] | None = None
        if self._norm and len(servers.connections) > 1:
            measured = self._norm.squares(gradients)  # now, because the arrays may change later
            squares = lambda: measured  # noqa: E731
        return Push(step, weight, versions, part, aggregations, cursor=cursor, squares=squares)

    def buffers(self, memory: Memory) -> GradientBuffers:
        """Returns arrays for a step's gradients.

        Args:
            memory: allocates memory if the transport has none.
        """
        servers = self._servers

        def lend(connection: ServerConnection) -> PushPayload:
            return connection.lend(servers.payload(connection, None, [Aggregation.TRAINABLE]), memory)

        return GradientBuffers(servers.packer, servers.before_push(lend))

    def begin(
        self,
        step: int,
        versions: Mapping[int, int],
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None = None,
    ) -> Push:
        """Begins a push whose gradients `feed` adds. Another thread may `send` it meanwhile.

        Args:
            step, versions: as for `Push`.
            updates, weight, cursor: as for `ParameterClient.push`; updates are copied.

        Returns:
            The push.

        Raises:
            InvalidGradient: as for `ParameterClient.push`.
        """
        aggregations = self._brought(weight, updates or {})
        push_stream = PushStream()

        def payload(connection: ServerConnection) -> PushPayload:
            return connection.prepare(self._servers.payload(connection, push_stream, aggregations), None)

        def squares() -> float:
            assert self._norm is not None
            push_stream.wait()
            given = updates or {}
            return self._norm.squares({name: it for name, it in push_stream.arrays.items() if name not in given})

        wanted = squares if self._norm and len(self._servers.connections) > 1 else None
        push = Push(step, weight, versions, payload, aggregations, push_stream, cursor, wanted)
        self._add(push, push_stream, [(name, np.array(array)) for name, array in (updates or {}).items()])
        return push

    def feed(self, push: Push, gradients: Iterable[tuple[str, np.ndarray]]) -> None:
        """Adds gradients to a push that was begun, as they become available; see `ParameterClient.feed`."""
        assert push.push_stream is not None
        try:
            self._add(push, push.push_stream, gradients)
            self._servers.packer.check(push.push_stream.arrays, push.aggregations)
            push.push_stream.end()
        finally:
            push.give_up()

    def send(self, push: Push) -> PushResult:
        """Sends a push to all servers, and returns its result."""
        servers = self._servers
        # A push without gradients needs no second phase, unless a push with gradients of this step was staged. In that
        # case, if this worker dies between two calls, a server must not mistake the staged push for this one.
        brings_nothing = push.weight == 0 and self._staged_step != push.step

        def at_once() -> bool:
            return len(servers.connections) == 1 or brings_nothing  # may change with the placement

        squares = None
        if push.squares:
            squares = push.squares()
            check_pushed(squares)

        def stage(connection: ServerConnection) -> pb.PushReply:
            if push.weight or not at_once():  # one server may stage it, too, and its lock group may then be split
                self._staged_step = push.step
            return self._stage(connection, push, at_once, squares)

        def commit(connection: ServerConnection) -> pb.PushReply:
            request = pb.CommitRequest(stamp=servers.stamp(push.step), shards=connection.indices)
            return servers.calls.retrying(connection, lambda: connection.commit(request))

        moves = {connection: connection.moves for connection in servers.connections}

        def commit_moved(connection: ServerConnection) -> pb.PushReply:
            """Commits a staged push. If the server does not have it and is another one by now, stages it there, too."""
            try:
                return commit(connection)
            except errors.NotStaged:
                if connection.moves == moves.get(connection):
                    raise
            stage(connection)
            return commit(connection)

        replies = servers.each(stage)
        if not at_once():
            replies = servers.each(commit_moved)
        return _result(push.step, [shard for reply in replies for shard in reply.shards])

    def assign(self, values: Mapping[str, np.ndarray], step: int, updates: int = 0, slot: str = "") -> None:
        """Overwrites all variables with these values, or a slot of all trainable variables.

        Args:
            values: the values, or the slot as servers keep it.
            step: step of this participant.
            updates: number of updates that the values have received.
            slot: name of the slot; "" means the values.
        """
        servers, carried = self._servers, [Aggregation.TRAINABLE] if slot else list(Aggregation)
        (servers.slot_packer if slot else servers.packer).check(values, carried)
        arrays = CompleteArrays(values)

        def payload(connection: ServerConnection) -> PushPayload:
            if not slot:
                return servers.payload(connection, arrays, carried)
            packer = servers.slot_packer
            return PushPayload(packer, packer.groups[connection.group], carried, arrays)

        push = Push(step, 1.0, {}, payload, carried)

        def send(connection: ServerConnection) -> None:
            def call() -> None:
                header = self.header(connection, push, commit=False)
                header.updates, header.slot = updates, slot
                connection.assign(header, payload(connection))

            servers.calls.retrying(connection, call)

        servers.each(send)

    def nothing(self, step: int, versions: Mapping[int, int]) -> Push:
        """Returns a push that skips a step."""
        return Push(step, 0.0, versions, lambda connection: self._servers.payload(connection, None, []), [])

    def header(
        self, connection: ServerConnection, push: Push, *, commit: bool, squares: float | None = None
    ) -> pb.PushHeader:
        """Returns the header of a push to one server.

        Args:
            connection: connection to the server.
            push: the push.
            commit: whether the server commits the push in the same call.
            squares: sum of the squares of all gradients; None if the servers do not need it.
        """
        return pb.PushHeader(
            stamp=self._servers.stamp(push.step),
            shards=connection.indices,
            weight=push.weight,
            commit=commit,
            aggregations=[aggregation.value for aggregation in push.aggregations],
            versions=[push.versions.get(index, 0) for index in connection.indices],
            cursor=push.cursor.to_proto() if push.cursor else None,
            squares=squares,
            learning_rate=push.learning_rate,
        )

    def _stage(
        self, connection: ServerConnection, push: Push, at_once: Callable[[], bool], squares: float | None
    ) -> pb.PushReply:
        """Sends one server its part of a push."""
        payloads: list[PushPayload] = []

        def call() -> pb.PushReply:
            if not payloads:
                payloads.append(push.payload_for(connection))
            header = self.header(connection, push, commit=at_once(), squares=squares)
            return connection.push(header, payloads[0])

        if push.push_stream:
            try:
                with self._servers.calls.watched():
                    return call()
            except errors.ShoalError as error:
                if not isinstance(error, _INTERRUPTED) and not self._servers.calls.may_have_moved(error):
                    raise
                # Computing a gradient can take longer than a server waits for it, and than a ticket is valid.
                _log.info("a push was interrupted; it is repeated when all gradients are computed", why=error.message)
                self._servers.calls.on_retry()
            push.push_stream.wait()
        return self._servers.calls.retrying(connection, call)

    def _packed(
        self,
        payloads: Mapping[ServerConnection, PushPayload],
        memory: Memory | None,
        payload: Callable[[ServerConnection], PushPayload] | None,
        connection: ServerConnection,
    ) -> PushPayload:
        """Returns the payload for a server of a push whose arrays were copied, or lie in lent memory.

        Args:
            payloads: the payloads by connection. If lock groups were split since, the payload is made of them.
            memory: allocates memory if the transport has none.
            payload: returns a payload from the arrays; None if these may have changed.
            connection: connection to the server.

        Raises:
            StaleGeneration: there is no payload, because the job has a placement of another generation.
        """
        if connection in payloads:
            return payloads[connection]
        servers, others = self._servers, payloads.values()
        if all(it.has_copy and it.packer.generation == servers.packer.generation for it in others):
            aggregations = [*next(iter(others)).aggregations]
            blank = servers.payload(connection, None, aggregations)
            return connection.lend(blank, memory or BufferPool(0, 0.0).take).filled_from(others)
        if payload is None:
            raise errors.StaleGeneration("the placement changed while gradients were being sent; push them again")
        return payload(connection)

    def _brought(self, weight: float, updates: Iterable[str]) -> list[Aggregation]:
        """Returns the aggregations of the arenas that a push carries: trainable, and those with updates."""
        if not 0 < weight < math.inf:
            raise errors.InvalidGradient(f"a push has weight {weight}; it must be larger than 0 (skip() skips a step)")
        known = self._servers.packer.variables
        updated = {known[name].aggregation for name in updates if name in known}
        return [Aggregation.TRAINABLE, *(each for each in _NON_TRAINABLE if each in updated)]

    def _add(self, push: Push, push_stream: PushStream, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        for name, array in arrays:
            self._servers.packer.check_one(name, array, push.aggregations)
            if name in push_stream.arrays:
                raise errors.InvalidGradient(f"the gradients include {name!r} twice")
            push_stream.add(name, array)


def _result(step: int, shards: Sequence[pb.ShardPush]) -> PushResult:
    outcomes = {shard.outcome for shard in shards}
    outcome: Literal["accepted", "dropped_late", "skipped"] = (
        "accepted" if pb.ACCEPTED in outcomes else "dropped_late" if pb.DROPPED_LATE in outcomes else "skipped"
    )
    following = max(step + 1, *(shard.header.step for shard in shards))
    return PushResult(outcome, max(shard.staleness for shard in shards), following)


__all__ = ["Push", "PushResult", "Pusher"]
