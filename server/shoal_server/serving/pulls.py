"""Pending pull: a pull that its shards have not answered yet. No thread waits for it. Transports send the answers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal import _tracing, errors
from shoal._wire import Buffer, encode_values, messages
from shoal_server.shards import Confirmation, LockGroup, Reading, Selection, Stamp, ValueReader


class PendingPull:
    """A pull's ticket at a lock group. It holds no thread.

    Args:
        group: the lock group to ask.
        shards: the shards to read once it permits that.
        wake: called when there is something to `take`, from any thread and without the group's lock.
        span: tracing span of the call; the sender of the answer ends it.
        check: raises an error if the caller may not have the values any longer.
        waiting: the pulls that wait; this one adds and removes itself.
        reader: who reads the values.
        confirmation: returns what the values have to wait for, once they are read; None if for nothing.
        slot: the optimizer slot to read; "" means the values.

    Attributes:
        check: as given.
    """

    def __init__(
        self,
        group: LockGroup,
        shards: Selection,
        wake: Callable[[], None],
        span: _tracing.Span = _tracing.NOTHING,
        check: Callable[[], object] = bool,
        waiting: "set[PendingPull] | None" = None,
        reader: ValueReader | None = None,
        confirmation: Callable[[], Confirmation | None] = lambda: None,
        slot: str = "",
    ) -> None:
        self.group, self.shards = group, shards
        self._wake, self.check, self._reader = wake, check, reader or ValueReader()
        self._all: set[PendingPull] = set() if waiting is None else waiting  # single operations of a set are atomic
        self._waiting = span.child("wait")
        self._lock = threading.Lock()  # guards what follows; never held together with the group's lock
        self._step: int | None = None
        self._error: errors.ShoalError | None = None
        # What the reply says: the version, and the values unless it has headers alone. Set by the thread that replies.
        self._version: int | None = None
        self._reading: Reading | None = None
        self._confirmation, self._slot = confirmation, slot
        self._confirmed: Confirmation | None = None

    def start(self, stamp: Stamp, ahead: int) -> None:
        """Asks the group, which may answer at once.

        Args:
            stamp: worker, incarnation and step.
            ahead: steps after the stamp's step for which the values are wanted.
        """
        self._all.add(self)
        try:
            if stamp.worker:
                self.shards.check_whole("pull", self.group.term)
            self.group.pull(self, stamp, ahead)
        except errors.ShoalError as error:
            self.refuse(error)

    def answer(self, step: int) -> None:
        """Records that the values may be read, and the next step of the worker."""
        self._all.discard(self)
        with self._lock:
            self._step = step
        self._waiting.end()
        self._wake()

    def refuse(self, error: errors.ShoalError) -> None:
        """Records that the pull has failed."""
        self._all.discard(self)
        with self._lock:
            self._error = self._error or error
        self._waiting.end(error)
        self._wake()

    def take(self) -> int | None:
        """Returns the worker's next step if the values may be read; None if the pull still waits.

        Raises:
            ShoalError: the pull was refused with this error.
            Unauthenticated: the caller's token has expired or was revoked meanwhile.
        """
        with self._lock:
            if self._error:
                raise self._error
            step = self._step
        if step is not None:
            self.check()
        return step

    def ready(self, *, headers_only: bool) -> bool:
        """Reads the values, which `take` has allowed. Returns whether they may be sent now.

        They may depend on updates that came after the pull, and that the backup lacks. If so, `wake` is called when the
        backup has them, and this method is to be called again. A pull that is not sent must be ended with `abandon`.

        Args:
            headers_only: whether to read no values.

        Raises:
            Overloaded: readers use too much memory of the server.
            Moved: the backup has not confirmed the values in time, or the group was closed.
        """
        try:
            if self._version is None:
                self._read(headers_only=headers_only)
            if self._confirmed:
                if self._confirmed.waits:
                    return False
                self._confirmed.check()
        except BaseException:
            self.drop()
            raise
        return True

    def _read(self, *, headers_only: bool) -> None:
        if headers_only:
            self._version = self.group.version
        else:
            self._reading = self.group.read(self.shards, self._reader, self._slot)
            self._version = self._reading.version
        self._confirmed = self._confirmation()
        if self._confirmed:
            self._confirmed.on_end(self._wake)

    def drop(self) -> None:
        """Ends what `ready` has begun, if the values are not sent."""
        with self._lock:
            reading, self._reading = self._reading, None
        if reading:
            reading.end()
        if self._confirmed:
            self._confirmed.withdraw()

    @property
    def waits(self) -> bool:
        """Whether the group has not answered yet, or the values wait for the backup."""
        with self._lock:
            return self._step is None or (self._confirmed is not None and self._confirmed.waits)

    def abandon(self) -> None:
        """Withdraws the ticket: the answer is no longer needed."""
        self._all.discard(self)
        self._waiting.end()
        with self._lock:
            asks = self._step is None
        if asks:
            self.group.abandon(self)
        self.drop()

    def end_if_refused(self) -> None:
        """Ends the wait if the caller may not have the values any longer."""
        try:
            self.check()
        except errors.ShoalError as error:
            self.group.abandon(self)
            self.refuse(error)

    def read(self) -> Reading:
        """Returns the values, which are `ready`. They do not change until the `with` block of the result ends.

        Raises:
            Cancelled: the pull was abandoned.
            ShoalError: as for `ready`.
        """
        self._await_ready(headers_only=False)
        with self._lock:
            reading, self._reading = self._reading, None
        if reading is None:
            raise errors.Cancelled("the caller does not wait for the values any more")
        return reading

    def version(self) -> int:
        """Returns the version for a reply with headers alone. It is `ready`."""
        self._await_ready(headers_only=True)
        assert self._version is not None
        return self._version

    def _await_ready(self, *, headers_only: bool) -> None:
        """Waits in this thread, for a transport that has not called `ready`. Others do not wait here."""
        if self.ready(headers_only=headers_only):
            return
        assert self._confirmed
        ended = threading.Event()
        self._confirmed.on_end(ended.set)
        ended.wait()
        self.ready(headers_only=headers_only)


@contextmanager
def replies(pull: PendingPull, step: int, *, headers_only: bool) -> Iterator[Iterator[tuple[list[Buffer], int]]]:
    """Yields the messages that answer a pull: for each, its pieces and the bytes of its chunks.

    The messages are valid until the `with` block of this call ends, because they share the slabs' memory.

    Args:
        pull: the pull, which was answered.
        step: the worker's next step.
        headers_only: whether to send no values.

    Raises:
        Overloaded: readers use too much memory of the server. From the messages: and this reader is slow.
        Moved: the backup has not confirmed the values in time, or the group was closed.
        Unauthenticated: from the messages, if the caller's token has expired or was revoked meanwhile.
    """
    if headers_only:
        yield iter([(encode_values(pull.shards.headers.of_values(pull.version(), step), []), 0)])
        return
    with pull.read() as reading:
        yield _messages(pull.shards.headers.of_values(reading.version, step), reading, pull.check)


def _messages(headers: bytes, reading: Reading, check: Callable[[], object]) -> Iterator[tuple[list[Buffer], int]]:
    for group in messages(reading.chunks()):
        check()  # a transfer may take long, and the caller's token can be revoked meanwhile
        reading.check()
        yield encode_values(headers, group), sum(len(chunk.data) for chunk in group)
        headers = b""
