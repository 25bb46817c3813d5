"""Copies of a simulated server: both ends of the connection between a primary and its backup, with the real inputs.

It does what `shoal_server.replication` and `ShardStore` do. `InputLog`, which decides when an answer may leave, and the
messages of the inputs are those of the product.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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


# The part of the inputs that a backup carries out when they arrive. The others wait for some seconds, at most.
_CARRIED_OUT_AT_ONCE, _CARRY_OUT_S = 0.8, 0.01


class PrimaryLink:
    """The primary's end of the connection to a backup, or the backup's to the next one. It is the sender of the log.

    Args:
        node: the server.
        group: the primary, or the backup that makes a copy of its own.
        request: the call of the coordinator.

    Attributes:
        group: as given.
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
        self._gradients, self._tickets, self._last_ticket = count(1), dict[Any, int](), 0
        self._closed = False

    async def run(self) -> None:
        """Makes the copy."""
        node, scheduler, request = self._node, self._node.scheduler, self._request
        hello = messages.ReplicaHello(self.group.config, request.term, node.name, node.incarnation, self._connect)
        try:
            await node.call(request.backup, hello)
            start = await self.group.begin_copy(self.log, request.keeps_term, as_backup=request.as_backup)
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
        if isinstance(ticket, int):  # of a backup, which has the numbers of its primary
            self._last_ticket = max(self._last_ticket, ticket)
            return ticket
        if ticket not in self._tickets:
            self._last_ticket += 1
            self._tickets[ticket] = self._last_ticket
        return self._tickets[ticket]

    def close(self) -> None:
        self._closed = True
        if self._lane:
            self._lane.close(self._end.life)


class BackupLink:
    """The backup's end of the connection from a primary, or from its backup.

    Like the thread of the product, it may have confirmed inputs that it carries out a moment later.

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
        # Inputs to carry out, each with its number and whether it was confirmed.
        self._arrived: deque[tuple[replica_pb2.ReplicaInput, int, bool]] = deque()
        self._works = False  # whether a task carries them out
        self._last = 0
        self._end = LaneEnd(node.process, self._receive, self._on_broken)
        self._lane: Lane = hello.connect(self._end)

    def stop(self) -> None:
        """Ends the connection. The inputs that have arrived are carried out."""
        self._lane.close(self._end.life)
        with suppress(errors.UnknownJob, errors.Moved):  # it was dropped, or promoted
            self._carry_out_all()

    def _on_broken(self, why: str) -> None:
        self.stop()
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
            self._on_broken(error.message)

    def _load(self) -> None:
        assert self._start
        told = self.group.arrive(self._last)
        self.group.load(self._start, self._node.mode_for(self.group.config))
        self.complete = True
        self._confirm(self._last)
        early, self._early = self._early, []
        self._add(early, told=told)

    def _take(self, it: replica_pb2.ReplicaInput) -> None:
        if it.number:
            assert it.number == self._last + 1, f"input {it.number} follows input {self._last}"
            self._last = it.number
        if not self.complete:
            self._early.append(it)
            return
        told = self.group.arrive(bool(it.number))
        if told:
            self._confirm(self._last)
        self._add([it], told=told)

    def _add(self, inputs: list[replica_pb2.ReplicaInput], *, told: bool) -> None:
        """Carries out inputs, at once or soon."""
        self._arrived.extend((it, self._last, told) for it in inputs)
        random = self._node.scheduler.random.random
        if not self._works and random() < _CARRIED_OUT_AT_ONCE:
            self._carry_out_all()
        elif not self._works:
            self._works = True
            self._node.scheduler.spawn(self._end.life, self._work(_CARRY_OUT_S * random()))

    async def _work(self, seconds: float) -> None:
        try:
            while self._arrived:
                await self._node.sleep(seconds)
                if self._arrived:
                    self._carry_out(*self._arrived.popleft())
        except (errors.UnknownJob, errors.Moved) as error:
            self._on_broken(error.message)
        finally:
            self._works = False

    def _carry_out_all(self) -> None:
        while self._arrived:
            self._carry_out(*self._arrived.popleft())

    def _carry_out(self, it: replica_pb2.ReplicaInput, last: int, told: bool) -> None:
        if it.WhichOneof("input") == "gradient_dropped":
            del self._gradients[it.gradient_dropped]
        else:
            self.group.follow(decode_input(it, self._gradients.pop), told=told)
        if not told:
            self.group.when_copied(partial(self._confirm, last))

    def _confirm(self, number: int) -> None:
        self._lane.send(self._lane.other(self._end), number)


class Copies:
    """The connections of one process of a server, and the calls about copies.

    Args:
        node: the server.
    """

    def __init__(self, node: "ServerNode") -> None:
        self._node = node
        # To backups, by job and number of the group, then by the term in which the copy was begun.
        self._to_backups: dict[tuple[str, int], dict[int, PrimaryLink]] = {}
        self._from_primaries: dict[tuple[str, int], BackupLink] = {}

    def add(self, request: messages.AddBackup) -> bool:
        """Begins to copy a group to another server, unless that was done. Returns whether the copy is complete."""
        group, key = self._group(request), (request.job, request.group)
        group.check_term(request.term)
        links = self._to_backups.get(key, {})
        if max(links, default=0) > request.term:
            raise errors.Moved(f"there is a later decision about lock group {request.group}")
        link = links.get(request.term)
        if link is None or link.log.server != request.backup or link.group is not group:
            link = PrimaryLink(self._node, group, request)
            kept = {term: it for term, it in links.items() if term == request.keeps_term}
            self._to_backups[key] = {**kept, request.term: link}
            self._node.scheduler.spawn(self._node.process, link.run())
        if link.failure and link.log.state is not CopyState.BROKEN:
            del self._to_backups[key][request.term]
            raise link.failure
        return link.log.complete

    def drop(self, request: messages.DropBackup) -> None:
        """Continues without the backup of a group, or only with the one that the request names."""
        self._group(request).end_copy(request.term, request.keeps_term, as_backup=request.as_backup)
        for link in self._take_earlier(request, request.keeps_term):
            link.log.end()

    def drop_copy(self, request: messages.DropCopy) -> None:
        """Frees this server's copy of a group, if it is of an earlier term."""
        group = self._node.hosted.held(request.job).get(request.group)
        if group and group.generation == request.generation and group.leave(request.term):
            self._node.hosted.remove(group)
        for link in self._take_earlier(request):
            link.close()

    def _group(self, request: messages.AddBackup | messages.DropBackup | messages.Promote) -> Replica:
        return self._node.hosted.numbered(request.job, request.generation, request.group)

    def _take_earlier(
        self, request: messages.DropBackup | messages.DropCopy, keeps: int | None = None
    ) -> list[PrimaryLink]:
        """Forgets the connections of a group that are of earlier terms than a request, except one. Returns them."""
        links = self._to_backups.get((request.job, request.group), {})
        return [links.pop(term) for term in [*links] if term < request.term and term != keeps]

    def promote(self, request: messages.Promote) -> None:
        """Makes a backup the primary."""
        group = self._group(request)
        link = self._from_primaries.get((request.job, request.group))
        if link and link.group is group:
            group.check_term(request.term)
            group.keep_copy(request.keeps_term)
            link.stop()
            self.ended(link, "this server is the primary now")
            if not link.complete:
                raise errors.Moved(f"{self._node.name} has no complete copy of lock group {request.group}")
        group.promote(request.term, request.keeps_term)

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
        if any(not it.primary for it in group.broken_replicas):
            self._node.wake()

    def forget(self, job: str) -> None:
        """Forgets the connections of a job whose shards were dropped."""
        for key in [key for key in self._to_backups if key[0] == job]:
            for link in self._to_backups.pop(key).values():
                link.close()


__all__ = ["BackupLink", "Copies", "PrimaryLink"]
