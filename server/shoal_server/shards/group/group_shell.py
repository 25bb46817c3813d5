"""Group shell: passes events to the state machine of a lock group under its lock, and carries out the effects.

`LockGroup` adds the calls that make the events.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial

from shoal import errors
from shoal._limits import catalogue
from shoal._memory.buffers import BufferPool
from shoal._wire import ShardLayout
from shoal_server.shards.group import tickets
from shoal_server.shards.group.backup_wait import Confirmation, SendingGradient
from shoal_server.shards.group.call_wait import CallWait
from shoal_server.shards.group.commit_gate import CommitGate
from shoal_server.shards.group.input_logs import InputLogs
from shoal_server.shards.group.pending_copy import PendingCopy
from shoal_server.shards.group.pending_cut import PendingCut
from shoal_server.shards.group.pending_split import PendingSplit
from shoal_server.shards.machine import events
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.mode import Apply, Fold, Mode
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.values import Cut, JobShardConfig, Payload, ReaderMemory, Selections, StoredShards, Updates

# Inputs that the backup may lack while more are taken.
MAX_BACKLOG = catalogue.REPLICA_BACKLOG.default
# Versions after which a backup compares its values with those of the primary.
HASHED_VERSIONS = 1_000


class GradientNotSent(Exception):
    """A copy has begun, and its backup lacks the arrays of this push. Nothing has changed; send them, and repeat."""


class GroupShell:
    """The lock, the state machine and the shards of a job on one server.

    Args:
        config: the job's configuration.
        layouts: layouts of the shards.
        on_apply: called with the seconds that each update took.
        memory: provides memory for copies of the values.
        on_admission: called with each pull and push that is let through, under the group's lock. Tests use it.
        norms: sends squares to the other servers of the job; needed if the configuration has peers.
        readers: counts the bytes that the readers of all groups use.
        follows: for a backup, the term of its primary, which sends the values. None means a primary.

    Attributes:
        config: the job's configuration.
        commit_gate: the gate that the job's commits pass.
        follows: whether this is a backup. Guarded by the lock.
        term: the term of the primary, as far as known; 0 before the coordinator has told one. Guarded by the lock.
    """

    def __init__(
        self,
        config: JobShardConfig,
        layouts: Iterable[ShardLayout],
        on_apply: Callable[[float], None] = lambda _: None,
        memory: BufferPool | None = None,
        on_admission: Callable[[events.Admission], object] | None = None,
        norms: NormOutbox | None = None,
        readers: ReaderMemory | None = None,
        follows: int | None = None,
    ) -> None:
        self.config, self.commit_gate = config, CommitGate()
        self._memory, self._readers = memory or BufferPool(0, 0.0), readers or ReaderMemory()
        # Guards the numbers of readers of all snapshots; taken alone or after _lock, and no lock is taken under it.
        self._counting = threading.Lock()
        # Guards _state, _stored, _cut, _closed, _failure, _unfilled, _reading, and the slabs' values and slots, except
        # that a restore fills these without it: all else is refused meanwhile. Only the locks of snapshots, of the
        # reader memory, of the fold queue and of the kernel threads are taken under it, all briefly, and nothing is
        # sent. Kernels run under it without the GIL; a large one waits until the threads that joined it are done.
        self._lock = threading.Lock()
        self._state = GroupState(config.name, self._new_mode(), on_admission=on_admission, peers=self._peers)
        self._norms = norms
        self._cut: PendingCut | None = None  # the cut that waits for the open step to close
        self._closed = False
        self._failure = ""  # why an update failed, so that the values are unusable; "" if none has
        self._unfilled = self._reading = False  # a restore is not complete; it reads now
        self._updates = Updates(lambda: self._stored, on_apply, self._memory)
        # Replaced as a whole when shards are added, so that it is read without the lock.
        self._stored = StoredShards(config, layouts, self._counting, fills=follows is None)
        self._selections = Selections(config)
        self._limit_permits()
        self._logs = InputLogs(config.name)  # of the copies that get inputs. Guarded by _lock, like the rest
        self._copy: PendingCopy | None = None  # the copy that waits for a moment at which it can begin
        self._split: PendingSplit | None = None  # the split that waits for such a moment
        self.follows, self.term = follows is not None, follows or 0
        self._followed_term = self.term  # of a backup: the term in which it was begun
        self._ahead = 0  # of a backup: inputs that the primary believes it has, and that are not carried out yet
        self._moved = False  # other servers or lock groups have the shards now
        self._settles = False  # it was split, and its last answers wait until its backup has the split

    @property
    def closed(self) -> bool:
        """Whether the shards were dropped, or became unusable by an error."""
        return self._closed

    def close(self, effects: Iterable[events.LockGroupEffect] = ()) -> None:
        """Refuses waiting and later calls, and those that these effects would have answered."""
        with self._lock:
            self._closed = True
            waiting = self._state.abandon_all()
            if self.follows:
                waiting = []  # a backup has no callers: its tickets are numbers
            if self._cut:
                self._cut.refuse(self._gone())
            if self._copy:
                self._copy.refuse(self._gone())
            if self._split:
                self._split.refuse(self._gone())
        if self._norms:
            self._norms.close()
        if not self._settles:
            self._logs.close()
        tickets.refuse_all([*waiting, *tickets.answered_by(effects)], self._gone(), self.config.name)
        self.commit_gate.close()  # last, so that held commits find the group closed

    def confirmation(self, waiting: set[CallWait]) -> Confirmation | None:
        """Returns the wait for the backup that everything learnt from the group so far needs before it is told.

        Args:
            waiting: gets the wait until its end.

        Returns:
            None if nothing has to wait: there is no backup, or it has all inputs.

        Raises:
            Moved: the group was closed before the backup had all inputs.
        """
        if not self._logs:
            return None
        confirmation = Confirmation(self._logs, waiting)
        if confirmation.waits:
            return confirmation
        confirmation.check()
        return None

    def send_gradient(self, payload: Payload, waiting: set[CallWait]) -> SendingGradient | None:
        """Sends the arrays of a push to the backup, before the push is staged.

        Otherwise, `stage` does this, and waits in its thread. If the push is not staged, call `drop_gradient`.

        Args:
            payload: the arrays. They do not change before the push is staged.
            waiting: gets the wait until its end.

        Returns:
            The wait until they are sent; None if the push can be staged now.
        """
        if not self._logs.lacks_gradient(payload):
            return None
        sending = SendingGradient(self._logs, payload, waiting)
        return sending if sending.waits else None

    def _check_backlog(self) -> None:
        """Raises Overloaded if the backup is so far behind that no more inputs of workers and readers may wait."""
        for log in self._logs:
            if (backlog := log.backlog) >= MAX_BACKLOG:
                problem = f"{self.config.name}: the backup on {log.server} has not confirmed {backlog} inputs"
                raise catalogue.REPLICA_BACKLOG.refusal(problem, "repeat the call later", limit=MAX_BACKLOG)

    def drop_gradient(self, payload: Payload) -> None:
        """Forgets the arrays of a push that is not staged."""
        self._logs.drop_gradient(payload)

    def _advance(
        self, event: events.LockGroupEvent, cut: PendingCut | None = None, *, ends: bool = False
    ) -> list[events.LockGroupEffect]:
        """Handles an event and carries out the effects. If `ends` is set, a closed group ignores the event."""
        with self._lock:
            if ends and self._closed:
                return []
            self._check_open()
            before = self._state.version
            effects = self._feed(event)
            self._cut = cut or self._cut  # an earlier one has expired
            if self._state.permits.waiting:
                # Here as well as after folding, so that one of the two sees the other: no push may wait forever.
                effects += self._feed(events.Folded(self._updates.folds.count))
            if any(isinstance(effect, Apply) for effect in effects):
                self._logs.flush_at_once()  # so that the backup computes the update at the same time
            try:
                self._updates.carry_out(effects, self._state.version)
                if self.config.peers and any(isinstance(effect, events.MeasureNorm) for effect in effects):
                    more = self._feed(events.NormMeasured(self._updates.measure()))
                    self._updates.carry_out(more, self._state.version)
                    effects += more
                if self._cut:
                    self._take_cut(self._cut, effects)
            except BaseException as cause:
                self._fail(cause)  # the state machine counts the update as applied
            if self._state.version // HASHED_VERSIONS != before // HASHED_VERSIONS:
                self._logs.add_hash(self._stored.values_hash)
            self._try_pending()
            number = self._logs.number
        if self._failure:
            self.close(effects)
            raise self._gone()
        self._logs.flush()
        if tickets.tells(effects):
            self._logs.when_copied(number, partial(self._deliver, effects), partial(self._refuse, effects))
        folds = [effect for effect in effects if isinstance(effect, Fold)]
        if folds:
            self._work_on_folds()
        return [*effects, *self._advance(events.FoldsDone())] if folds and folds[-1].seals else effects

    def _feed(self, event: events.LockGroupEvent) -> list[events.LockGroupEffect]:
        """Gives an event to the state machine and to the logs. Called with the lock held.

        Raises:
            GradientNotSent: a log lacks the arrays of a push.
        """
        if self._logs.lacks(event):
            raise GradientNotSent
        effects = self._state.handle(event)
        self._logs.add(event)  # after the machine, which refuses an event before it changes anything
        return effects

    def _deliver(self, effects: Iterable[events.LockGroupEffect]) -> None:
        """Tells the effects to those who wait for them."""
        for effect in effects:
            if isinstance(effect, events.ShareNorm) and self._norms:
                self._norms.send(effect.step, effect.squares)
            tickets.deliver(effect, self.config.name)

    def _refuse(self, effects: Iterable[events.LockGroupEffect]) -> None:
        tickets.refuse_all(tickets.answered_by(effects), self._gone(), self.config.name)

    def _try_pending(self) -> None:
        """Begins the copy or makes the split that waits, if that can be done now. Called with the lock held."""
        if self._copy:
            self._try_copy(self._copy)
        if self._split:
            self._try_split(self._split)

    def _try_copy(self, copy: PendingCopy) -> None:
        """Begins a copy if it can begin now. A failure ends only the copy. Called with the lock held."""
        try:
            if copy.begin(self._state, self._stored, self._memory):
                self._logs.begin(copy.log, self._ahead)
                self._copy = None
        except Exception as error:
            self._copy = None
            copy.refuse(errors.InternalError(f"the copy could not begin: {type(error).__name__}: {error}"))

    def _try_split(self, split: PendingSplit) -> None:
        """Splits the group if that can be done now. It refuses all calls then. Called with the lock held.

        The open step must have no contribution, because running sums are not split. And no cut may have begun, because
        its second call would find other groups.
        """
        if self._state.is_copyable and not (self._cut or self._unfilled or self._closed or self.commit_gate.is_held):
            self._split = None
            if split.attempt():
                self._closed = self._moved = True

    def _take_cut(self, cut: PendingCut, effects: Iterable[events.LockGroupEffect]) -> None:
        """Takes the snapshots of a cut if it is answered. Called with the lock held."""
        for effect in effects:
            if isinstance(effect, events.AnswerCut):
                cut.take(partial(self._cut_of, effect))
                self._cut = None

    def _cut_of(self, answer: events.AnswerCut) -> Cut:
        return Cut(answer, self._stored.begin_saving(self._state.version))

    def _work_on_folds(self) -> None:
        """Folds without the lock. The caller waits for its own contribution, so that none arrive faster than that."""
        try:
            more = True
            while more:
                more = self._updates.folds.work(at_once=not self._state.permits.waiting)
                if self._state.permits.waiting:
                    self._advance(events.Folded(self._updates.folds.count), ends=True)
        except BaseException as cause:
            with self._lock:
                self._fail(cause)  # the sums lack a contribution that counts as accepted
            self.close()
            raise self._gone() from cause

    def _fail(self, cause: BaseException) -> None:
        """Closes the group, because an update failed. Called with the lock held; then call `close` without it."""
        self._failure = self._failure or tickets.failed_update(cause, self.config.name)
        self._closed = True

    def _check_open(self) -> None:
        """Raises an error if the group is closed, a backup or being restored. Called with the lock held."""
        if self._closed:
            raise self._gone()
        if self.follows:
            raise errors.Moved(
                f"this server has the backup of these shards of {self.config.name}; fetch the placement for the primary"
            )
        if self._unfilled:
            raise errors.NotPlaced(f"the shards of {self.config.name} are being restored; try again later")

    def _new_mode(self) -> Mode:
        """Returns the mode of a machine that has no state yet."""
        return mode_for(self.config.consistency, shares_norms=bool(self.config.peers))

    @property
    def _peers(self) -> list[str]:
        """Member ids of the other servers of the job, if updates need the norm of the whole gradient."""
        return [peer.server for peer in self.config.peers]

    def _gone(self) -> errors.ShoalError:
        return tickets.refusal(self.config.name, self._failure, moved=self._moved)

    def _limit_permits(self) -> None:
        self._state.permits.limits = self._state.mode.permit_limits(self._stored.value_bytes)


__all__ = ["GradientNotSent", "GroupShell"]
