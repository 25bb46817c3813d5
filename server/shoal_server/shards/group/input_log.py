"""Input log: numbers the inputs of a primary's state machine, and holds answers until the backup has these inputs.

The log exists while a lock group has a backup, or gets one (docs/decisions/0082). It does not know how inputs travel:
`shoal_server.replication` has the connection. `InputLogs` has the logs of a group.
"""

import enum
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from shoal import errors
from shoal_server.shards.machine import events
from shoal_server.shards.values import Payload

# Seconds that an answer waits for the backup. The coordinator has decided long before that, unless it is away.
COPY_WAIT_S = 30.0


class InputSender(Protocol):
    """The sending end of the connection to a backup."""

    def gradient(self, payload: Payload) -> int:
        """Sends the arrays of a push that is not staged yet. They are sent when the method returns.

        It waits while the backup does not read, so it is called without the lock of the group.

        Returns:
            The number by which the input that stages the push names them. 0 if the connection is broken.
        """
        ...

    def begin_gradient(self, payload: Payload, sent: Callable[[int], object]) -> Callable[[], object]:
        """Sends the arrays of a push, as `gradient`, but on another thread if that needs a wait.

        Args:
            payload: the arrays. They do not change until they are sent or withdrawn.
            sent: called once with what `gradient` returns, at once or on another thread. Not called if the arrays are
                withdrawn before they are being sent.

        Returns:
            A function that withdraws the arrays.
        """
        ...

    def add(self, number: int, event: events.LockGroupEvent, gradient: int) -> None:
        """Adds an input. Called in the order of the numbers, with the lock of the group; it does not wait.

        Args:
            number: number of the input.
            event: the input.
            gradient: number of the arrays of a staged push; 0 for any other input.
        """
        ...

    def add_hash(self, values_hash: int) -> None:
        """Adds a hash of the values after the inputs that were added."""
        ...

    def forget(self, gradient: int) -> None:
        """Tells the backup that no input will name this gradient, because its push was refused."""
        ...

    def flush(self) -> None:
        """Sends the inputs that were added, on another thread if that needs a wait."""
        ...

    def flush_at_once(self) -> None:
        """Sends the inputs that were added if that needs no wait."""
        ...

    def next_gradient(self) -> int:
        """Returns a new number for a gradient."""
        ...

    def ticket(self, ticket: object) -> int:
        """Returns the number of a ticket, from 1."""
        ...

    def close(self) -> None:
        """Ends the connection. May be called twice, and on any thread."""
        ...


class CopyState(enum.Enum):
    """How far the copy of a backup is."""

    GROWING = "growing"  # answers do not wait for it
    COMPLETE = "complete"
    BROKEN = "broken"  # it was complete, and its connection is broken: answers wait for the coordinator's decision
    ENDED = "ended"  # answers do not wait any more: this server has the only copy
    CLOSED = "closed"  # the group is closed: answers that wait are refused


class InputLog:
    """The log of one lock group and one backup.

    Args:
        job: name of the job, for messages.
        term: the term of the primary.
        server: member id of the backup's server.
        sender: sends the inputs.

    Attributes:
        term, server, sender: as given.
        failure: why the connection broke; "" if it has not.
    """

    def __init__(self, job: str, term: int, server: str, sender: InputSender) -> None:
        self._job, self.term, self.server, self.sender = job, term, server, sender
        self.failure = ""
        # Guards the rest. Taken alone or after the lock of the group, and no lock is taken under it.
        self._changed = threading.Condition()
        self._state = CopyState.GROWING
        self._number = 0  # of the last input
        self._copied = -1  # the largest number that the backup has; -1 before it has the values
        self._complete_from = 0  # the backup has all that was told to anybody when it has this input
        self._gradients: dict[int, int] = {}  # numbers of gradients that are not staged yet, by the id of the payload
        # Answers with the number that they wait for; the functions give and refuse them.
        self._held: deque[tuple[int, Callable[[], object], Callable[[], object]]] = deque()

    @property
    def state(self) -> CopyState:
        """How far the copy is."""
        return self._state

    @property
    def complete(self) -> bool:
        """Whether the backup has all that was told to anybody, so that it may be promoted."""
        with self._changed:
            return self._state is CopyState.COMPLETE and self._copied >= self._complete_from

    def owe(self, inputs: int) -> None:
        """Sets how many later inputs the copy must have before it is complete: they were told to somebody already."""
        with self._changed:
            self._complete_from = inputs

    def begin_complete(self) -> bool:
        """Makes answers wait for the backup from now on, which has the values, or gets them by the earlier log.

        The backup confirms that it has them with the number 0.

        Returns:
            Whether the connection is open. If not, nothing has changed.
        """
        with self._changed:
            if self._state is not CopyState.GROWING:
                return False
            self._state = CopyState.COMPLETE
        return True

    def send_gradient(self, payload: Payload) -> None:
        """Sends the arrays of a push before it is staged. Called without the lock of the group."""
        number = self.sender.gradient(payload)
        with self._changed:
            if self.runs:
                self._gradients[id(payload)] = number

    def begin_gradient(self, payload: Payload, sent: Callable[[], object]) -> Callable[[], object]:
        """Sends the arrays of a push, as `send_gradient`, but without a wait.

        Args:
            payload: the arrays.
            sent: called when they are sent, or the connection is broken: at once, or on another thread.

        Returns:
            A function that withdraws the arrays. It has no effect when they are being sent.
        """

        def done(number: int) -> None:
            with self._changed:
                if self.runs:
                    self._gradients[id(payload)] = number
            sent()

        return self.sender.begin_gradient(payload, done)

    def lacks(self, event: events.LockGroupEvent) -> bool:
        """Returns whether an input stages arrays that were not sent."""
        return isinstance(event, events.PushStaged) and event.payload is not None and self.lacks_gradient(event.payload)

    def lacks_gradient(self, payload: Payload) -> bool:
        """Returns whether the backup needs the arrays of a push, and they were not sent."""
        with self._changed:
            return self.runs and id(payload) not in self._gradients

    def drop_gradient(self, payload: Payload) -> None:
        """Forgets the arrays of a push that was not staged."""
        with self._changed:
            number = self._gradients.pop(id(payload), 0)
        if number:
            self.sender.forget(number)

    def add(self, event: events.LockGroupEvent) -> None:
        """Numbers an input that the machine has taken, and that has all its arrays. With the lock of the group."""
        gradient = 0
        with self._changed:
            if isinstance(event, events.PushStaged) and event.payload is not None:
                gradient = self._gradients.pop(id(event.payload), 0)
            self._number += 1
            number, runs = self._number, self.runs
        if runs:
            self.sender.add(number, event, gradient)

    def add_hash(self, values_hash: int) -> None:
        """Adds a hash of the values after the last input. Called with the lock of the group."""
        self.sender.add_hash(values_hash)

    @property
    def number(self) -> int:
        """Number of the last input."""
        return self._number

    @property
    def backlog(self) -> int:
        """Number of inputs that a complete backup has not confirmed."""
        return self._number - self._copied if self._state in (CopyState.COMPLETE, CopyState.BROKEN) else 0

    @property
    def waiting(self) -> int:
        """Number of answers that wait for the backup."""
        return len(self._held)

    def flush(self) -> None:
        """Sends the inputs that were added, on another thread if that needs a wait."""
        self.sender.flush()

    def flush_at_once(self) -> None:
        """Sends the inputs that were added if that needs no wait. May be called with the lock of the group."""
        self.sender.flush_at_once()

    def when_copied(
        self, number: int, give: Callable[[], object], refuse: Callable[[], object]
    ) -> Callable[[], object]:
        """Gives an answer when the backup has this input: at once if it has it, or on another thread.

        Args:
            number: number of the input.
            give: gives the answer. It does not raise.
            refuse: called instead if the group is closed before. It does not raise.

        Returns:
            A function that withdraws the answer. It has no effect when the answer was given or refused.
        """
        with self._changed:
            if self._waits_for(number):
                held = number, give, refuse
                self._held.append(held)
                return partial(self._withdraw, held)
            call = self._outcome(number, give, refuse)
        call()
        return bool

    def _withdraw(self, held: tuple[int, Callable[[], object], Callable[[], object]]) -> None:
        with self._changed, suppress(ValueError):
            self._held.remove(held)

    def wait(self, number: int) -> None:
        """Waits until the backup has this input.

        Args:
            number: number of the input.

        Raises:
            Moved: the backup does not get it in time, or the group was closed before, so this server may not be the
                primary any more.
        """
        with self._changed:
            if not self._waits_for(number) and self._state is not CopyState.CLOSED:  # as usual
                return
            copied = self._changed.wait_for(lambda: not self._waits_for(number), COPY_WAIT_S)
            if copied and (self._state is not CopyState.CLOSED or self._copied >= number):
                return
        raise self.unconfirmed()

    def settle(self, number: int) -> bool:
        """Waits until the backup has this input, its connection is broken, or `COPY_WAIT_S` are over.

        Args:
            number: number of the input.

        Returns:
            Whether the backup has it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._copied >= number or self._state is not CopyState.COMPLETE, COPY_WAIT_S)
            return self._copied >= number

    def unconfirmed(self) -> errors.Moved:
        """Returns the error of a call that the backup has not confirmed in time, or before the group was closed."""
        why = f": {self.failure}" if self.failure else ""
        return errors.Moved(
            f"{self._job}: the backup on {self.server} has not confirmed the call{why}. Fetch the placement again, and "
            "repeat the call",
            job=self._job,
        )

    def wait_for_growth(self, within_s: float) -> None:
        """Waits until the copy is complete, or has failed, so that the backup need not keep more gradients.

        Args:
            within_s: seconds to wait at most.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state is not CopyState.GROWING, within_s)

    @property
    def runs(self) -> bool:
        """Whether the backup gets inputs."""
        return self._state in (CopyState.GROWING, CopyState.COMPLETE)

    def _waits_for(self, number: int) -> bool:
        return self._copied < number and self._state in (CopyState.COMPLETE, CopyState.BROKEN)

    def _outcome(self, number: int, give: Callable[[], object], refuse: Callable[[], object]) -> Callable[[], object]:
        return refuse if self._state is CopyState.CLOSED and self._copied < number else give

    def _ready(self) -> list[Callable[[], object]]:
        ready = []
        while self._held and not self._waits_for(self._held[0][0]):
            ready.append(self._outcome(*self._held.popleft()))
        return ready

    # Called by the connection.

    def copied(self, number: int) -> None:
        """Records that the backup has all inputs up to this one, and all values."""
        with self._changed:
            if self._state is CopyState.GROWING:
                self._state = CopyState.COMPLETE
                self._complete_from = max(self._complete_from, self._number)
            self._copied = max(self._copied, number)
        self._settle()

    def fail(self, why: str) -> None:
        """Records that the connection is broken. Answers then wait for the coordinator if the copy was complete."""
        with self._changed:
            if self._state is CopyState.COMPLETE:
                self._state, self.failure = CopyState.BROKEN, why
            elif self._state is CopyState.GROWING:
                self._state, self.failure = CopyState.ENDED, why
        self._settle()
        self.sender.close()

    # Called by the group.

    def end(self) -> None:
        """Gives all answers, because this server has the only copy."""
        self._end(CopyState.ENDED)

    def close(self) -> None:
        """Refuses all answers that wait, because the group is closed."""
        self._end(CopyState.CLOSED)

    def _end(self, state: CopyState) -> None:
        with self._changed:
            if self._state is not CopyState.CLOSED:
                self._state = state
            self._gradients.clear()
        self._settle()
        self.sender.close()

    def _settle(self) -> None:
        with self._changed:
            ready = self._ready()
            self._changed.notify_all()
        for call in ready:
            call()


__all__ = ["COPY_WAIT_S", "CopyState", "InputLog", "InputSender"]
