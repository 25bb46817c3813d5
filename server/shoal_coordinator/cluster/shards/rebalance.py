"""Rebalancing: what should move so that the servers of a job have equal shares of its bytes (pure).

Each job is balanced by itself, as when it is placed: the server that moves most of a job's bytes decides how long its
steps take. One decision moves one lock group, or a part of it, from one of the fullest servers to the emptiest one that
can take it. So the sum of the squares of the loads falls with each decision, and no group moves back and forth.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

# The bytes of the fullest and of the emptiest server may differ by so much, as a part of the mean. A move that changes
# less is not worth its copy.
TOLERANCE = 0.1
# Bytes that are not worth a move: another server costs each step more calls than it saves.
SMALLEST_MOVE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """A lock group: the server that serves it, and the wire bytes of each of its shards."""

    server: str
    shards: Mapping[int, int]

    @property
    def nbytes(self) -> int:
        """Wire bytes of all its shards."""
        return sum(self.shards.values())


@dataclass(frozen=True, slots=True)
class Move:
    """The decision that a part of a job moves.

    Attributes:
        group: number of the lock group.
        server: member id of the server that it moves to.
        shards: the shards that become a group of their own, which moves; empty if the whole group does.
    """

    group: int
    server: str
    shards: tuple[int, ...] = ()


def rebalance(
    groups: Mapping[int, GroupLoad],
    servers: Mapping[str, int],
    *,
    splits: bool = True,
    smallest_bytes: int = SMALLEST_MOVE_BYTES,
    barred: Mapping[int, AbstractSet[str]] | None = None,
) -> Move | None:
    """Returns what should move next; None if the shares are even, or cannot become more even.

    Args:
        groups: the lock groups of one job, by number.
        servers: the servers that may have shards, by member id, with all bytes on them, which only break ties. All
            servers of `groups` are among them.
        splits: whether a group may be split.
        smallest_bytes: bytes that are not worth a move.
        barred: the servers to which each group must not move; None if there are none.
    """
    barred = barred or {}
    loads = dict.fromkeys(servers, 0)
    for group in groups.values():
        loads[group.server] += group.nbytes
    mean = sum(loads.values()) / len(loads)
    least = max(TOLERANCE * mean / 2, smallest_bytes)
    most = max(loads.values())
    # Those whose difference is not worth a move are equally full. If one has nothing that fits, the next one gives.
    fullest = sorted((it for it in loads if loads[it] > max(mean, most - least)), key=lambda it: (loads[it], it))[::-1]
    for server in sorted(loads, key=lambda it: (loads[it], servers[it], it)):
        if most - loads[server] <= max(TOLERANCE * mean, 2 * least):
            break
        for giver in fullest:
            gap = loads[giver] - loads[server]
            there = {
                number: group
                for number, group in groups.items()
                if group.server == giver and server not in barred.get(number, frozenset())
            }
            share = min(loads[giver] - mean, mean - loads[server])
            for wanted in (share, gap / 2):  # perhaps all shards are larger than the share
                # Less than the gap, so that the two servers come nearer to each other.
                move = _best(there, server, wanted, least, gap - least, splits=splits)
                if move:
                    return move
        if not barred:  # what does not fit on the emptiest server does not fit on another one
            break
    return None


def _best(
    groups: Mapping[int, GroupLoad], server: str, wanted: float, least: float, most: float, *, splits: bool
) -> Move | None:
    """Returns the move of about so many bytes to a server; None if there is none.

    Args:
        groups: the lock groups of the server that has too many bytes.
        server: member id of the other server.
        wanted: bytes that should move.
        least: fewest bytes that may move.
        most: most bytes that may move.
        splits: whether a group may be split.
    """

    def miss(nbytes: int) -> float:
        return abs(nbytes - wanted)

    if not groups:
        return None
    whole = [number for number, group in groups.items() if least <= group.nbytes <= most]
    best = min(whole, key=lambda it: (miss(groups[it].nbytes), it), default=None)
    if splits and (best is None or miss(groups[best].nbytes) > least):
        parted = min(groups, key=lambda it: (-groups[it].nbytes, it))
        part = _part(parted, groups[parted].shards, wanted)
        nbytes = sum(groups[parted].shards[it] for it in part)
        if least <= nbytes <= most and (best is None or miss(nbytes) + least < miss(groups[best].nbytes)):
            return Move(parted, server, part)
    return None if best is None else Move(best, server)


def _part(group: int, shards: Mapping[int, int], wanted: float) -> tuple[int, ...]:
    """Returns shards of a group with about so many bytes, without the shard that names it."""
    part, left, rest = [], wanted, []
    for shard in sorted(shards.keys() - {group}, key=lambda it: (-shards[it], it)):
        if shards[shard] <= left:
            part.append(shard)
            left -= shards[shard]
        else:
            rest.append(shard)
    if rest and shards[rest[-1]] - left < left:  # then one shard too many is nearer than one too few
        part.append(rest[-1])
    return tuple(sorted(part))


__all__ = ["SMALLEST_MOVE_BYTES", "TOLERANCE", "GroupLoad", "Move", "rebalance"]
