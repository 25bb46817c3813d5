"""Pull and push: one participant's way to all shards of a job, wherever they are.

A pull and a push are one call a server, in parallel over the servers. A push to several servers has two phases, so that
it is applied on all of them or on none: every server stages its part, then every server commits it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import grpc
import numpy as np

from shoal import _framing, _rpc, errors
from shoal._layout import Aggregation, Placement, ShardPlacement
from shoal._packing import Packer
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub

T = TypeVar("T")

# A pull may wait for other workers for as long as they take; each attempt is bounded, and repeated.
_PULL_TIMEOUT_S = 60.0
_PUSH_TIMEOUT_S = 60.0
_COMMIT_TIMEOUT_S = 10.0
_NON_TRAINABLE = (Aggregation.MEAN, Aggregation.SUM, Aggregation.LAST)


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push.

    Attributes:
        outcome: accepted; dropped_late (synchronous with backup workers: the step had closed); or skipped.
        staleness: versions applied between the gradient's pull and its push, the most of any shard.
        step: the step to take next.
    """

    outcome: Literal["accepted", "dropped_late", "skipped"]
    staleness: int
    step: int


@dataclass(frozen=True, slots=True)
class _Server:
    """One server and the job's shards that it hosts."""

    address: str
    stub: ParameterServerStub
    shards: Sequence[ShardPlacement]

    @property
    def indices(self) -> list[int]:
        return [shard.layout.shard for shard in self.shards]


class ParameterClient:
    """Pulls and pushes one job's variables.

    Not for several threads at once: a participant takes one step after the other.

    Args:
        placement: where the shards are.
        worker: member id, or "" for a reader, which may pull at any time and never push.
        incarnation: which life of the worker this is.
        step: the first step to take.
        refresh: fetches the placement again when servers say that this one is old.
        retry_for_s: how long a server that does not answer is tried.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        worker: str = "",
        incarnation: int = 0,
        step: int = 0,
        refresh: Callable[[], Placement],
        retry_for_s: float = 30.0,
    ) -> None:
        self._worker, self._incarnation = worker, incarnation
        self._refresh, self._retry_for_s = refresh, retry_for_s
        self.step = step
        self._versions: dict[int, int] = {}  # by shard: of the values last pulled
        self._staged_step = -1  # the last step of which servers may hold a gradient
        # By address. A stub is made with its channel: see `_rpc.channel`.
        self._channels: dict[str, tuple[grpc.Channel, ParameterServerStub]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._use(placement)

    def pull(self) -> dict[str, np.ndarray]:
        """All variables, as soon as the consistency mode lets this worker have them.

        Returns:
            Fresh arrays by name, in the variables' shapes and dtypes.

        Raises:
            Fenced: this worker was declared dead or replaced.
            UnknownJob: the job is gone.
            Unreachable: a server did not answer for `retry_for_s` seconds.
        """
        values = self._packer.empty()
        self._pull_all(values)
        return values

    def barrier(self) -> None:
        """Waits until `pull` would answer, without moving the values."""
        self._pull_all(None)

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        *,
        updates: Mapping[str, np.ndarray] | None = None,
        weight: float = 1.0,
    ) -> PushResult:
        """Sends this step's gradients, which count whole or not at all, once however often they are sent.

        Args:
            gradients: of every trainable variable, in its shape and dtype.
            updates: of every non-trainable variable, or of none: values, or increments where they are summed.
            weight: in a synchronous step's mean, > 0: the number of samples.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit; nothing was sent.
            NonFiniteGradient: NaN or Inf; nothing changed. `skip()` the step, or push it again with other values.
            Fenced, UnknownJob, Unreachable: as for `pull`.
        """
        if not 0 < weight < math.inf:
            raise errors.InvalidGradient(f"a push weighs {weight}; it must weigh more than 0 (skip() passes a step by)")
        aggregations = [Aggregation.TRAINABLE, *(_NON_TRAINABLE if updates else ())]
        arrays = {**gradients, **(updates or {})}
        self._packer.check(arrays, aggregations)
        return self._push(weight, arrays, aggregations)

    def skip(self) -> PushResult:
        """Passes this step by, so that nobody waits for this worker's gradient."""
        return self._push(0.0, {}, [])

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrites some variables' initial values, before training begins; the others keep theirs.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit.
            BadRequest: training has begun.
        """
        everything = {**self.pull(), **values}  # shards are overwritten whole
        self._packer.check(everything, list(Aggregation))

        def send(server: _Server) -> None:
            def call() -> pb.PushReply:
                requests = self._requests(server, 1.0, everything, list(Aggregation), commit=False)
                return server.stub.Assign(requests, timeout=_PUSH_TIMEOUT_S)

            self._retrying(server, call)

        self._each_server(send)

    def close(self) -> None:
        """Closes all connections; calls in progress end with Cancelled."""
        for channel, _ in self._channels.values():
            channel.close()
        if self._pool:
            self._pool.shutdown(wait=True)

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _use(self, placement: Placement) -> None:
        self._placement = placement
        self._packer = Packer(placement)
        self._servers = []
        for address, shards in placement.by_server().items():
            if address not in self._channels:
                channel = _rpc.channel(address)
                self._channels[address] = channel, ParameterServerStub(channel)
            self._servers.append(_Server(address, self._channels[address][1], tuple(shards)))
        if len(self._servers) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(16, thread_name_prefix="shard")

    def _stamp(self) -> header_pb2.Stamp:
        return header_pb2.Stamp(
            job=self._placement.job,
            worker=self._worker,
            incarnation=self._incarnation,
            step=self.step,
            epoch=self._placement.epoch,
        )

    # Pulls.

    def _pull_from(self, server: _Server, values: dict[str, np.ndarray] | None) -> list[header_pb2.ShardHeader]:
        request = pb.PullRequest(stamp=self._stamp(), shards=server.indices, headers_only=values is None)
        return self._retrying(server, lambda: self._receive(server, request, values), waits=True)

    def _pull_all(self, values: dict[str, np.ndarray] | None) -> None:
        """Pulls from all servers, until all shards are at one step.

        Backup workers may overtake this one, on some shards before others. There is no use in working on a step that
        is closed, and a shard that is behind must hear that this worker passes its step by.
        """
        while True:
            replies = self._each_server(lambda server: self._pull_from(server, values))
            headers = [header for reply in replies for header in reply]
            self._versions = {header.shard: header.version for header in headers}
            self.step = max(self.step, *(header.step for header in headers))
            if all(header.step == self.step for header in headers):
                return

    def _receive(
        self, server: _Server, request: pb.PullRequest, values: dict[str, np.ndarray] | None
    ) -> list[header_pb2.ShardHeader]:
        layouts = {shard.layout.shard: shard.layout for shard in server.shards}
        assemblers = {} if values is None else {index: _framing.Assembler(layouts[index]) for index in layouts}
        headers: list[header_pb2.ShardHeader] = []
        for reply in server.stub.Pull(request, timeout=_PULL_TIMEOUT_S):
            headers += reply.headers
            for chunk in reply.chunks:
                assemblers[chunk.shard].add(chunk)
        if {header.shard for header in headers} != layouts.keys():
            raise errors.BadChunk(f"{server.address} answered a pull of shards {sorted(layouts)} without all of them")
        for index, assembler in assemblers.items():
            for arena, array in assembler.finish().items():
                self._packer.unpack(layouts[index], arena, array, values or {})
        return headers

    # Pushes.

    def _push(self, weight: float, arrays: Mapping[str, np.ndarray], aggregations: Sequence[Aggregation]) -> PushResult:
        # One server needs no second phase. Nor does a push that brings nothing, unless one that did was begun: should
        # this worker die in between, a server that was not told must not take that one for this.
        at_once = len(self._servers) == 1 or (weight == 0 and self._staged_step != self.step)
        if not at_once:
            self._staged_step = self.step

        def send(server: _Server) -> pb.PushReply:
            return self._retrying(
                server,
                lambda: server.stub.Push(
                    self._requests(server, weight, arrays, aggregations, commit=at_once), timeout=_PUSH_TIMEOUT_S
                ),
            )

        def commit(server: _Server) -> pb.PushReply:
            request = pb.CommitRequest(stamp=self._stamp(), shards=server.indices)
            return self._retrying(server, lambda: server.stub.Commit(request, timeout=_COMMIT_TIMEOUT_S))

        replies = self._each_server(send)
        if not at_once:
            replies = self._each_server(commit)
        return self._conclude([shard for reply in replies for shard in reply.shards])

    def _conclude(self, shards: Sequence[pb.ShardPush]) -> PushResult:
        outcomes = {shard.outcome for shard in shards}
        outcome: Literal["accepted", "dropped_late", "skipped"] = (
            "accepted" if pb.ACCEPTED in outcomes else "dropped_late" if pb.DROPPED_LATE in outcomes else "skipped"
        )
        self.step = max(self.step + 1, *(shard.header.step for shard in shards))
        return PushResult(outcome, max(shard.staleness for shard in shards), self.step)

    def _requests(
        self,
        server: _Server,
        weight: float,
        arrays: Mapping[str, np.ndarray],
        aggregations: Sequence[Aggregation],
        *,
        commit: bool,
    ) -> Iterator[pb.PushRequest]:
        header: pb.PushHeader | None = pb.PushHeader(
            stamp=self._stamp(),
            shards=server.indices,
            weight=weight,
            commit=commit,
            aggregations=[aggregation.value for aggregation in aggregations],
            versions=[self._versions.get(index, 0) for index in server.indices],
        )
        chunks = (
            chunk
            for shard in server.shards
            for chunk in _framing.chunks(
                shard.layout.shard, self._packer.pack(shard.layout, arrays, aggregations) if arrays else ()
            )
        )
        for group in _framing.messages(chunks):
            yield pb.PushRequest(header=header, chunks=group)
            header = None
        if header is not None:
            yield pb.PushRequest(header=header)

    # Calls.

    def _each_server(self, call: Callable[[_Server], T]) -> list[T]:
        """Calls every server at once; on an old placement, fetches the new one and calls them all again."""
        for _ in range(3):
            try:
                if self._pool is None:
                    return [call(server) for server in self._servers]
                futures = [self._pool.submit(call, server) for server in self._servers]
                # Wait for all before raising: no call of this step may still run when the next one starts.
                failures = [failure for future in futures if (failure := future.exception())]
                if failures:
                    raise failures[0]
                return [future.result() for future in futures]
            except errors.StaleEpoch:
                self._use(self._refresh())
        raise errors.StaleEpoch(f"the placement of {self._placement.job} keeps changing; try again later")

    def _retrying(self, server: _Server, call: Callable[[], T], *, waits: bool = False) -> T:
        def once() -> T:
            with _rpc.translated(server.address):
                return call()

        def attempt() -> T:
            while True:
                try:
                    return once()
                except errors.DeadlineExceeded:
                    if not waits:  # a pull that ran into its deadline was waiting for others: ask again
                        raise

        what = f"a server of {self._placement.job}"
        return _rpc.retrying(attempt, what=what, address=server.address, for_s=self._retry_for_s)
