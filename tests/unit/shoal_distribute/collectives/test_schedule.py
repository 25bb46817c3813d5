"""Schedules of the collectives: every contribution arrives once, with the fewest bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_distribute.collectives.schedule import TreeNode, hosts_of, ring, rings_between, slices, tree

RANKS = range(1, 10)


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 4, 16]))
def test_slices_cover_all_elements_once(elements: int, ranks: int, multiple: int) -> None:
    parts = slices(elements, ranks, multiple)
    assert len(parts) == ranks
    assert [it for part in parts for it in range(part.start, part.stop)] == list(range(elements))
    sizes = [part.stop - part.start for part in parts if part.stop > part.start]
    assert all(it % multiple == 0 for it in sizes[:-1])
    assert not sizes or max(sizes) - min(sizes[:-1] or sizes) <= multiple


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("scatter", "gather"), [(True, True), (True, False), (False, True)])
def test_a_ring_gives_each_rank_what_it_is_for(ranks: int, scatter: bool, gather: bool) -> None:
    own = {slice_: {rank} for rank in range(ranks) for slice_ in [rank]}
    held = [
        {number: ({rank} if scatter else own[number] if number == rank else set()) for number in range(ranks)}
        for rank in range(ranks)
    ]
    planned = [list(ring(rank, ranks, scatter=scatter, gather=gather)) for rank in range(ranks)]
    assert {len(rounds) for rounds in planned} == {(ranks - 1) * (scatter + gather)}
    for each in zip(*planned, strict=True):
        sent = [(it.sends, set(held[rank][it.sends])) for rank, it in enumerate(each)]
        for rank, it in enumerate(each):
            number, contributions = sent[(rank - 1) % ranks]
            assert number == it.receives
            assert not it.reduces or not contributions & held[rank][number], "each contribution counts once"
            held[rank][number] = contributions | (held[rank][number] if it.reduces else set())
    for rank in range(ranks):
        wanted = range(ranks) if gather else [rank]
        assert all(held[rank][number] == (set(range(ranks)) if scatter else own[number]) for number in wanted)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_tree_reaches_each_rank_in_few_steps(ranks: int) -> None:
    for root in range(ranks):
        nodes = {rank: tree(rank, ranks, root) for rank in range(ranks)}
        assert nodes[root].parent is None
        children = [child for node in nodes.values() for child in node.children]
        assert sorted([*children, root]) == list(range(ranks))
        for rank, node in nodes.items():
            assert all(nodes[child].parent == rank for child in node.children)
            steps, at = 0, rank
            while (parent := nodes[at].parent) is not None:
                steps, at = steps + 1, parent
            assert steps <= (ranks - 1).bit_length()
    assert tree(0, 4) == TreeNode(None, (1, 2))


def test_ranks_that_map_each_other_are_a_host() -> None:
    hosts = [0, 1, 0, 2, 1]
    assert hosts_of([[mine == its for its in hosts] for mine in hosts]) == ((0, 2), (1, 4), (3,))


@pytest.mark.parametrize(
    ("maps", "found"),
    [
        ([[1, 1], [0, 1]], ((0,), (1,))),  # rank 1 cannot map the segment of rank 0
        ([[1, 0, 1], [1, 0, 1], [1, 0, 1]], ((0, 2), (1,))),  # rank 1 has no segment
        ([[1, 1, 0], [1, 1, 1], [0, 1, 1]], ((0, 1), (2,))),  # ranks 0 and 2 share with rank 1, and not with each other
    ],
)
def test_a_host_has_no_two_ranks_that_cannot_share(maps: list[list[int]], found: tuple[tuple[int, ...], ...]) -> None:
    assert hosts_of(maps) == found


def test_each_rank_has_one_ring_between_hosts() -> None:
    assert rings_between([(0, 2), (1, 3)]) == [[(0,), (1,)], [(2,), (3,)]]
    assert rings_between([(0, 1, 2, 5), (3, 4)]) == [[(0, 2), (3,)], [(1, 5), (4,)]]
    assert rings_between([(0,), (1, 2)]) == [[(0,), (1, 2)]]
