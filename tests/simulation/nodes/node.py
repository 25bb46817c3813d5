"""Node: a machine whose process can be started, stopped and killed, its membership, and the calls that it repeats."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal import errors
from shoal._rpc import Backoff
from shoal.status import Role, ServerLoad
from shoal_coordinator.messages import HeartbeatResult, Registration, events
from simulation.clock import Clock
from simulation.disk import CheckpointDisk, MetadataDisk
from simulation.invariants import Checker
from simulation.network import Context, Network
from simulation.plan import COORDINATOR, Plan
from simulation.scheduler import Future, Life, Scheduler

T = TypeVar("T")

JOB = "job"
HEARTBEAT_TIMEOUT_S, HEARTBEAT_INTERVAL_S = 3.0, 1.0
# Deadline of most calls, and seconds for which calls are repeated.
CALL_TIMEOUT_S, RETRY_FOR_S = 5.0, 30.0


@dataclass
class World:
    """What all nodes of a run share."""

    plan: Plan
    scheduler: Scheduler
    network: Network
    checker: Checker
    disk: CheckpointDisk = field(default_factory=CheckpointDisk)
    metadata: MetadataDisk = field(default_factory=MetadataDisk)
    nodes: dict[str, Any] = field(default_factory=dict)  # by name
    # In a run with moves: whether the job must not end yet, and the check of a server that was allowed to leave.
    holds_end: Callable[[], bool] = lambda: False
    check_drained: Callable[[str], object] = lambda _: None
    # Called before the coordinator handles an event. Returns a check of what it has decided.
    watch_decision: Callable[[Any], Callable[[], object]] = lambda _: bool


class Node:
    """A machine. Subclasses say what its process does.

    Args:
        name: name of the machine, by which others call it.
        world: what all nodes share.
        pace: seconds of its clock in a true second.

    Attributes:
        life: its process; None before the first one, or after a crash.
    """

    def __init__(self, name: str, world: World, pace: float) -> None:
        self.name, self.world = name, world
        self.scheduler, self.network, self.checker = world.scheduler, world.network, world.checker
        self.clock = Clock(lambda: self.scheduler.now, pace=pace)
        self.life: Life | None = None
        world.nodes[name] = self
        world.network.listen(name, self)

    def start(self) -> None:
        """Starts a process, unless one runs."""
        if self.life is None:
            self.life = self.scheduler.new_life(self.name)
            self.begin(self.life)

    def crash(self) -> None:
        """Kills the process."""
        if self.life is not None:
            life, self.life = self.life, None
            life.end()
            self.crashed()

    def stop(self, seconds: float) -> None:
        """Stops the process for some seconds, as SIGSTOP does."""
        if self.life is not None:
            self.life.stopped_until = self.scheduler.now + seconds

    def begin(self, life: Life) -> None:
        """Begins what a new process does."""
        raise NotImplementedError

    def crashed(self) -> None:
        """Forgets what the killed process had in memory."""

    async def serve(self, request: Any, context: Context) -> Any:
        """Answers a call."""
        raise NotImplementedError

    @property
    def process(self) -> Life:
        """The process, which runs."""
        assert self.life is not None
        return self.life

    def sleep(self, seconds: float) -> Future[None]:
        """Waits for some seconds of this machine's clock."""
        return self.scheduler.sleep(seconds / self.clock.pace)

    def call(self, name: str, request: Any, timeout_s: float = CALL_TIMEOUT_S, life: Life | None = None) -> Future[Any]:
        """Calls another machine."""
        return self.network.call(life or self.process, name, request, timeout_s=timeout_s / self.clock.pace)

    async def retrying(
        self,
        call: Callable[[], Awaitable[T]],
        for_s: float = RETRY_FOR_S,
        on_retry: Callable[[], Awaitable[object]] | None = None,
    ) -> T:
        """Repeats a call while its target does not answer, as `shoal._rpc.retrying` does."""
        failed_at: float | None = None
        backoff = Backoff(self.scheduler.random.random)
        while True:
            try:
                return await call()
            except (errors.Unreachable, errors.DeadlineExceeded) as error:
                now = self.clock.monotonic()
                failed_at = now if failed_at is None else failed_at
                if now - failed_at + backoff.at_most > for_s:
                    raise errors.Unreachable(f"no answer within {for_s:g} s ({error.message})") from None
                if on_retry:
                    await on_retry()
                await self.sleep(backoff.next())


class Member:
    """The membership of a node's process: registration and heartbeats, as `MembershipClient` does them.

    Args:
        node: the node.
        role: its role.
        on_reply: called with the reply to each heartbeat.
        on_incarnation: called with each new incarnation.
        on_end: called when an incarnation ends.
        load: returns the load of a server for each heartbeat.
    """

    def __init__(
        self,
        node: Node,
        role: Role,
        *,
        on_reply: Callable[[HeartbeatResult], object] = lambda _: None,
        on_incarnation: Callable[[int], object] = lambda _: None,
        on_end: Callable[[], object] = bool,
        load: Callable[[], ServerLoad | None] = lambda: None,
    ) -> None:
        self._node, self._role = node, role
        self._on_reply, self._on_incarnation, self._on_end, self._load = on_reply, on_incarnation, on_end, load
        self._processes = 0
        self._renews = self._leaves = False
        self._woken: Future[None] = Future()
        self._ended: Future[None] = Future()
        self.incarnation = 0

    def renew(self) -> None:
        """Requests a new incarnation."""
        self._renews = True
        self.wake()

    def wake(self) -> None:
        """Sends the next heartbeat immediately."""
        self._woken.set(None)

    async def leave(self) -> None:
        """Ends the heartbeats, and leaves the cluster. The call is not repeated."""
        self._leaves = True
        self.wake()
        await self._ended
        if self.incarnation:
            with suppress(errors.ShoalError):  # its heartbeat timeout will expire instead
                await self._node.call(COORDINATOR, events.MemberLeft(self._node.name, self.incarnation), 1.0)

    async def run(self) -> None:
        """Registers, and sends heartbeats, until the member leaves."""
        node = self._node
        self._new_process()
        while not self._leaves:
            pause_s = HEARTBEAT_INTERVAL_S * (0.95 + 0.05 * node.scheduler.random.random())
            try:
                await self._once()
            except errors.DuplicateMember:
                pause_s = 0.5
            except errors.Fenced:
                self._end()
                pause_s = 0.0
            except errors.ShoalError:
                pause_s = 0.45 * HEARTBEAT_INTERVAL_S
            if pause_s:
                self._woken = Future()
                node.scheduler.after(pause_s / node.clock.pace, self.wake)
                await self._woken
        self._ended.set(None)

    async def _once(self) -> None:
        node = self._node
        if self._renews and self.incarnation:
            await node.call(COORDINATOR, events.MemberLeft(node.name, self.incarnation))
            self._end()
        if not self.incarnation:
            is_server = self._role is Role.SERVER
            address, zone = (f"{node.name}:1", node.world.plan.zone_of(node.name)) if is_server else ("", "")
            registration = Registration(self._role, node.name, self._process, address, zone=zone)
            reply = await node.call(COORDINATOR, events.RegistrationReceived(registration))
            self.incarnation = reply.incarnation
            self._on_incarnation(self.incarnation)
        heartbeat = events.HeartbeatReceived(node.name, self.incarnation, load=self._load())
        reply = await node.call(COORDINATOR, heartbeat, timeout_s=1.0)
        self._on_reply(reply)

    def _end(self) -> None:
        self.incarnation, self._renews = 0, False
        self._new_process()
        self._on_end()

    def _new_process(self) -> None:
        self._processes += 1
        self._process = f"{self._node.name}-{self._node.process.number}-{self._processes}"


__all__ = ["CALL_TIMEOUT_S", "HEARTBEAT_TIMEOUT_S", "JOB", "RETRY_FOR_S", "Member", "Node", "World"]
