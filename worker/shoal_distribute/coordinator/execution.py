"""Execution of one scheduled call in this process."""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from shoal import errors
from shoal_distribute.coordinator.outcomes import OutcomeKind, ScheduledOutcome

# Enters the scope of the strategy, in the calling thread.
Scope = Callable[[], AbstractContextManager[object]]
# Waits for a call, and returns how it ended.
Await = Callable[[], ScheduledOutcome]


class CallScheduler(Protocol):
    """What a `ClusterCoordinator` does in one kind of task: in the chief, in a worker, or in the only process."""

    def schedule(self, name: str, function: Callable[[], Any]) -> Await:
        """Schedules a call. Waits while too many are unfinished.

        Args:
            name: name of the function.
            function: runs it in this process, with its arguments.

        Returns:
            A function that waits for the call.

        Raises:
            ProgramError: an earlier call has failed.
            RanksDisagree: the tasks run different scripts.
            Unreachable: the other tasks have ended.
        """
        ...

    def join(self) -> None:
        """Waits until all scheduled calls have ended.

        Raises:
            ProgramError, RanksDisagree, Unreachable: see `schedule`.
        """
        ...

    def done(self) -> bool:
        """Returns whether all scheduled calls have ended.

        Raises:
            ProgramError, RanksDisagree, Unreachable: see `schedule`.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """Ends this task's part.

        Args:
            failed: whether the script ends with an exception.
        """
        ...


def execute(function: Callable[[], Any], call: str, worker: str, scope: Scope) -> ScheduledOutcome:
    """Runs a call in the scope of the strategy.

    Args:
        function: runs it.
        call: names the call in messages.
        worker: names this process in messages.
        scope: enters the scope.

    Returns:
        The result, or an error with the traceback.

    Raises:
        Fenced: the session of this process was declared lost, so another worker has to run the call.
    """
    try:
        with scope():
            return ScheduledOutcome.of_value(function())
    except errors.Fenced:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        ended = isinstance(error, StopIteration)
        hint = " (its data set has no more elements: make it endless with repeat())" if ended else ""
        trace = "".join(traceback.format_exception(error)).rstrip()
        text = f"{call} failed on {worker}: {type(error).__name__}{': ' if said else ''}{said}{hint}\n{trace}"
        return ScheduledOutcome.of_text(OutcomeKind.ERROR, text)


__all__ = ["Await", "CallScheduler", "Scope", "execute"]
