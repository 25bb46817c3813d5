"""Pending push: a push whose header has arrived.

While it waits for the permit to send its gradient, it holds no thread.
"""

import math
import threading
import time
from collections.abc import Callable

from shoal import errors
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.shards import AnswerPush, ShardStore, Stamp


def stamp_of(message: header_pb2.Stamp) -> Stamp:
    """Returns the part of a stamp that names a push within its job."""
    return Stamp(message.worker, message.incarnation, message.step)


class PendingPush:
    """A push's ticket at a lock group.

    Args:
        store: the shards.
        header: header of the push.

    Raises:
        Fenced, StaleGeneration, UnknownJob, UnknownShard, BadRequest: from the store and the group.

    Attributes:
        header: as given.
        memory: buffer pool for the gradient.
        group: the lock group of the job.
        shards: the shards, in the header's order.
        stamp: name of the push.
        opened: whether it asked the group for a permit.
        waited_s: seconds that its thread waited for the permit.
        known: the answer, if the push was committed before; its gradient is then not read.
    """

    def __init__(self, store: ShardStore, header: pb.PushHeader) -> None:
        self.header, self.memory = header, store.memory
        self.group = store.hosted.group(header.stamp.job, header.stamp.generation, header.shards)
        self.shards, self.stamp = self.group.select(header.shards), stamp_of(header.stamp)
        # The group sets the next two, each once, and then calls _on_answer. `on_answer` sets that first, and then looks
        # at the two. So no lock is needed.
        self._wanted: bool | None = None  # None while the push waits for a permit
        self._error: errors.ShoalError | None = None
        self._on_answer: Callable[[], object] | None = None
        self._since, self.waited_s = 0.0, 0.0
        self.opened = False
        self.known = self._open()

    def _open(self) -> AnswerPush | None:
        header, shards = self.header, self.shards
        shards.check_whole("push", self.group.term)
        permit = header.weight > 0 and self.group.needs_permits
        if not permit and (known := self.group.answer_to(self.stamp)):  # a repeated push: its payload is not read
            return known
        if len(header.versions) != len(shards.shards):
            raise errors.BadRequest(
                f"a push to {len(shards.shards)} shards carries {len(header.versions)} versions; send one for each "
                "shard"
            )
        if not 0 <= header.weight < math.inf:
            raise errors.BadRequest(f"the weight of a push is {header.weight}; it must be finite and at least 0")
        if not permit:
            self._wanted = True
            return None
        self.opened = True
        known = self.group.open_push(self, self.stamp)
        self.opened = known is None
        return known

    @property
    def waits(self) -> bool:
        """Whether the push waits for a permit."""
        return self.known is None and self._wanted is None and self._error is None

    @property
    def wanted(self) -> bool:
        """Whether the gradient of the push is to be read now.

        Raises:
            ShoalError: the push was refused while it waited.
        """
        if self._error:
            raise self._error
        return bool(self._wanted)

    @property
    def goes_on(self) -> bool:
        """Whether the push got a permit."""
        return bool(self._wanted)

    def grant(self, *, wanted: bool) -> None:
        """Lets the push go on; the group calls it."""
        self._wanted = wanted
        self._answered()

    def refuse(self, error: errors.ShoalError) -> None:
        """Ends the wait with an error. Has no effect on a push that does not wait."""
        if self.waits:
            self._error = error
            self._answered()

    def on_answer(self, call: Callable[[], object]) -> None:
        """Calls a function when the push stops waiting: on any thread, or immediately if it does not wait now.

        Args:
            call: the function, which may be called twice.
        """
        self._since = time.perf_counter()
        self._on_answer = call
        if not self.waits:
            call()

    def wait(self, within_s: float | None = None) -> None:
        """Waits on this thread, at most `within_s` seconds."""
        answered = threading.Event()
        self.on_answer(answered.set)
        answered.wait(within_s)

    def withdraw(self) -> None:
        """Ends a push that was not staged, and frees its permit."""
        if self.opened:
            self.group.withdraw_push(self, self.stamp)

    def _answered(self) -> None:
        self.waited_s = time.perf_counter() - self._since if self._since else 0.0
        if self._on_answer:
            self._on_answer()


__all__ = ["PendingPush", "stamp_of"]
