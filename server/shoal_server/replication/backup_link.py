"""Backup link: the receiving end of the connection from the primary of one lock group, or from its backup."""

import os
import select
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import numpy as np

from shoal import errors
from shoal._memory.buffers import BufferPool
from shoal._transport import Connection, Frame, decoded, send_error
from shoal.v1 import replica_pb2
from shoal_server.replication.pieces import fill, received_place
from shoal_server.replication.received import EarlyInputs, ReceivedGradients, ReplicaMemory
from shoal_server.shards import GroupSplit, LockGroup, decode_input

# Seconds for the primary to open its second lane, and for inputs in progress to end.
_SECOND_LANE_S, _END_S = 10.0, 60.0
# What travels with the inputs, but has no number.
_NO_INPUTS = {"gradient_dropped", "values_hash"}


class BackupLink:
    """Receives a copy of a group, and then its inputs.

    Args:
        group: the backup.
        lane: the lane on which the primary sends.
        hello: the primary's hello.
        pool: provides memory for gradients.
        memory: counts the bytes of gradients and inputs.
        region: returns the bytes of a region of the lane's segment, by its number.
        divide: called with this connection and the primary's last input if that splits the group.
        copies: of a part of a group that was split: the lane on which this end sends. The group has its values then.

    Attributes:
        group: as given.
        term: the term of the primary.
        primary: the member id of the primary's server, and its incarnation.
        complete: whether the group has all values, so that it may be promoted.
    """

    def __init__(
        self,
        group: LockGroup,
        lane: Connection,
        hello: replica_pb2.ReplicaHello,
        pool: BufferPool,
        memory: ReplicaMemory,
        region: Callable[[int], np.ndarray],
        divide: Callable[["BackupLink", GroupSplit], object],
        copies: Connection | None = None,
    ) -> None:
        self.group, self._lane, self.term = group, lane, hello.term
        self.primary = hello.server, hello.incarnation
        self.complete = copies is not None
        self._divide = divide
        self._changed = threading.Condition()  # guards _copies, _stopped and _ended
        self._copies = copies  # the lane on which this end sends
        self._confirming = threading.Lock()  # held while a frame is sent on _copies; no other lock is taken under it
        self._stopped = self._ended = False
        self._gradients = ReceivedGradients(group, pool, memory, region)
        self._early = EarlyInputs(group.config.name, memory)
        self._last = 0  # number of the last input that arrived

    def run(self) -> None:
        """Receives until the connection ends.

        Raises:
            ShoalError: why it ended.
        """
        try:
            if self.complete:
                self._confirm(0)
            else:
                self._lane.send(Frame.END)  # the group has its memory
            self._lane.detect_loss()  # this end sends on the other lane
            self._receive()
        except errors.ShoalError as error:
            self._tell(error)
            raise
        except Exception as cause:
            failure = errors.InternalError(f"a backup failed: {type(cause).__name__}: {cause}")
            self._tell(failure)
            raise failure from cause
        finally:
            self._early.take()
            self._gradients.clear()
            with self._changed:
                self._ended = True
                self._changed.notify_all()
            if self._copies:
                self._copies.close()  # so that the primary learns that nothing is confirmed any more

    def stop(self) -> None:
        """Ends the connection, and waits until the inputs that have arrived are carried out.

        Raises:
            Overloaded: they take too long.
        """
        with self._changed:
            self._stopped = True
        self._lane.close()
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, _END_S):
                raise errors.Overloaded(f"inputs of {self.group.config.name} take longer than {_END_S:g} s; try again")

    def answer_on(self, copies: Connection) -> Callable[[], None]:
        """Uses a lane for answers from now on.

        Returns:
            A function that waits until the lane is closed, at this end or the other one, and raises Unreachable then.

        Raises:
            BadRequest: there is such a lane already.
            Unreachable: the connection has ended.
        """
        with self._changed:
            follow = accept_copies(copies, self._copies, ended=self._ended or self._stopped)
            self._copies = copies
            self._changed.notify_all()
        return follow

    def _receive(self) -> None:
        lane, state, missing = self._lane, replica_pb2.GroupState(), 0
        if not self.complete:
            kind = lane.begin()
            if kind is not Frame.STATE:
                raise errors.BadFrame(f"{lane.peer} sent {kind.name} before the state of a replica")
            state, missing = decoded(replica_pb2.GroupState, lane), self.group.stored_elements
        while True:
            if not missing and not self.complete:
                told = self.group.arrive(self._last)
                self.group.load(state, self._gradients.take)
                self.complete = True
                self._confirm(self._last)
                self._carry_out(self._early.take(), told=told)
            kind = lane.begin()
            if kind is Frame.SLOTS:
                missing -= self._fill_values()
            elif kind is Frame.GRADIENT:
                self._gradients.receive(lane)
            elif kind is Frame.INPUTS:
                self._take_inputs(decoded(replica_pb2.ReplicaInputs, lane))
            else:
                raise errors.BadFrame(f"{lane.peer} sent {kind.name} on the connection of a replica")

    def _fill_values(self) -> int:
        place, taken = received_place(self._lane)
        if self.complete:
            raise errors.BadFrame(f"{self._lane.peer} sent values of a replica that is complete")
        return fill(self._lane, taken, self.group.array(place.slab, place.slot), place.start)

    def _take_inputs(self, message: replica_pb2.ReplicaInputs) -> None:
        for it in message.inputs:
            if it.WhichOneof("input") in _NO_INPUTS:
                continue
            if it.number != self._last + 1:
                raise errors.BadFrame(f"{self._lane.peer} sent input {it.number} after input {self._last}")
            self._last = it.number
        if not self.complete:
            self._early.add(message.inputs)
            return
        told = self.group.arrive(sum(it.WhichOneof("input") not in _NO_INPUTS for it in message.inputs))
        if told:
            self._confirm(self._last)  # before they are carried out: what has arrived is not lost with the primary
        self._carry_out(message.inputs, told=told)
        if not told:
            self.group.when_copied(partial(self._confirm_later, self._last))

    def _carry_out(self, inputs: Iterable[replica_pb2.ReplicaInput], *, told: bool) -> None:
        try:
            for it in inputs:
                match it.WhichOneof("input"):
                    case "gradient_dropped":
                        self._gradients.drop(it.gradient_dropped)
                    case "values_hash":
                        self.group.check_hash(it.values_hash)
                    case _:
                        event = decode_input(it, self._gradients.take)
                        if isinstance(event, GroupSplit):
                            self._divide(self, event)
                        else:
                            self.group.follow(event, told=told)
        except BaseException:
            if self.group.follows:
                self.group.close()  # it lacks an input that was confirmed, so it must not be promoted
            raise

    def _confirm_later(self, number: int) -> None:
        """As `_confirm`, on any thread. If it fails, the connection ends."""
        try:
            self._confirm(number)
        except errors.ShoalError:
            self._lane.close()

    def _confirm(self, number: int) -> None:
        """Tells the primary that the inputs up to this one have arrived.

        Raises:
            Unreachable: the primary is gone, or has not opened its second lane.
        """
        with self._changed:
            if self._stopped:
                raise errors.Moved(f"this server is the primary of these shards of {self.group.config.name} now")
            self._changed.wait_for(lambda: self._copies, _SECOND_LANE_S)
            copies = self._copies
        if not copies:
            raise errors.Unreachable(f"{self._lane.peer} has not opened the second lane of a replica")
        with self._confirming:
            copies.send(Frame.COPIED, [replica_pb2.Copied(number=number).SerializeToString()])

    def _tell(self, error: errors.ShoalError) -> None:
        """Tells the primary why the connection ends."""
        copies = self._copies
        if copies and not copies.closed and not isinstance(error, errors.Unreachable):
            with suppress(errors.ShoalError), self._confirming:
                send_error(copies, error)


def accept_copies(copies: Connection, earlier: Connection | None, *, ended: bool) -> Callable[[], None]:
    """Tells the primary that the second lane of a replica is accepted.

    Args:
        copies: the lane.
        earlier: the second lane that the replica has already; None if it has none.
        ended: whether the first lane has ended.

    Returns:
        A function that waits until the lane is closed, at this end or the other one, and raises Unreachable then.

    Raises:
        BadRequest: there is such a lane already.
        Unreachable: the connection has ended.
    """
    if ended:  # nobody would close this lane
        raise errors.Unreachable(f"the first lane of this replica from {copies.peer} has ended")
    if earlier:
        raise errors.BadRequest(f"{copies.peer} opened the second lane of a replica twice; open it once")
    copies.send(Frame.END)  # a new connection takes a frame without a wait
    # A descriptor of its own, because the lane may be closed before anybody waits. Another connection may then have the
    # number of the lane's descriptor.
    return partial(_await_end, os.dup(copies.fileno()), copies.peer)


def _await_end(descriptor: int, peer: str) -> None:
    """Waits until a connection ends, closes this descriptor of it, and raises Unreachable."""
    try:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN | select.POLLRDHUP)
        ends.poll()
    finally:
        os.close(descriptor)
    raise errors.Unreachable(f"{peer} ended the connection of a replica")


__all__ = ["BackupLink", "accept_copies"]
