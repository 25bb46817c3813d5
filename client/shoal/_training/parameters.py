"""Pull and push: one participant's way to all shards of a job, wherever they are.

A pull and a push are one call a server, in parallel over the servers. A push to several servers has two phases, so
that it is applied on all of them or on none: every server stages its part, then every server commits it. How a call
gets to a server is in `shoal._transport`; how calls overlap with computing, in `shoal._training.overlap`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import structlog

from shoal import _rpc, _tracing, errors
from shoal._memory.buffers import BufferPool
from shoal._training.gradient_buffers import GradientBuffers
from shoal._transport.registry import chosen_setting
from shoal._transport.server_connection import ServerConnection as Link
from shoal._wire.arrival import Arrival
from shoal._wire.cursor import Cursor
from shoal._wire.layout import Aggregation, Placement
from shoal._wire.outgoing import Outgoing
from shoal._wire.packing import Arrays, Complete, Memory, Packer
from shoal._wire.transfer import Load
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

T = TypeVar("T")
_log = structlog.get_logger(__name__)

_NON_TRAINABLE = (Aggregation.MEAN, Aggregation.SUM, Aggregation.LAST)
# Of memory that was used for values and is free: the most that is kept, and for how long.
_SPARE_BYTES, _SPARE_S = 1 << 30, 30.0


@dataclass(frozen=True, slots=True)
class PushResult:
    """What became of a push.

    Attributes:
        outcome: accepted; dropped_late (synchronous with backup workers: the step had closed); skipped; or sent: it is
            on its way while the next step is computed.
        staleness: versions applied between the gradient's pull and its push, the most of any shard.
        step: the step to take next.
    """

    outcome: Literal["accepted", "dropped_late", "skipped", "sent"]
    staleness: int
    step: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought.

    Attributes:
        values: by variable; empty if only the barrier was asked for.
        versions: of each shard, by its number.
        step: the step that the values are for.
    """

    values: dict[str, np.ndarray]
    versions: dict[int, int]
    step: int


@dataclass(frozen=True, slots=True)
class Push:
    """One step's push, ready to be sent.

    Attributes:
        step: its number.
        weight: in a synchronous step's mean; 0: nothing is brought.
        versions: by shard, of the values that it was computed from.
        load: makes the part for a server.
        aggregations: of the arenas that are brought.
        outgoing: where arrays are still to come; None: they are all there.
        cursor: how far the worker's data has come with it; None: it has none.
    """

    step: int
    weight: float
    versions: Mapping[int, int]
    load: Callable[[Link], Load]
    aggregations: Sequence[Aggregation]
    outgoing: Outgoing | None = None
    cursor: Cursor | None = None

    def give_up(self) -> None:
        """What is still to come will never come; harmless if nothing is."""
        if self.outgoing:
            self.outgoing.fail()


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
        transport: the best way to servers to take; None: what SHOAL_TRANSPORT says.
        on_retry: told, on any thread, of each call that is repeated.

    Attributes:
        step: the step to take next.
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
        transport: str | None = None,
        on_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_retry = on_retry
        self._worker, self._incarnation = worker, incarnation
        self._refresh, self._retry_for_s = refresh, retry_for_s
        self._transport = transport or chosen_setting()
        self.step = step
        self._versions: dict[int, int] = {}  # by shard: of the values last pulled
        self._staged_step = -1  # the last step of which servers may hold a gradient
        self._memory = BufferPool(_SPARE_BYTES, _SPARE_S)
        self._links: list[Link] = []
        self._pool: ThreadPoolExecutor | None = None
        self._use(placement)

    def pull(self) -> dict[str, np.ndarray]:
        """All variables, as soon as the consistency mode lets this worker have them.

        Returns:
            Arrays by name, in the variables' shapes and dtypes. They stay as they are for as long as they are used, and
            may be changed.

        Raises:
            Fenced: this worker was declared dead or replaced.
            UnknownJob: the job is gone.
            Unreachable: a server did not answer for `retry_for_s` seconds.
        """
        return self.take(self.fetch(self.step))

    def barrier(self) -> None:
        """Waits until `pull` would answer, without moving the values."""
        self.take(self.fetch(self.step, moves_values=False))

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        *,
        updates: Mapping[str, np.ndarray] | None = None,
        weight: float = 1.0,
        cursor: Cursor | None = None,
    ) -> PushResult:
        """Sends this step's gradients, which count whole or not at all, once however often they are sent.

        Args:
            gradients: of every trainable variable, in its shape and dtype.
            updates: values, or increments where they are summed. Of the non-trainable variables of an aggregation
                either every one or none.
            weight: in a synchronous step's mean, > 0: the number of samples.
            cursor: how far this worker's data has come with it; kept by checkpoints.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit; nothing was sent.
            NonFiniteGradient: NaN or Inf; nothing changed. `skip()` the step, or push it again with other values.
            Fenced, UnknownJob, Unreachable: as for `pull`.
        """
        return self.send(self.prepare(gradients, updates, weight, cursor))

    def skip(self) -> PushResult:
        """Passes this step by, so that nobody waits for this worker's gradient."""
        return self.send(Push(self.step, 0.0, self._versions, lambda link: self._load(link, None, []), []))

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrites some variables' initial values, before training begins; the others keep theirs.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit.
            BadRequest: training has begun.
        """
        everything = {**self.pull(), **values}  # shards are overwritten whole
        self._packer.check(everything, list(Aggregation))
        arrays = Complete(everything)
        push = Push(self.step, 1.0, {}, lambda link: self._load(link, arrays, list(Aggregation)), list(Aggregation))

        def send(link: Link) -> None:
            self._retrying(link, lambda: link.assign(self._header(link, push, commit=False), push.load(link)))

        self._each_server(send)

    def close(self) -> None:
        """Closes all connections; calls in progress end with Cancelled."""
        for link in self._links:
            link.close()
        if self._pool:
            self._pool.shutdown(wait=True)

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The halves of pull and push. Of what other methods use at the same time, `fetch` and `send` change only `step` and
    # a link's lanes, which guards them, so each may run in another thread.

    def fetch(self, step: int, *, ahead: int = 0, moves_values: bool = True) -> Pulled:
        """Pulls from all servers, until all shards are at one step.

        Backup workers may overtake this one, on some shards before others. There is no use in working on a step that
        is closed, and a shard that is behind must hear that this worker passes its step by.

        Args:
            step: how many this worker has finished.
            ahead: 1 for the values of the step after that.
            moves_values: False only waits.
        """
        self._memory.trim()
        while True:
            arrival = Arrival(self._packer, self._memory.take) if moves_values else None
            headers = self._pull_all(step, ahead, arrival)
            newest = max(step + ahead, *(header.step for header in headers))
            if all(header.step == newest for header in headers):
                versions = {header.shard: header.version for header in headers}
                return Pulled(arrival.values() if arrival else {}, versions, newest)
            step = newest - ahead

    def take(self, pulled: Pulled) -> dict[str, np.ndarray]:
        """Goes on from what was fetched."""
        self.step, self._versions = max(self.step, pulled.step), pulled.versions
        return pulled.values

    def prepare(
        self,
        gradients: Mapping[str, np.ndarray],
        updates: Mapping[str, np.ndarray] | None,
        weight: float,
        cursor: Cursor | None = None,
        *,
        memory: Memory | None = None,
    ) -> Push:
        """Checks this step's push and makes it ready.

        Args:
            gradients, updates, weight, cursor: as for `push`.
            memory: for copies, so that the arrays may change before it is sent; None: they will not.
        """
        aggregations = self._brought(weight, updates or {})
        buffers = gradients if isinstance(gradients, GradientBuffers) else None
        unchanged = buffers is not None and buffers.unchanged
        if buffers is not None and not unchanged:
            buffers.convert()
        arrays = {**gradients, **updates} if updates else gradients
        if updates or not unchanged:
            self._packer.check(arrays, aggregations)

        def load(link: Link) -> Load:
            return link.prepare(self._load(link, Complete(arrays), aggregations), memory)

        lent: Mapping[Link, Load] | None = None
        if buffers is not None:
            lent = buffers.take(self._links, updates or {}, aggregations, unchanged=unchanged)
        part: Callable[[Link], Load] = load
        if lent:
            part = partial(_lent, lent, load)
        elif memory:
            part = partial(_ready, {link: self._retrying(link, partial(load, link)) for link in self._links})
        return Push(self.step, weight, self._versions, part, aggregations, cursor=cursor)

    def buffers(self, memory: Memory) -> GradientBuffers:
        """Arrays to compute this step's gradients into.

        Args:
            memory: where none is shared.
        """
        loads = {}
        for link in self._links:
            empty = self._load(link, None, [Aggregation.TRAINABLE])
            loads[link] = self._retrying(link, partial(link.lend, empty, memory))
        return GradientBuffers(self._packer, loads)

    def begin(self, updates: Mapping[str, np.ndarray] | None, weight: float, cursor: Cursor | None = None) -> Push:
        """Makes a push ready whose gradients are still to come, by `feed`. Meanwhile another thread may `send` it.

        Args:
            updates, weight, cursor: as for `push`; updates are copied.
        """
        aggregations = self._brought(weight, updates or {})
        outgoing = Outgoing()
        push = Push(
            self.step,
            weight,
            self._versions,
            lambda link: link.prepare(self._load(link, outgoing, aggregations), None),
            aggregations,
            outgoing,
            cursor,
        )
        self._add(push, outgoing, [(name, np.array(array)) for name, array in (updates or {}).items()])
        return push

    def feed(self, push: Push, gradients: Iterable[tuple[str, np.ndarray]]) -> None:
        """Has the gradients go out as they come; they must not change before the push is answered.

        Raises:
            InvalidGradient: as for `push`; the push is given up, and does not count. So it is if `gradients` raises.
        """
        assert push.outgoing is not None
        try:
            self._add(push, push.outgoing, gradients)
            self._packer.check(push.outgoing.arrays, push.aggregations)
            push.outgoing.end()
        finally:
            push.give_up()

    def _brought(self, weight: float, updates: Iterable[str]) -> list[Aggregation]:
        """The aggregations of the arenas that a push brings: those that no update is of do not travel."""
        if not 0 < weight < math.inf:
            raise errors.InvalidGradient(f"a push weighs {weight}; it must weigh more than 0 (skip() passes a step by)")
        known = self._packer.variables
        updated = {known[name].aggregation for name in updates if name in known}
        return [Aggregation.TRAINABLE, *(each for each in _NON_TRAINABLE if each in updated)]

    def _add(self, push: Push, outgoing: Outgoing, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        for name, array in arrays:
            self._packer.check_one(name, array, push.aggregations)
            if name in outgoing.arrays:
                raise errors.InvalidGradient(f"the gradients bring {name!r} twice")
            outgoing.add(name, array)

    def send(self, push: Push) -> PushResult:
        """Pushes to all servers, and goes on to the next step."""
        # A push that brings nothing needs no second phase, unless one that did was begun: should this worker die in
        # between, a server that was not told must not take that one for this.
        brings_nothing = push.weight == 0 and self._staged_step != push.step

        def at_once() -> bool:
            return len(self._links) == 1 or brings_nothing  # which may be others, once the placement is another

        def stage(link: Link) -> pb.PushReply:
            loads: list[Load] = []
            if not at_once():
                self._staged_step = push.step

            def call() -> pb.PushReply:
                if not loads:
                    loads.append(push.load(link))
                return link.push(self._header(link, push, commit=at_once()), loads[0])

            if push.outgoing:
                try:
                    return call()
                except (errors.Unreachable, errors.DeadlineExceeded) as error:
                    # A server waits for the next gradient only so long, and to compute it may take longer.
                    _log.info("a push broke off and is sent again when all is computed", why=error.message)
                    self._on_retry()
                push.outgoing.wait()
            return self._retrying(link, call)

        def commit(link: Link) -> pb.PushReply:
            request = pb.CommitRequest(stamp=self._stamp(push.step), shards=link.indices)
            return self._retrying(link, lambda: link.commit(request))

        replies = self._each_server(stage)
        if not at_once():
            replies = self._each_server(commit)
        return self._conclude(push.step, [shard for reply in replies for shard in reply.shards])

    # Messages.

    def _load(self, link: Link, arrays: Arrays | None, aggregations: Sequence[Aggregation]) -> Load:
        return Load(self._packer, link.layouts, aggregations, arrays)

    def _stamp(self, step: int) -> header_pb2.Stamp:
        return header_pb2.Stamp(
            job=self._placement.job,
            worker=self._worker,
            incarnation=self._incarnation,
            step=step,
            epoch=self._placement.epoch,
            trace=_tracing.carrier(),
        )

    def _header(self, link: Link, push: Push, *, commit: bool) -> pb.PushHeader:
        return pb.PushHeader(
            stamp=self._stamp(push.step),
            shards=link.indices,
            weight=push.weight,
            commit=commit,
            aggregations=[aggregation.value for aggregation in push.aggregations],
            versions=[push.versions.get(index, 0) for index in link.indices],
            cursor=push.cursor.to_proto() if push.cursor else None,
        )

    def _pull_all(self, step: int, ahead: int, arrival: Arrival | None) -> list[header_pb2.ShardHeader]:
        def pull(link: Link) -> list[header_pb2.ShardHeader]:
            request = pb.PullRequest(
                stamp=self._stamp(step), shards=link.indices, headers_only=arrival is None, ahead=ahead
            )
            return self._retrying(link, lambda: link.pull(request, arrival), waits=True)

        return [header for headers in self._each_server(pull) for header in headers]

    def _conclude(self, step: int, shards: Sequence[pb.ShardPush]) -> PushResult:
        outcomes = {shard.outcome for shard in shards}
        outcome: Literal["accepted", "dropped_late", "skipped"] = (
            "accepted" if pb.ACCEPTED in outcomes else "dropped_late" if pb.DROPPED_LATE in outcomes else "skipped"
        )
        following = max(step + 1, *(shard.header.step for shard in shards))
        self.step = max(self.step, following)
        return PushResult(outcome, max(shard.staleness for shard in shards), following)

    # Calls.

    def _use(self, placement: Placement) -> None:
        """Goes by this placement from now on, over fresh links: their shards may be others."""
        for link in self._links:
            link.close()
        self._placement = placement
        self._packer = Packer(placement)
        self._links = [
            Link(address, [shard.layout for shard in shards], self._transport)
            for address, shards in placement.by_server().items()
        ]
        if len(self._links) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(16, thread_name_prefix="shard")

    def _each_server(self, call: Callable[[Link], T]) -> list[T]:
        """Calls every server at once; on an old placement, fetches the new one and calls them all again."""
        call = _tracing.bound(call)
        for _ in range(3):
            try:
                if self._pool is None:
                    return [call(link) for link in self._links]
                try:
                    futures = [self._pool.submit(call, link) for link in self._links]
                except RuntimeError:  # it is shut down
                    raise errors.Cancelled(f"the client of {self._placement.job} was closed") from None
                # All, before one raises: no call of this step may still run when the next one starts.
                wait(futures)
                # Taken out, for a failure's traceback leads here. If it led on to the failure itself, what that was
                # about, such as shared memory, would be kept until the garbage collector finds both.
                return [futures.pop(0).result() for _ in range(len(futures))]
            except errors.StaleEpoch:
                self._use(self._refresh())
        raise errors.StaleEpoch(f"the placement of {self._placement.job} keeps changing; try again later")

    def _retrying(self, link: Link, call: Callable[[], T], *, waits: bool = False) -> T:
        def attempt() -> T:
            while True:
                try:
                    return call()
                except errors.DeadlineExceeded:
                    if not waits:  # a pull that ran into its deadline was waiting for others: ask again
                        raise

        what = f"a server of {self._placement.job}"
        return _rpc.retrying(
            attempt, what=what, address=link.address, for_s=self._retry_for_s, on_retry=lambda _: self._on_retry()
        )


def _lent(loads: Mapping[Link, Load], load: Callable[[Link], Load], link: Link) -> Load:
    """One of the loads that were lent; where the placement changed meanwhile, another with the same arrays."""
    return loads[link] if link in loads else load(link)


def _ready(loads: Mapping[Link, Load], link: Link) -> Load:
    """One of the copies.

    Raises:
        StaleEpoch: there is none for this link: they were made by an earlier placement.
    """
    if link not in loads:
        raise errors.StaleEpoch("the placement changed while gradients were on their way; they are lost: push again")
    return loads[link]


__all__ = ["ParameterClient", "Pulled", "Push", "PushResult"]
