"""Schedules of the collectives: which rank sends what to whom, and when (no I/O).

The ring is that of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009):
n - 1 rounds of reduce-scatter, then n - 1 rounds of all-gather. The tree is the binomial tree of MPICH (Thakur,
Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Slices of one array that several ranks write begin at multiples of a cache line, so that no two write to one line.
LINE_BYTES = 64

# What one rank has, sends or reduces of an array: some slices of it, in an order that is the same at all ranks.
Part = Sequence[slice]


def slices(elements: int, ranks: int, multiple: int = 1) -> list[slice]:
    """Divides elements into one slice for each rank, as equal as possible, the longer ones first.

    Args:
        elements: number of elements.
        ranks: number of slices.
        multiple: each slice, except the last non-empty one, has a multiple of this number of elements.

    Returns:
        The slices, in order. Some are empty if there are few elements.
    """
    blocks = -(-elements // multiple)
    short, longer = divmod(blocks, ranks)
    bounds = [0]
    for rank in range(ranks):
        bounds.append(min(elements, bounds[-1] + (short + (rank < longer)) * multiple))
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def pieces(part: Part, most: int) -> Iterator[slice]:
    """Yields the slices of a part, divided into pieces of at most so many elements. There are no empty ones."""
    for each in part:
        for start in range(each.start, each.stop, most):
            yield slice(start, min(each.stop, start + most))


@dataclass(frozen=True, slots=True)
class RingRound:
    """What one rank does in one round of a ring: it sends to the next rank, and receives from the previous one.

    Attributes:
        sends, receives: numbers of slices.
        reduces: whether the received slice is added to the rank's own, or replaces it.
    """

    sends: int
    receives: int
    reduces: bool


def ring(rank: int, ranks: int, *, scatter: bool = True, gather: bool = True) -> Iterator[RingRound]:
    """Yields the rounds of a ring for one rank.

    After the reduce-scatter, rank r has slice r reduced. Each round sends the slice that the round before has received.

    Args:
        rank: the rank.
        ranks: number of ranks.
        scatter: whether there is a reduce-scatter.
        gather: whether there is an all-gather.
    """
    if scatter:
        for number in range(1, ranks):
            yield RingRound((rank - number) % ranks, (rank - number - 1) % ranks, reduces=True)
    if gather:
        for number in range(ranks - 1):
            yield RingRound((rank - number) % ranks, (rank - number - 1) % ranks, reduces=False)


@dataclass(frozen=True, slots=True)
class TreeNode:
    """The place of a rank in a binomial tree.

    Attributes:
        parent: the rank above; None for the root.
        children: the ranks below, those with the smallest subtrees first. Contributions are added in this order.
    """

    parent: int | None
    children: tuple[int, ...]


def tree(rank: int, ranks: int, root: int = 0) -> TreeNode:
    """Returns the place of a rank in the tree.

    Args:
        rank: the rank.
        ranks: number of ranks.
        root: the rank at the root.
    """
    place, bit = (rank - root) % ranks, 1
    children = []
    while bit < ranks and not place & bit:
        if place + bit < ranks:
            children.append((place + bit + root) % ranks)
        bit <<= 1
    return TreeNode(None if place == 0 else (place - (place & -place) + root) % ranks, tuple(children))


def hosts_of(maps: Sequence[Sequence[bool | int]]) -> tuple[tuple[int, ...], ...]:
    """Divides ranks into hosts: sets in which each rank can map the segments of all.

    Ranks in containers without common shared memory are on different hosts in this sense, even on one machine.

    Args:
        maps: for each rank, whether it can map the segment of each rank, its own included.

    Returns:
        The ranks of each host, in order. A rank joins the first host whose ranks it can share with. Each rank finds the
        same hosts.
    """
    hosts: list[list[int]] = []
    for rank, mapped in enumerate(maps):
        for host in hosts:
            if all(mapped[other] and maps[other][rank] for other in (rank, *host)):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return tuple(map(tuple, hosts))


def rings_between(hosts: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Divides ranks of several hosts among rings, as many as the smallest host has ranks.

    Args:
        hosts: the ranks of each host.

    Returns:
        For each ring and each host, the ranks whose parts travel on the ring. The first of them is in the ring.
    """
    rings = min(map(len, hosts))
    return [[host[ring::rings] for host in hosts] for ring in range(rings)]


__all__ = [
    "LINE_BYTES",
    "Part",
    "RingRound",
    "TreeNode",
    "hosts_of",
    "pieces",
    "ring",
    "rings_between",
    "slices",
    "tree",
]
