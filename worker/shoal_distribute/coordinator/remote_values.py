"""Remote values: results of scheduled functions that may not be there yet."""

import threading
from typing import Any

from shoal_distribute.coordinator.execution import Await
from shoal_distribute.coordinator.outcomes import ScheduledOutcome


class RemoteValue:
    """The result of a scheduled function. `ClusterCoordinator.schedule` returns it.

    Args:
        wait: waits for the call, and returns how it ended.
        name: name of the function.
    """

    def __init__(self, wait: Await, name: str) -> None:
        self._wait, self._name = wait, name
        self._lock = threading.Lock()  # one thread asks; guards _outcome
        self._outcome: ScheduledOutcome | None = None

    def fetch(self) -> Any:
        """Waits for the function, and returns its result. All tasks get the same one.

        Returns:
            The result on the host, in new arrays: what the function returned, see `ClusterCoordinator.schedule`.

        Raises:
            ProgramError: the function raised an exception. The message has its traceback.
            Cancelled: another function had failed before this one began.
            LimitExceeded: this task asks too late, and the chief does not keep the result any more.
            RanksDisagree, Unreachable: see `ClusterCoordinator`.
        """
        with self._lock:
            if self._outcome is None:
                self._outcome = self._wait()
            outcome = self._outcome
        return outcome.value()

    get = fetch

    def __repr__(self) -> str:
        return f"RemoteValue({self._name})"


__all__ = ["RemoteValue"]
