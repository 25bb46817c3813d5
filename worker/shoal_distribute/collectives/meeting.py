"""Meeting of the ranks of a group: each one opens connections to the others, and sends its number."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._system.waits import wait_notice
from shoal._transport import (
    Connection,
    Lane,
    Listener,
    ListenerLimits,
    Security,
    open_handshake,
    received_error,
    send_error,
)
from shoal.v1 import parameter_server_pb2 as pb
from shoal_distribute.collectives.mesh import Mesh
from shoal_distribute.collectives.watch import FRAMES, SILENT_S, RankFrame

# The largest group: each rank has three connections to each other one.
MAX_RANKS = catalogue.GROUP_RANKS.default
_RANK = struct.Struct("<QII?")  # generation, rank, ranks, whether the connection is that of the watch
_RETRY_S = 0.05
# A transfer may wait for as long as another rank computes. `watch` ends it if that rank fails.
_STALL_S = 30 * 86_400.0
_HELLO_S = 5.0


class _Handler:
    """Handler of a connection that another rank has opened: it hands the connection to the mesh."""

    def __init__(self, connection: Connection, meeting: "_Meeting") -> None:
        self._connection, self._meeting = connection, meeting

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:  # noqa: ARG002 - it has nothing but its token
        return pb.LaneWelcome()

    def serve(self) -> None:
        kind, payload = self._connection.receive(within_s=_HELLO_S, most=_RANK.size)
        if kind is not RankFrame.RANK or len(payload) != _RANK.size:
            raise errors.BadFrame(f"{self._connection.peer} did not say its rank")
        self._meeting.arrived(self._connection, *_RANK.unpack(payload))
        self._meeting.closed.wait()

    def close(self) -> None:
        """Frees nothing: the mesh owns the connection."""


class _Meeting:
    """The ranks that have come so far.

    Attributes:
        accepted: connections for arrays, by rank.
        watched: connections of the watch from lower ranks. This rank opens those to higher ranks.
    """

    def __init__(self, generation: int, rank: int, addresses: Sequence[str]) -> None:
        self.generation, self.rank, self.ranks = generation, rank, len(addresses)
        self.accepted: dict[int, Connection] = {}
        self.watched: dict[int, Connection] = {}
        self.changed = threading.Condition()  # guards accepted, watched and _welcomed
        self._welcomed: set[tuple[int, bool]] = set()  # ranks that came, and whether the connection is for the watch
        self.closed = threading.Event()
        self._addresses = addresses

    def arrived(self, connection: Connection, generation: int, rank: int, ranks: int, watch: bool) -> None:
        """Takes the connection of a rank, or refuses it.

        It is handed over after its answer has been sent, because other threads use it from then on.
        """
        with self.changed:
            refusal = self._refusal(generation, rank, ranks, (rank, watch) in self._welcomed)
            if refusal is None:
                self._welcomed.add((rank, watch))
        if refusal:
            send_error(connection, refusal)
            raise refusal
        connection.send(RankFrame.RANK)
        with self.changed:
            (self.watched if watch else self.accepted)[rank] = connection
            self.changed.notify_all()

    def introduce(self, lane: Connection, *, watch: bool) -> None:
        """Tells another rank who this one is, and what the connection is for.

        Raises:
            RanksDisagree: it refuses this rank.
            Unreachable: it has ended.
        """
        lane.send(RankFrame.RANK, [_RANK.pack(self.generation, self.rank, self.ranks, watch)])
        kind = lane.begin(within_s=_HELLO_S, most=1 << 16)
        if kind is RankFrame.ERROR:
            raise received_error(lane)
        lane.payload()

    def wait(self, deadline: float) -> None:
        """Waits until all other ranks have come.

        Raises:
            RankLost: a rank has not come by the deadline. The message names it.
        """
        with self.changed:
            self.changed.wait_for(lambda: not self._missing(), max(0.0, deadline - time.monotonic()))
            if missing := self._missing():
                raise errors.RankLost(f"{self.missing()} did not come in time", rank=missing[0])

    def missing(self) -> str:
        """Returns the names of the ranks that have not come, as text."""
        found = self._missing()
        named = ", ".join(f"{rank} ({self._addresses[rank]})" for rank in found[:5])
        return f"rank {named}" + (f" and {len(found) - 5} more" if found[5:] else "")

    def _missing(self) -> list[int]:
        others = [*range(self.rank), *range(self.rank + 1, self.ranks)]
        return [it for it in others if it not in self.accepted or (it < self.rank and it not in self.watched)]

    def _refusal(self, generation: int, rank: int, ranks: int, twice: bool) -> errors.ShoalError | None:
        if (generation, ranks) != (self.generation, self.ranks):
            return errors.RanksDisagree(
                f"rank {rank} wants generation {generation} of {ranks} ranks, and rank {self.rank} generation "
                f"{self.generation} of {self.ranks} ranks",
                rank=rank,
            )
        if rank == self.rank or not rank < self.ranks or twice:
            return errors.RanksDisagree(f"two processes are rank {rank} of {ranks}", rank=rank)
        return None


def connect(
    rank: int,
    addresses: Sequence[str],
    *,
    security: Security,
    listening: socket.socket | None = None,
    generation: int = 0,
    within_s: float = 60.0,
    silent_s: float = SILENT_S,
) -> tuple[Mesh, Callable[[], None]]:
    """Connects a rank with all others. After two seconds, a line on the console says which ranks are missing.

    Args:
        rank: this rank.
        addresses: host:port of each rank.
        security: protects the connections, and proves that a process belongs to the group.
        listening: a bound socket that listens at this rank's address. None means that this function makes one.
        generation: number of the group. Ranks of another generation are refused.
        within_s: seconds to wait for the other ranks.
        silent_s: seconds without a heartbeat after which a rank counts as lost.

    Returns:
        The mesh, and a function to call after it is closed, which stops listening.

    Raises:
        BadRequest: an address is not host:port, or there are too many.
        RankLost: a rank did not come in time. The message names it.
        RanksDisagree: two processes have the same rank, or give different numbers of ranks.
    """
    if not 0 <= rank < len(addresses) <= MAX_RANKS:
        raise errors.BadRequest(f"rank {rank} of {len(addresses)} ranks: a group has 1 to {MAX_RANKS} of them")
    places = [_rpc.parse_address(address) for address in addresses]
    meeting = _Meeting(generation, rank, addresses)
    listener = _listener(listening or _rpc.listen(*places[rank]), meeting, security)
    listener.start()
    opened: dict[int, Connection] = {}
    watched: dict[int, Connection] = {}

    def stop() -> None:
        meeting.closed.set()
        listener.stop()

    try:
        with wait_notice(f"rank {rank} of {len(addresses)}", lambda: f"for {meeting.missing()}"):
            deadline = time.monotonic() + within_s
            for other, place in enumerate(places):
                if other != rank:
                    opened[other] = _open(place, meeting, other, security, deadline)
                if other > rank:
                    watched[other] = _open(place, meeting, other, security, deadline, watch=True)
            meeting.wait(deadline)
    except BaseException:
        for link in (*opened.values(), *watched.values()):
            link.close()
        stop()
        raise
    left_s = max(0.0, deadline - time.monotonic())  # others may need as long to connect
    all_watched = watched | meeting.watched
    return Mesh(rank, opened, meeting.accepted, all_watched, silent_s=silent_s, meeting_s=left_s), stop


def _listener(bound: socket.socket, meeting: _Meeting, security: Security) -> Listener:
    """Returns the listener that accepts the connections of the other ranks."""
    return Listener(
        bound,
        FRAMES,
        lambda connection: _Handler(connection, meeting),
        security=security,
        limits=ListenerLimits(catalogue.LANES, catalogue.HOST_LANES, 2 * MAX_RANKS, 2 * MAX_RANKS),
        name="rank",
        advice="start fewer ranks",
        stall_s=_STALL_S,
    )


def _open(
    place: tuple[str, int],
    meeting: _Meeting,
    other: int,
    security: Security,
    deadline: float,
    *,
    watch: bool = False,
) -> Connection:
    """Opens a connection to another rank, which may not have started yet, or may be stopped."""
    pause = threading.Event()  # never set
    where = f"rank {other} at {place[0]}:{place[1]}"
    while True:
        left = deadline - time.monotonic()
        try:
            lane = Lane.connect(*place, FRAMES, timeout_s=max(0.1, left), stall_s=_STALL_S)
        except errors.Unreachable:
            if left <= 0:
                raise errors.RankLost(f"{where} did not answer", rank=other) from None
            pause.wait(_RETRY_S)
            continue
        try:
            open_handshake(lane, security, pb.LaneHello(), within_s=_HELLO_S)
            meeting.introduce(lane, watch=watch)
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            lane.close()
            raise errors.RankLost(f"{where} did not answer: {error.message}", rank=other) from None
        except BaseException:
            lane.close()
            raise
        return lane


__all__ = ["MAX_RANKS", "connect"]
