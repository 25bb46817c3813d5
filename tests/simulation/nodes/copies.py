"""Copies of a simulated server: both ends of the connection between a primary and its backup, with the real inputs.

It does what `shoal_server.replication` and `ShardStore` do. `InputLog`, which decides when an answer may leave, and the
messages of the inputs are those of the product.
"""

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from shoal import errors
from shoal.v1 import replica_pb2
from shoal_server.shards import decode_input, encode_input
from shoal_server.shards.group.input_log import CopyState
from shoal_server.shards.machine import events
from simulation import messages
from simulation.lanes import Lane, LaneEnd
from simulation.nodes.replica import CopyStart, Replica

if TYPE_CHECKING:
    from simulation.nodes.server import ServerNode


class PrimaryLink:
    """The primary's end of the connection to a backup. It is the sender of the log.

    Args:
        node: the server.
        group: the primary.
        request: the call of the coordinator.

    Attributes:
        group: the primary.
        log: the log of the group.
        failure: why the copy has failed; None if it has not.
    """

    def __init__(self, node: "ServerNode", group: Replica, request: messages.AddBackup) -> None:
        self._node, self.group, self._request = node, group, request
        self.log = node.log_for(group, request, self)
        self.failure: errors.ShoalError | None = None
        self._lane: Lane | None = None
        self._end = LaneEnd(node.process, self.log.copied, self._on_broken)
        self._other: LaneEnd | None = None
        self._pending: list[tuple[int, events.LockGroupEvent, int]] = []
        self._gradients, self._tickets, self._closed = count(1), dict[Any, int](), False

    async def run(self) -> None:
        """Makes the copy."""
        node, scheduler, request = self._node, self._node.scheduler, self._request
        hello = messages.ReplicaHello(self.group.config, request.term, node.name, node.incarnation, self._connect)
        try:
            await node.call(request.backup, hello)
            start = await self.group.begin_copy(self.log)
        except errors.ShoalError as error:
            self._fail(error)
            return
        self._send("state", start)
        await node.sleep(node.world.plan.copy_s * scheduler.random.random())  # to send the values
        self._send("values", None)

    def _connect(self, end: LaneEnd) -> Lane:
        """Connects the end of the backup."""
        if self._lane:  # the hello has arrived twice
            raise errors.BadRequest("this link has a lane")
        self._other = end
        self._lane = Lane(self._node.scheduler, self._node.network, self._end, end)
        if self._closed:
            self._lane.close(self._end.life)
        return self._lane

    def _send(self, kind: str, content: Any) -> None:
        if self._lane and self._other:
            self._lane.send(self._other, (kind, content))

    def _on_broken(self, why: str) -> None:
        self._fail(errors.Unreachable(why))

    def _fail(self, error: errors.ShoalError) -> None:
        if self._closed:
            return
        self.log.fail(error.message)
        self.failure = error
        if self.log.state is CopyState.BROKEN:
            self._node.wake()

    # Called by the log.

    def gradient(self, payload: Any) -> int:
        number = self.next_gradient()
        self._send("gradient", (number, payload))
        return number if self._lane and not self._lane.closed else 0

    def begin_gradient(self, payload: Any, sent: Callable[[int], object]) -> Callable[[], object]:
        sent(self.gradient(payload))
        return bool

    def add(self, number: int, event: events.LockGroupEvent, gradient: int) -> None:
        self._send("inputs", encode_input(event, number, lambda _: gradient, self.ticket))

    def add_hash(self, values_hash: int) -> None:
        raise AssertionError("the checker compares the values")

    def forget(self, gradient: int) -> None:
        self._send("inputs", replica_pb2.ReplicaInput(gradient_dropped=gradient))

    def flush(self) -> None:
        pass

    flush_at_once = flush

    def next_gradient(self) -> int:
        return next(self._gradients)

    def ticket(self, ticket: object) -> int:
        return self._tickets.setdefault(ticket, len(self._tickets) + 1)

    def close(self) -> None:
        self._closed = True
        if self._lane:
            self._lane.close(self._end.life)


class BackupLink:
    """The backup's end of the connection from a primary.

    Args:
        node: the server.
        group: the backup.
        hello: the primary's hello.

    Attributes:
        complete: whether the group has all values, so that it may be promoted.
    """

    def __init__(self, node: "ServerNode", group: Replica, hello: messages.ReplicaHello) -> None:
        self._node, self.group, self.hello = node, group, hello
        self.complete = False
        self._start: CopyStart | None = None
        self._gradients: dict[int, messages.PushName] = {}
        self._early: list[replica_pb2.ReplicaInput] = []
        self._last = 0
        self._end = LaneEnd(node.process, self._receive, self._on_broken)
        self._lane: Lane = hello.connect(self._end)

    def stop(self) -> None:
        """Ends the connection. The inputs that have arrived are carried out."""
        self._lane.close(self._end.life)

    def _on_broken(self, why: str) -> None:
        self._node.copies.ended(self, why)

    def _receive(self, message: tuple[str, Any]) -> None:
        kind, content = message
        try:
            match kind:
                case "state":
                    self._start = content
                case "values":
                    self._load()
                case "gradient":
                    self._gradients[content[0]] = content[1]
                case "inputs":
                    self._take(content)
        except (errors.UnknownJob, errors.Moved) as error:  # it was dropped, or promoted
            self.stop()
            self._on_broken(error.message)

    def _load(self) -> None:
        assert self._start
        self.group.load(self._start, self._node.mode_for(self.group.config))
        self.complete = True
        self._confirm()
        early, self._early = self._early, []
        for it in early:
            self._carry_out(it)

    def _take(self, it: replica_pb2.ReplicaInput) -> None:
        if it.number:
            assert it.number == self._last + 1, f"input {it.number} follows input {self._last}"
            self._last = it.number
        if not self.complete:
            self._early.append(it)
            return
        self._confirm()
        self._carry_out(it)

    def _carry_out(self, it: replica_pb2.ReplicaInput) -> None:
        if it.WhichOneof("input") == "gradient_dropped":
            del self._gradients[it.gradient_dropped]
        else:
            self.group.follow(decode_input(it, self._gradients.pop))

    def _confirm(self) -> None:
        self._lane.send(self._lane.other(self._end), self._last)


class Copies:
    """The connections of one process of a server, and the calls about copies.

    Args:
        node: the server.
    """

    def __init__(self, node: "ServerNode") -> None:
        self._node = node
        self._to_backups: dict[tuple[str, int], PrimaryLink] = {}  # to backups, by job and number of the group
        self._from_primaries: dict[tuple[str, int], BackupLink] = {}  # from primaries

    def add(self, request: messages.AddBackup) -> bool:
        """Begins to copy a group to another server, unless that was done. Returns whether the copy is complete."""
        group, key = (
            self._node.hosted.group(request.job, request.generation, (request.group,)),
            (request.job, request.group),
        )
        group.check_term(request.term)
        link = self._to_backups.get(key)
        if link and link.log.term > request.term:
            raise errors.Moved(f"there is a later decision about lock group {request.group}")
        decision = request.term, request.backup
        if link is None or (link.log.term, link.log.server) != decision or link.group is not group:
            link = self._to_backups[key] = PrimaryLink(self._node, group, request)
            self._node.scheduler.spawn(self._node.process, link.run())
        if link.failure and link.log.state is not CopyState.BROKEN:
            del self._to_backups[key]
            raise link.failure
        return link.log.complete

    def drop(self, request: messages.DropBackup) -> None:
        """Continues without the backup of a group."""
        self._node.hosted.group(request.job, request.generation, (request.group,)).end_copy(request.term)
        link = self._to_backups.get((request.job, request.group))
        if link and link.log.term < request.term:
            self._to_backups.pop((request.job, request.group)).log.end()

    def drop_copy(self, request: messages.DropCopy) -> None:
        """Frees this server's copy of a group, if it is of an earlier term."""
        group = self._node.hosted.held(request.job).get(request.group)
        if group and group.generation == request.generation and group.leave(request.term):
            self._node.hosted.remove(group)
        link = self._to_backups.get((request.job, request.group))
        if link and link.log.term < request.term:
            self._to_backups.pop((request.job, request.group)).close()

    def promote(self, request: messages.Promote) -> None:
        """Makes a backup the primary."""
        group = self._node.hosted.held(request.job).get(request.group)
        if group is None:
            raise errors.UnknownShard(f"{self._node.name} does not have lock group {request.group}")
        if group.generation != request.generation:
            raise errors.StaleGeneration(f"{self._node.name} has generation {group.generation}")
        link = self._from_primaries.get((request.job, request.group))
        if link and link.group is group:
            group.check_term(request.term)
            link.stop()
            self.ended(link, "this server is the primary now")
            if not link.complete:
                raise errors.Moved(f"{self._node.name} has no complete copy of lock group {request.group}")
        group.promote(request.term)

    def accept(self, hello: messages.ReplicaHello) -> None:
        """Makes the memory of a backup. It replaces a backup of an earlier term."""
        job, generation, number = hello.config.job, hello.config.generation, min(hello.config.shards)
        earlier = self._from_primaries.get((job, number))
        if earlier and earlier.hello.term == hello.term and earlier.hello.server != hello.server:
            raise errors.Moved(f"{earlier.hello.server} is the primary of lock group {number}, not {hello.server}")
        held = self._node.hosted.held(job)
        if any(group.generation > generation for group in held.values()):
            raise errors.StaleGeneration(f"{self._node.name} has a later generation than {generation}")
        ended = [it for it in held.values() if it.number == number or it.generation < generation]
        for group in ended:
            if group.generation == generation:
                group.check_replaceable(hello.term)
        group = self._node.new_group(hello.config, follows=hello.term)
        try:
            link = BackupLink(self._node, group, hello)
        except errors.ShoalError:
            group.close()
            raise
        for it in ended:
            self._node.hosted.remove(it)
        if earlier:
            earlier.stop()
        self._node.hosted.by_job.setdefault(job, {})[number] = group
        self._from_primaries[job, number] = link

    def ended(self, link: BackupLink, why: str) -> None:
        """A connection from a primary has ended."""
        group = link.group
        if self._from_primaries.get((group.config.job, group.number)) is link:
            del self._from_primaries[group.config.job, group.number]
        if not link.complete:
            self._node.hosted.remove(group)
            return
        if self._node.hosted.held(group.config.job).get(group.number) is group:
            group.lose_primary(why)
        if group.broken_replica:
            self._node.wake()

    def forget(self, job: str) -> None:
        """Forgets the connections of a job whose shards were dropped."""
        for key in [key for key in self._to_backups if key[0] == job]:
            self._to_backups.pop(key).close()


__all__ = ["BackupLink", "Copies", "PrimaryLink"]
