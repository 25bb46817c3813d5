"""Values of variables on servers, as one process sees them: what it has pulled, and what its replicas have assigned."""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from shoal import errors
from shoal._system.logs import Log
from shoal_distribute.strategies.server_variable import ServerVariable
from shoal_distribute.threads import start_thread

_log = Log(__name__)

# Seconds that the pull at the end may take. In synchronous mode, it waits for the last push of all other workers.
LAST_PULL_S = 60.0


class ValueSource(Protocol):
    """What the values are pulled from: a session."""

    def pull(self) -> Mapping[str, np.ndarray]:
        """Returns the values of all variables by name."""


class PulledValues:
    """The values of variables: initial ones before training, those of the servers during it, and the last ones after.

    Several replicas may read and assign at once.

    Args:
        last_pull_s: seconds that the pull of `close` may take.
    """

    def __init__(self, last_pull_s: float = LAST_PULL_S) -> None:
        self._last_pull_s = last_pull_s
        self._lock = threading.Lock()  # a source is not thread-safe either
        self._source: ValueSource | None = None
        self._opened = False
        self._pulled: Mapping[str, np.ndarray] | None = None  # in this step, or at the end
        self._assigned: dict[tuple[str, int], np.ndarray] = {}  # by variable and replica, in this step

    def open(self, source: ValueSource) -> None:
        """Begins to pull the values from a session."""
        self._source, self._opened = source, True

    def begin_step(self, *, pulls: bool) -> None:
        """Forgets the values of the last step.

        Args:
            pulls: whether to pull at once, and not at the first read.
        """
        with self._lock:
            self._assigned = {}
            if self._source:
                self._pulled = self._source.pull() if pulls else None

    def forget(self) -> None:
        """Makes the next read pull again."""
        with self._lock:
            if self._source:
                self._pulled = None

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Lets no other thread pull within the block. The next read pulls again."""
        with self._lock:
            yield
            self._pulled = None

    def of(self, variable: ServerVariable, replica: int | None) -> np.ndarray:
        """Returns the value of a variable on the host: what this replica has assigned, or else what was pulled.

        Args:
            variable: the variable.
            replica: number of the replica in this process; None outside of `run`.

        Raises:
            WrongContext: training has ended, and the last values could not be pulled.
        """
        with self._lock:
            if replica is not None and (variable.name, replica) in self._assigned:
                return self._assigned[variable.name, replica]
            if not self._opened:
                return variable.initial
            if self._pulled is None:
                if self._source is None:
                    raise errors.WrongContext(
                        f"variable {variable.name} cannot be read, because the strategy was closed without its last "
                        "values; read the variables before close(), or restore a checkpoint of the job"
                    )
                self._pulled = self._source.pull()
            return self._pulled[variable.name]

    def assign(self, variable: ServerVariable, value: np.ndarray, replica: int | None) -> None:
        """Sets an initial value, or the value of a variable that is not trainable for the push of this step.

        Args:
            variable: the variable.
            value: the value, in its shape and dtype.
            replica: number of the replica in this process; None outside of `run`.

        Raises:
            WrongContext: training has begun, and this is not a variable of the next push.
        """
        with self._lock:
            if replica is not None and not variable.trainable:
                self._assigned[variable.name, replica] = value
            elif not self._opened:
                variable.initial = value
            else:
                raise errors.WrongContext(
                    f"variable {variable.name} is on the servers and cannot be assigned after training has begun; "
                    "assign it before, or give the strategy restore=CHECKPOINT"
                )

    def close(self, *, keeps: bool) -> None:
        """Ends the pulls.

        Args:
            keeps: whether to pull the last values, so that they can be read afterwards. A pull that takes too long
                goes on in a thread of its own, until the caller closes the session. The values are then unknown.
        """
        with self._lock:
            source, self._source, self._assigned = self._source, None, {}
            if not source or not keeps:
                return
            try:
                last = self._last_pull(source) if self._pulled is None else self._pulled
                self._pulled = {name: np.array(value) for name, value in last.items()}
            except errors.ShoalError as error:  # the work is done, and perhaps nothing reads the values
                _log.warning("could not pull the last values of the variables", reason=error.message)

    def _last_pull(self, source: ValueSource) -> Mapping[str, np.ndarray]:
        """Returns the values of a source, which is not used any more if the pull takes too long.

        Raises:
            Unreachable: it took too long.
        """
        outcome: Future[Mapping[str, np.ndarray]] = Future()

        def pull() -> None:
            try:
                outcome.set_result(source.pull())
            except BaseException as error:
                outcome.set_exception(error)

        start_thread(pull, "last-pull")
        try:
            return outcome.result(self._last_pull_s)
        except TimeoutError:
            raise errors.Unreachable(
                f"the servers gave no values within {self._last_pull_s:g} s; in synchronous mode, they wait for the "
                "gradients of the workers that are behind"
            ) from None


__all__ = ["LAST_PULL_S", "PulledValues", "ValueSource"]
