"""Client of a job's parameters: pulls and pushes of one participant, over all servers.

Each pull or push makes one call to each server, in parallel: see `puller`, `pusher` and `placed_servers`.
`shoal._transport` carries the calls, and `overlap` lets them overlap with computing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shoal._security import NO_CREDENTIALS, Credentials
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.placed_servers import PlacedServers
from shoal._training.puller import Puller, PullResult
from shoal._training.push_norm import PushNorm
from shoal._training.pusher import Push, Pusher, PushResult
from shoal._transport import chosen_setting
from shoal._wire import Cursor, Memory, Placement
from shoal.optim import OptimizerState

# Pulls of slots until they and all shards have one number of updates.
_STATE_ATTEMPTS = 3


class ParameterClient:
    """Pulls and pushes one job's variables.

    Not thread-safe: a participant takes one step after the other.

    Args:
        placement: placement of the job.
        worker: member id, or "" for a reader, which may pull at any time and never push.
        incarnation: incarnation of the worker.
        step: the first step.
        refresh: returns the placement again when servers report that this one is old.
        retry_for_s: seconds for which calls to a server that does not answer are repeated.
        transport: selects transports; None means the value of SHOAL_TRANSPORT.
        on_retry: called on any thread for each repeated call.
        credentials: what this process presents to the servers.
        norm: measures pushes to several servers; None means that servers do not need their norms.
        locate: returns a placement as it is now, as `failover.locate` does; None means that lock groups never move.
        replicated: whether the job has backups.

    Attributes:
        step: the next step.
        servers: the servers of the job, with a connection to each.
        pusher: prepares and sends the pushes.
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
        credentials: Credentials = NO_CREDENTIALS,
        norm: PushNorm | None = None,
        locate: Callable[[Placement], Placement] | None = None,
        replicated: bool = False,
    ) -> None:
        self.servers = PlacedServers(
            placement,
            refresh=refresh,
            worker=worker,
            incarnation=incarnation,
            retry_for_s=retry_for_s,
            setting=transport or chosen_setting(),
            on_retry=on_retry,
            credentials=credentials,
            locate=locate,
            replicated=replicated,
        )
        self._puller, self.pusher = Puller(self.servers), Pusher(self.servers, norm)
        self.step = step
        self._versions: dict[int, int] = {}  # versions of the last pulled values, by shard

    def pull(self) -> dict[str, np.ndarray]:
        """Returns all variables, as soon as the consistency mode allows it.

        Returns:
            Arrays by name, in the variables' shapes and dtypes. They stay valid while they are used, and may be
            changed.

        Raises:
            Fenced: this worker was declared lost or replaced.
            UnknownJob: the job does not exist any more.
            Unreachable: a server did not answer for `retry_for_s` seconds.
        """
        return self.take(self.fetch(self.step))

    def barrier(self) -> None:
        """Waits until `pull` would answer, without values."""
        self.take(self.fetch(self.step, moves_values=False))

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        *,
        updates: Mapping[str, np.ndarray] | None = None,
        weight: float = 1.0,
        cursor: Cursor | None = None,
        learning_rate: float | None = None,
    ) -> PushResult:
        """Sends this step's gradients. They are applied completely or not at all, and only once even if repeated.

        Args:
            gradients: arrays by variable, for every trainable variable, in its shape and dtype.
            updates: values of non-trainable variables, or increments of those that are summed. If it has one variable
                of an aggregation, it must have all of them.
            weight: weight in a synchronous step's mean, > 0: the number of samples.
            cursor: the worker's position in its data after this push; checkpoints keep it.
            learning_rate: that of the update, finite and >= 0; None means that of the job.

        Returns:
            The result of the push.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit; nothing was sent.
            NonFiniteGradient: a gradient has NaN or Inf, and nothing changed. Skip the step, or push it again with
                other values.
            Fenced, UnknownJob, Unreachable: as for `pull`.
        """
        return self.send(replace(self.prepare(gradients, updates, weight, cursor), learning_rate=learning_rate))

    def skip(self) -> PushResult:
        """Skips this step, so that no worker waits for this worker's gradient."""
        return self.send(self.pusher.nothing(self.step, self._versions))

    def assign(self, values: Mapping[str, np.ndarray], state: OptimizerState | None = None) -> None:
        """Overwrites the initial values of some variables before training begins; the others keep theirs.

        Args:
            values: values by variable.
            state: what `checked_state` returns; None for that of a new job.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit.
            BadRequest: training has begun.
        """
        given = state or OptimizerState()
        self.pusher.assign({**self.pull(), **values}, self.step, given.updates)  # a shard is overwritten completely
        for slot, arrays in given.slots.items():
            self.pusher.assign(arrays, self.step, given.updates, slot)

    @property
    def updates(self) -> int:
        """Number of updates that the last pulled values had received: that of the shard with the fewest."""
        return min(self._versions.values(), default=0)

    def optimizer_state(self, slots: Sequence[str]) -> OptimizerState:
        """Returns slots, with the number of updates that they have received.

        While others push, shards and slots may differ by some updates. The method then pulls again, a few times.

        Args:
            slots: names of all slots of the optimizer.

        Raises:
            Fenced, UnknownJob, Unreachable: as for `pull`.
        """
        of_values = self._versions  # gradients of the values that the caller has belong to these versions
        try:
            for _ in range(_STATE_ATTEMPTS):
                self.barrier()
                pulled = {slot: self._puller.fetch_slot(self.step, slot) for slot in slots}
                self.barrier()
                every = [self._versions, *(it.versions for it in pulled.values())]
                versions = {version for it in every for version in it.values()}
                if len(versions) == 1:
                    break
        finally:
            self._versions = of_values
        return OptimizerState({slot: it.values for slot, it in pulled.items()}, min(versions))

    def close(self) -> None:
        """Closes all connections. Calls in progress end with Cancelled."""
        self.servers.close()

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The halves of pull and push. `fetch` and `send` may each run in another thread: of the shared state they change
    # only `step`, and a connection's transports, which the connection guards.

    def fetch(self, step: int, *, ahead: int = 0, moves_values: bool = True) -> PullResult:
        """Pulls from all servers, until all shards are at one step.

        Args:
            step: number of steps that this worker has finished, which is also the number of its current step.
            ahead: 0 for the values of this step, 1 for those of the next one.
            moves_values: whether to fetch values; False only waits.

        Returns:
            The result, for `take`.

        Raises:
            Fenced, UnknownJob, Unreachable: as for `pull`.
        """
        return self._puller.fetch(step, ahead=ahead, moves_values=moves_values)

    def take(self, pulled: PullResult) -> dict[str, np.ndarray]:
        """Continues from the result of a fetch, and returns its values."""
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
        """Checks this step's push, and makes it ready to send.

        Args:
            gradients, updates, weight, cursor: as for `push`.
            memory: allocates memory for copies, so that the arrays may change before the push is sent. None means that
                they will not change.

        Returns:
            The push, for `send`.

        Raises:
            InvalidGradient: as for `push`.
        """
        return self.pusher.prepare(self.step, self._versions, gradients, updates, weight, cursor, memory=memory)

    def buffers(self, memory: Memory) -> GradientBuffers:
        """Returns arrays for this step's gradients.

        Args:
            memory: allocates memory if the transport has none.
        """
        return self.pusher.buffers(memory)

    def begin(self, updates: Mapping[str, np.ndarray] | None, weight: float, cursor: Cursor | None = None) -> Push:
        """Begins a push whose gradients `feed` adds. Another thread may `send` it meanwhile.

        Args:
            updates, weight, cursor: as for `push`; updates are copied.

        Returns:
            The push.

        Raises:
            InvalidGradient: as for `push`.
        """
        return self.pusher.begin(self.step, self._versions, updates, weight, cursor)

    def feed(self, push: Push, gradients: Iterable[tuple[str, np.ndarray]]) -> None:
        """Adds gradients to a push as they become available. They must not change before the push is answered.

        Args:
            push: a push from `begin`.
            gradients: pairs of name and array.

        Raises:
            InvalidGradient: as for `push`. After this error, or an error of `gradients`, the push has no effect.
        """
        self.pusher.feed(push, gradients)

    def go_on(self, step: int) -> None:
        """Moves the next step forward to this one. Has no effect if the next step is later already."""
        self.step = max(self.step, step)

    def send(self, push: Push) -> PushResult:
        """Pushes to all servers, and continues with the next step."""
        result = self.pusher.send(push)
        self.go_on(result.step)
        return result


__all__ = ["ParameterClient", "PullResult", "Push", "PushResult"]
