"""Lock group: a job's shards on one server, with one lock, one state machine and one version.

All changes to the shards go through this class. Because they share one clock, one stream of events and one table of
waiting pulls, a pull or a push costs the same bookkeeping for 16 shards as for one. Small arenas of all shards share
slabs. A shard stays the unit of placement, of layouts and of checkpoint files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from shoal import errors, optim
from shoal._wire import Cursor, ShardLayout, Slab
from shoal.status import UndeliveredNorm
from shoal_server.shards.group.group_shell import GradientNotSent
from shoal_server.shards.group.pending_cut import NORM_WAIT_S, PendingCut
from shoal_server.shards.group.splittable_group import SplittableGroup
from shoal_server.shards.group.tickets import PullTicket, PushTicket
from shoal_server.shards.machine import events
from shoal_server.shards.machine.mode import check_rate
from shoal_server.shards.machine.norm_exchange import check_squares, pushed_squares
from shoal_server.shards.machine.worker_progress import WorkerProgress
from shoal_server.shards.values import Arena, Cut, Payload, Reading, Selection, Shard, Stamp, StoredShards, ValueReader

_NOBODY = ValueReader()


class LockGroup(SplittableGroup):
    """A job's shards on one server.

    A method may return before the backup has what it did. What it returns may be told to somebody else when the
    `confirmation` that is asked for after it has ended. Only `cut` waits for the backup itself.

    Args and attributes: see `GroupShell`.
    """

    @property
    def shards(self) -> Sequence[Shard]:
        """The shards, in the order of their creation."""
        return [*self._stored.by_number.values()]

    def __contains__(self, shard: int) -> bool:
        return shard in self._stored.by_number

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return self._stored.nbytes

    @property
    def queues(self) -> tuple[int, int, int]:
        """Number of waiting pulls, of staged pushes, and of pushes that wait for a permit."""
        # Without the lock: heartbeats call this, and an update may take long.
        return self._state.waiting, self._state.staged, self._state.permits.waiting

    @property
    def undelivered_norms(self) -> Sequence[UndeliveredNorm]:
        """The norms of the open step that other servers have not taken for some seconds."""
        return self._norms.undelivered() if self._norms else ()

    @property
    def version(self) -> int:
        """Updates applied."""
        with self._lock:
            return self._state.version

    def select(self, indices: Sequence[int], slot: str = "") -> Selection:
        """Returns some of the shards, in this order.

        Args:
            indices: numbers of the shards.
            slot: the optimizer slot that the call moves; "" means the values.

        Raises:
            BadRequest: no shard is named, or one is named twice; or the optimizer has no such slot.
            UnknownShard, Moved: this server does not host them, or not all.
        """
        return self._selections.find(self._stored, indices, slot)

    def add(self, layouts: Iterable[ShardLayout]) -> None:
        """Creates the shards that the group does not have yet.

        Raises:
            BadRequest: training has begun, so that new shards would lack updates; the group has a backup; or the shards
                have variables that the job did not have before.
        """
        # Allocated without the lock, because filling gigabytes takes seconds. The store lets one caller in at a time.
        fresh = [layout for layout in layouts if layout.shard not in self._stored.by_number]
        if not fresh:
            return
        self._check_variables(fresh)
        stored = StoredShards(self.config, fresh, self._counting, self._stored)
        with self._lock:
            if self._closed:  # split meanwhile
                raise self._gone()
            self._check_no_backup()
            if self._state.begun:
                raise errors.BadRequest(
                    f"{self.config.name}: training has begun; shards {[layout.shard for layout in fresh]} can only be "
                    "added before that, or at a later generation"
                )
            self._stored = stored
            self._selections.clear()
            self._limit_permits()

    def _check_variables(self, layouts: Iterable[ShardLayout]) -> None:
        """Raises BadRequest if layouts have variables that the group was not created with."""
        named = {part.variable for layout in layouts for arena in layout.arenas for part in arena.slices}
        if unknown := sorted(named - self.config.variables.keys()):
            raise errors.BadRequest(
                f"{self.config.name} has no variables {', '.join(unknown[:3])} at generation {self.config.generation}; "
                "other variables need a later generation"
            )

    def answer_to(self, stamp: Stamp) -> events.AnswerPush | None:
        """Returns the answer to a push that was committed before; None if it was not."""
        with self._lock:
            self._check_open()
            return self._state.answer_to(stamp.worker, stamp.incarnation, stamp.step)

    @property
    def needs_permits(self) -> bool:
        """Whether a push with a gradient has to be opened before its gradient is read."""
        return self._state.permits.limits is not None

    def open_push(self, ticket: PushTicket, stamp: Stamp) -> events.AnswerPush | None:
        """Announces a push with a gradient. Its ticket is answered at once, or when its gradient may be read.

        If its call ends without staging the gradient, call `withdraw_push`.

        Args:
            ticket: called with the permit.
            stamp: name of the push.

        Returns:
            As `answer_to`. If there is an answer, the ticket is not called.

        Raises:
            Fenced, BadRequest, Overloaded: as for `stage`.
        """
        self._check_backlog()
        effects = self._advance(events.PushOpened(ticket, stamp.worker, stamp.incarnation, stamp.step))
        return next((effect for effect in effects if isinstance(effect, events.AnswerPush)), None)

    def withdraw_push(self, ticket: PushTicket, stamp: Stamp) -> None:
        """Ends an opened push that was not staged. Otherwise has no effect."""
        self._advance(events.PushWithdrawn(ticket, stamp.worker), ends=True)

    def stage(
        self,
        stamp: Stamp,
        weight: float,
        version: int,
        payload: Payload | None,
        cursor: Cursor | None = None,
        squares: float | None = None,
        learning_rate: float | None = None,
    ) -> events.AnswerPush:
        """Stages a complete push until it is committed. A repeated push gets the first answer.

        Args:
            stamp: name of the push.
            weight: weight in the step's mean, >= 0.
            version: version of the shards at the worker's pull.
            payload: gradients by slab; None if the weight is 0.
            cursor: the worker's position in its data.
            squares: sum of the squares of the whole push, on all servers.
            learning_rate: that of the update, finite and >= 0; None means that of the job.

        Returns:
            The answer "staged", or the first answer if the push was committed before.

        Raises:
            Fenced: the worker is not admitted.
            BadRequest: the step was answered long ago, or may not begin yet. Or `squares` is needed but missing, or it
                or the learning rate is not valid.
            Overloaded: the backup is too far behind.
        """
        self._check_backlog()
        check_rate(learning_rate or 0.0, f"a push of {stamp.worker}")
        wanted = payload is not None and bool(self.config.peers) and not self.config.consistency.joins_gradients
        squares = pushed_squares(self.config.name, squares) if wanted else None
        event = events.PushStaged(
            stamp.worker, stamp.incarnation, stamp.step, weight, version, payload, cursor, squares, learning_rate
        )
        effects = None
        while effects is None:
            effects = self._stage(event, payload)
        return events.only(effects, events.AnswerPush)

    def _stage(self, event: events.PushStaged, payload: Payload | None) -> list[events.LockGroupEffect] | None:
        """Sends the arrays of a push to the backup, and stages it. Returns None if a copy has begun in between."""
        if payload is not None:
            self._logs.send_gradient(payload)
        try:
            return self._advance(event)
        except GradientNotSent:
            return None
        except BaseException:
            if payload is not None:
                self._logs.drop_gradient(payload)
            raise

    def commit(self, stamp: Stamp) -> events.AnswerPush:
        """Commits a staged push.

        Raises:
            NotStaged: no push with this stamp is staged.
            Fenced: the worker is not admitted.
        """
        event = events.PushCommitted(stamp.worker, stamp.incarnation, stamp.step, defers=True)
        return events.only(self._advance(event), events.AnswerPush)

    def receive_norm(self, server: str, step: int, squares: Sequence[float]) -> None:
        """Receives the squares of a synchronous step's mean on another server of the job.

        Args:
            server: member id of the server.
            step: the step.
            squares: the sum of the squares of each slice.

        Raises:
            BadRequest: a sum is not valid, the server is not one of the job, or the step is not open yet.
        """
        check_squares(squares, f"{self.config.name}: the norm of {server}")
        self._advance(events.NormReceived(server, step, tuple(squares)))

    def pull(self, ticket: PullTicket, stamp: Stamp, ahead: int = 0) -> None:
        """Asks for the values. The ticket is answered at once, or when the consistency mode permits it.

        If too many pulls wait, it is refused.

        Args:
            ticket: called with the answer.
            stamp: worker, incarnation and step.
            ahead: steps after the stamp's step for which the values are wanted.

        Raises:
            Fenced: the worker is not admitted.
            BadRequest: the step is out of range, or too far ahead.
            Overloaded: the backup is too far behind.
        """
        self._check_backlog()
        self._advance(events.PullRequested(ticket, stamp.worker, stamp.incarnation, stamp.step, ahead))

    def abandon(self, ticket: PullTicket) -> None:
        """Removes a waiting pull. A closed group has none."""
        with self._lock:
            if not self._closed:
                self._feed(events.PullAbandoned(ticket))

    def admit(self, worker: str, incarnation: int, rank: int) -> int:
        """Admits a worker.

        Args:
            worker: name of the worker.
            incarnation: its incarnation.
            rank: its rank in the worker group.

        Returns:
            The step at which it starts on these shards.

        Raises:
            Fenced: this incarnation is fenced.
            BadRequest: another incarnation is still admitted.
        """
        effects = self._advance(events.WorkerAdmitted(worker, incarnation, rank))
        return events.only(effects, events.AnswerAdmission).step

    def fence(self, worker: str, incarnation: int) -> int:
        """Refuses a worker's calls from now on; returns the number of steps that it has committed here."""
        effects = self._advance(events.WorkerFenced(worker, incarnation))
        return events.only(effects, events.AnswerFence).committed_steps

    def release(self, worker: str, incarnation: int, committed_steps: int) -> None:
        """Takes a worker out of the barriers.

        Args:
            worker: name of the worker.
            incarnation: its incarnation.
            committed_steps: largest number of steps that the worker has committed on any server.
        """
        self._advance(events.WorkerReleased(worker, incarnation, committed_steps))

    def set_learning_rate(self, learning_rate: optim.Schedule) -> None:
        """Sets the learning rate of later updates, instead of the optimizer's schedule."""
        self._advance(events.LearningRateSet(learning_rate))

    def assign(self, shards: Selection, values: Mapping[Slab, np.ndarray], updates: int = 0, slot: str = "") -> None:
        """Overwrites initial values, or an optimizer slot.

        Args:
            shards: the shards to overwrite.
            values: values of all slabs of the call; of a slot, only those of TRAINABLE slabs.
            updates: the version of the group from now on.
            slot: the slot; "" means the values.

        Raises:
            BadRequest: training has begun, the group has a backup, or there are too many updates.
        """
        with self._lock:
            self._check_open()
            self._check_no_backup()
            self._feed(events.ValuesAssigned(updates))
            self._stored.leave_to_readers(self._memory)
            shards.scatter(values, {index: slab.array(slot) for index, slab in enumerate(self._stored.slabs)})

    def read(self, shards: Selection, reader: ValueReader = _NOBODY, slot: str = "") -> Reading:
        """Returns the current values of some shards, or a slot, at one version; later updates do not change them.

        Args:
            shards: the shards.
            reader: who reads them.
            slot: the optimizer slot; "" means the values.

        Raises:
            Overloaded: readers use too much memory.
        """
        try:
            with self._lock:
                self._check_open()
                version, stored = self._state.version, self._stored
                hold = None
                if self._readers.counts(stored.value_bytes):
                    hold = self._readers.take(*stored.read_bytes(shards.stored, slots=bool(slot)), reader)
                snapshots = {index: stored.slabs[index].latest(version) for index in shards.stored}
                return Reading(version, shards, snapshots, self._counting, self._readers, hold, slot)
        except errors.Overloaded:
            self._readers.end_slow()
            raise

    def progress(self) -> Mapping[str, WorkerProgress]:
        """Returns each admitted worker's progress on these shards."""
        with self._lock:
            self._check_open()
            return self._state.progress()

    def cut(self, progress: Mapping[str, WorkerProgress], within_s: float = NORM_WAIT_S) -> Cut:
        """Takes the snapshots for a checkpoint, after completing the pushes that any server has committed.

        If a step then waits for the norms of other servers, the snapshots are taken when the step has closed.

        Args:
            progress: the largest progress of each worker on any server.
            within_s: seconds to wait for the norms at most.

        Raises:
            Overloaded: the norms do not arrive in time.
        """
        pending = PendingCut(self.config.name)
        try:
            self._advance(events.CutRequested(progress), pending)
            self._logs.wait(self._logs.number)
        except errors.ShoalError as error:
            pending.abandon(error)
            raise
        return pending.wait(within_s)

    def restore(self, version: int, step: int, read: Callable[[Arena], None]) -> None:
        """Overwrites values and slots, before training begins. Other calls are refused until all are overwritten.

        Args:
            version: number of updates in the restored values.
            step: step to continue with.
            read: fills an arena; called without the lock, because the storage may hang. If it raises Cancelled, the
                restore may be repeated; after another error, the group is closed.

        Raises:
            BadRequest: training has begun, or the group has a backup.
            StorageFailed: an earlier restore still reads.
        """
        with self._lock:
            if self._closed:
                raise self._gone()
            if self._reading:
                raise errors.StorageFailed(
                    f"an earlier restore of {self.config.name} waits for the checkpoint storage; check the storage"
                )
            self._check_no_backup()
            self._feed(events.ValuesRestored(version, step))
            self._unfilled = self._reading = True
            self._stored.leave_to_readers(self._memory)
        closed = unfilled = True
        try:
            for arena in [arena for shard in self.shards for arena in shard.arenas]:
                read(arena)
            closed = unfilled = False
        except errors.Cancelled:
            closed = False
            raise
        finally:
            with self._lock:
                self._closed, self._unfilled, self._reading = self.closed or closed, unfilled, False
        if self.closed:  # the job was dropped meanwhile
            raise self._gone()
