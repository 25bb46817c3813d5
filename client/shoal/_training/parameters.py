"""Pull and push: one participant's way to all shards of a job, wherever they are.

A pull and a push are one call a server, in parallel over the servers: `shoal._training.puller`, `pushing`, and
`placed_servers` for where they go. How a call gets to a server is in `shoal._transport`; how calls overlap with
computing, in `shoal._training.overlap`.
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.placed_servers import PlacedServers
from shoal._training.puller import PullResult, Puller
from shoal._training.pusher import Push, Pusher, PushResult
from shoal._transport import chosen_setting
from shoal._wire import Cursor, Memory, Placement


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
        self._servers = PlacedServers(
            placement,
            refresh=refresh,
            worker=worker,
            incarnation=incarnation,
            retry_for_s=retry_for_s,
            setting=transport or chosen_setting(),
            on_retry=on_retry,
        )
        self._puller, self._pusher = Puller(self._servers), Pusher(self._servers)
        self.step = step
        self._versions: dict[int, int] = {}  # by shard: of the values last pulled

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
        return self.send(self._pusher.nothing(self.step, self._versions))

    def assign(self, values: Mapping[str, np.ndarray]) -> None:
        """Overwrites some variables' initial values, before training begins; the others keep theirs.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit.
            BadRequest: training has begun.
        """
        self._pusher.assign({**self.pull(), **values}, self.step)  # shards are overwritten whole

    def close(self) -> None:
        """Closes all connections; calls in progress end with Cancelled."""
        self._servers.close()

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The halves of pull and push. Of what other methods use at the same time, `fetch` and `send` change only `step` and
    # a connection's transports, which guards them, so each may run in another thread.

    def fetch(self, step: int, *, ahead: int = 0, moves_values: bool = True) -> PullResult:
        """Pulls from all servers, until all shards are at one step.

        Args:
            step: how many this worker has finished.
            ahead: 1 for the values of the step after that.
            moves_values: False only waits.
        """
        return self._puller.fetch(step, ahead=ahead, moves_values=moves_values)

    def take(self, pulled: PullResult) -> dict[str, np.ndarray]:
        """Goes on from what was fetched."""
        self.go_on(pulled.step)
        self._versions = pulled.versions
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
        return self._pusher.prepare(self.step, self._versions, gradients, updates, weight, cursor, memory=memory)

    def buffers(self, memory: Memory) -> GradientBuffers:
        """Arrays to compute this step's gradients into.

        Args:
            memory: where none is shared.
        """
        return self._pusher.buffers(memory)

    def begin(self, updates: Mapping[str, np.ndarray] | None, weight: float, cursor: Cursor | None = None) -> Push:
        """Makes a push ready whose gradients are still to come, by `feed`. Meanwhile another thread may `send` it.

        Args:
            updates, weight, cursor: as for `push`; updates are copied.
        """
        return self._pusher.begin(self.step, self._versions, updates, weight, cursor)

    def feed(self, push: Push, gradients: Iterable[tuple[str, np.ndarray]]) -> None:
        """Has the gradients go out as they come; they must not change before the push is answered.

        Raises:
            InvalidGradient: as for `push`; the push is given up, and does not count. So it is if `gradients` raises.
        """
        self._pusher.feed(push, gradients)

    def go_on(self, step: int) -> None:
        """Takes this step next, or a later one if that was to be next already."""
        self.step = max(self.step, step)

    def send(self, push: Push) -> PushResult:
        """Pushes to all servers, and goes on to the next step."""
        result = self._pusher.send(push)
        self.go_on(result.step)
        return result


__all__ = ["ParameterClient", "PullResult", "Push", "PushResult"]
