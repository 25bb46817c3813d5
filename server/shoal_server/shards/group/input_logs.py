"""Input logs: the logs of all copies that a lock group keeps, as one: it numbers inputs, and holds answers for all.

A group has one log at most, except while copies move (docs/decisions/0088).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from shoal import errors
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.machine import events
from shoal_server.shards.values import Payload


class InputLogs:
    """The logs of one lock group: this class numbers inputs, and answers wait until every complete copy has them.

    Args:
        job: name of the job, for messages.

    Methods that change which logs there are, and those that say so, are called with the lock of the group. The others
    may be called on any thread. Iterating returns the logs in the order in which they began.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._number = 0  # of the last input of the group
        # Each log with the number of the last input before it began. Replaced as a whole, so it is read without a lock.
        self._logs: tuple[tuple[int, InputLog], ...] = ()

    def __iter__(self) -> Iterator[InputLog]:
        return iter([log for _, log in self._logs])

    def __bool__(self) -> bool:
        return bool(self._logs)

    @property
    def number(self) -> int:
        """Number of the last input."""
        return self._number

    @property
    def has_backup(self) -> bool:
        """Whether a copy gets inputs, or answers wait for one."""
        return any(log.state is not CopyState.ENDED for log in self)

    def has_complete(self, term: int) -> bool:
        """Returns whether answers wait for the copy that was begun in a term."""
        return any(log.term == term and log.state in (CopyState.COMPLETE, CopyState.BROKEN) for log in self)

    def begin(self, log: InputLog, owed: int = 0) -> None:
        """Adds a log, which gets all later inputs. Called with the lock of the group.

        Args:
            log: the log.
            owed: as for `InputLog.owe`.
        """
        log.owe(owed)
        self._logs = (*self._logs, (self._number, log))

    def keep(self, term: int) -> list[InputLog]:
        """Removes all logs except that of one term. Called with the lock of the group.

        Args:
            term: the term; 0 for none.

        Returns:
            The removed logs. The caller ends them without the lock.
        """
        removed = [log for log in self if log.term != term]
        self._logs = tuple(it for it in self._logs if it[1].term == term)
        return removed

    # Inputs.

    def send_gradient(self, payload: Payload) -> None:
        """Sends the arrays of a push to the copies that lack them. Called before it is staged, without the lock."""
        for _, log in self._logs:
            if log.lacks_gradient(payload):
                log.send_gradient(payload)

    def begin_gradient(self, payload: Payload, sent: Callable[[], object]) -> Callable[[], object]:
        """Sends the arrays of a push to the copies that lack them, as `send_gradient`, but without a wait.

        Args:
            payload: the arrays.
            sent: called when they are sent, or the connections are broken: at once, or on another thread.

        Returns:
            A function that withdraws the arrays. It must not be called after `sent`.
        """
        sends = [partial(_send, log, payload) for _, log in self._logs if log.lacks_gradient(payload)]
        forget = _one_by_one(sends, sent, sent)

        def withdraw() -> None:
            forget()
            self.drop_gradient(payload)  # it may be sent to some copies

        return withdraw if len(sends) > 1 else forget

    def lacks_gradient(self, payload: Payload) -> bool:
        """Returns whether a copy needs the arrays of a push, and they were not sent there."""
        return any(log.lacks_gradient(payload) for _, log in self._logs)

    def lacks(self, event: events.LockGroupEvent) -> bool:
        """Returns whether an input stages arrays that `send_gradient` has not sent to all copies."""
        return any(log.lacks(event) for _, log in self._logs) if self._logs else False

    def drop_gradient(self, payload: Payload) -> None:
        """Forgets the arrays of a push that was not staged."""
        for _, log in self._logs:
            log.drop_gradient(payload)

    def add(self, event: events.LockGroupEvent) -> None:
        """Numbers an input that the machine has taken, and that has all its arrays. With the lock of the group."""
        self._number += 1
        for _, log in self._logs:
            log.add(event)

    def add_hash(self, values_hash: Callable[[], int]) -> None:
        """Adds a hash of the values after the last input, if a copy gets it. Called with the lock of the group.

        Args:
            values_hash: returns it.
        """
        if runs := [log for _, log in self._logs if log.runs]:
            number = values_hash()
            for log in runs:
                log.add_hash(number)

    def flush(self) -> None:
        """Sends the inputs that were added."""
        for _, log in self._logs:
            log.flush()

    def flush_at_once(self) -> None:
        """Sends the inputs that were added if that needs no wait. May be called with the lock of the group."""
        for _, log in self._logs:
            log.flush_at_once()

    # Answers.

    def when_copied(
        self, number: int, give: Callable[[], object], refuse: Callable[[], object]
    ) -> Callable[[], object]:
        """Gives an answer when all complete copies have this input: at once if they do, or on another thread.

        Args:
            number: number of the input.
            give: gives the answer. It does not raise.
            refuse: called instead if the group is closed before. It does not raise.

        Returns:
            A function that withdraws the answer. It has no effect when the answer was given or refused.
        """
        waits = [partial(_when_copied, log, number - before, refuse) for before, log in self._logs]
        return _one_by_one(waits, give)

    def wait(self, number: int) -> None:
        """Waits until all complete copies have this input.

        Args:
            number: number of the input.

        Raises:
            Moved: a copy does not get it in time, or the group was closed before, so this server may not be the primary
                any more.
        """
        for before, log in self._logs:
            log.wait(number - before)

    def settle(self) -> None:
        """Waits until each complete copy has the last input, its connection is broken, or too much time has passed."""
        for before, log in self._logs:
            log.settle(self._number - before)

    def unconfirmed(self) -> errors.ShoalError:
        """Returns the error of a call that a copy has not confirmed in time, or before the group was closed."""
        behind = [log for log in self if log.backlog]
        if behind:
            return behind[0].unconfirmed()
        problem = f"{self._job}: a backup has not confirmed the call. Fetch the placement again, and repeat the call"
        return errors.Moved(problem, job=self._job)

    def close(self) -> None:
        """Refuses all answers that wait, because the group is closed."""
        for _, log in self._logs:
            log.close()


# Begins a wait: gets the function to call at its end, and returns a function that withdraws it.
_Wait = Callable[[Callable[[], object]], Callable[[], object]]


def _when_copied(
    log: InputLog, number: int, refuse: Callable[[], object], give: Callable[[], object]
) -> Callable[[], object]:
    return log.when_copied(number, give, refuse)


def _send(log: InputLog, payload: Payload, sent: Callable[[], object]) -> Callable[[], object]:
    return log.begin_gradient(payload, sent)


def _one_by_one(
    waits: Sequence[_Wait], done: Callable[[], object], too_late: Callable[[], object] = bool
) -> Callable[[], object]:
    """Waits for several things, one after the other, without a thread.

    Args:
        waits: begin the waits.
        done: called at the end of the last one.
        too_late: called at the end of one that was withdrawn too late.

    Returns:
        A function that withdraws the present wait, and all that would follow.
    """
    if not waits:
        done()
        return bool
    if len(waits) == 1:  # as usual
        return waits[0](done)
    return _WaitSequence(waits, done, too_late).withdraw


class _WaitSequence:
    """Waits that follow each other; see `_one_by_one`."""

    def __init__(self, waits: Sequence[_Wait], done: Callable[[], object], too_late: Callable[[], object]) -> None:
        self._left, self._done, self._too_late = deque(waits), done, too_late
        self._withdrawn = False
        self._forget: Callable[[], object] = bool
        self._go_on()

    def _go_on(self) -> None:
        if self._withdrawn:
            self._too_late()
        elif self._left:
            # If the next wait ends on another thread meanwhile, this is the withdrawal of one that has ended. A later
            # one then ends as withdrawn too late.
            self._forget = self._left.popleft()(self._go_on)
        else:
            self._done()

    def withdraw(self) -> None:
        self._withdrawn = True
        self._forget()


__all__ = ["InputLogs"]
