"""Decisions about what moves, so that the servers of a job have equal shares."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_coordinator.cluster.shards.rebalance import TOLERANCE, GroupLoad, Move, rebalance

MB = 1 << 20


def groups(**loads: dict[int, int]) -> dict[int, GroupLoad]:
    """Returns a lock group for each server, with the megabytes of its shards."""
    sizes = {server: {shard: MB * size for shard, size in shards.items()} for server, shards in loads.items()}
    return {min(shards): GroupLoad(server, shards) for server, shards in sizes.items()}


def whole(**loads: list[int]) -> dict[int, GroupLoad]:
    """Returns groups of one shard each, given their megabytes on each server."""
    placed = [(server, size) for server, sizes in loads.items() for size in sizes]
    return {number: GroupLoad(server, {number: MB * size}) for number, (server, size) in enumerate(placed)}


def servers(*names: str) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def after(found: dict[int, GroupLoad], move: Move) -> dict[int, GroupLoad]:
    """Returns the groups after a move."""
    if not move.shards:
        return found | {move.group: GroupLoad(move.server, found[move.group].shards)}
    stay = {it: size for it, size in found[move.group].shards.items() if it not in move.shards}
    gone = {it: found[move.group].shards[it] for it in move.shards}
    stays = GroupLoad(found[move.group].server, stay)
    return found | {move.group: stays, min(move.shards): GroupLoad(move.server, gone)}


def loads_of(found: dict[int, GroupLoad], names: dict[str, int]) -> dict[str, int]:
    return {name: sum(it.nbytes for it in found.values() if it.server == name) for name in names}


def evened(found: dict[int, GroupLoad], names: dict[str, int], **options: Any) -> tuple[dict[int, GroupLoad], int]:
    """Returns the groups after all moves, and the number of moves."""
    moves = 0
    while move := rebalance(found, names, **options):
        moved = after(found, move)
        before = loads_of(found, names)
        assert sum(it**2 for it in loads_of(moved, names).values()) < sum(it**2 for it in before.values())
        found, moves = moved, moves + 1
    return found, moves


def test_even_shares_stay() -> None:
    assert rebalance(groups(a={0: 8, 1: 8}, b={2: 8, 3: 8}), servers("a", "b")) is None


def test_a_difference_within_the_tolerance_stays() -> None:
    assert rebalance(groups(a={0: 51, 1: 2}, b={2: 50}), servers("a", "b")) is None


def test_a_new_server_gets_its_share_of_each() -> None:
    found = groups(a=dict.fromkeys(range(16), 2), b=dict.fromkeys(range(16, 32), 2))
    found, moves = evened(found, names := servers("a", "b", "c"))
    loads = loads_of(found, names)
    assert moves == 2
    assert max(loads.values()) - min(loads.values()) <= TOLERANCE * sum(loads.values()) / 3


@pytest.mark.parametrize("before", range(1, 8))
def test_all_have_their_share_within_a_tenth_after_one_more_came(before: int) -> None:
    """A job has 16 shards a server."""
    found = {
        16 * server: GroupLoad(f"s{server}", {16 * server + shard: 4 * MB for shard in range(16)})
        for server in range(before)
    }
    found, moves = evened(found, names := servers(*(f"s{it}" for it in range(before + 1))))
    loads, mean = loads_of(found, names), 64 * MB * before / (before + 1)
    assert moves <= before + 1
    assert all(abs(it - mean) <= TOLERANCE * mean for it in loads.values())


def test_a_server_that_is_back_gets_the_groups_that_it_had() -> None:
    both = groups(a={0: 8, 1: 8}, b={2: 8, 3: 8})
    on_one = {number: GroupLoad("a", group.shards) for number, group in both.items()}
    move = rebalance(on_one, servers("a", "b"))
    assert move
    assert not move.shards
    assert rebalance(after(on_one, move), servers("a", "b")) is None


def test_the_shard_that_names_a_group_stays_in_it() -> None:
    move = rebalance(groups(a={0: 30, 1: 10, 2: 10, 3: 10}), servers("a", "b"))
    assert move == Move(0, "b", (1, 2, 3))


def test_a_group_is_not_split_if_that_is_not_allowed() -> None:
    assert rebalance(groups(a={0: 8, 1: 8}), servers("a", "b"), splits=False) is None


def test_a_group_of_one_shard_stays() -> None:
    assert rebalance(groups(a={0: 800}), servers("a", "b")) is None


def test_what_is_small_stays() -> None:
    found = {0: GroupLoad("a", dict.fromkeys(range(16), 10_000))}
    assert rebalance(found, servers("a", "b")) is None
    assert rebalance(found, servers("a", "b"), smallest_bytes=1)


def test_the_server_with_fewer_bytes_of_other_jobs_is_taken_first() -> None:
    move = rebalance(groups(a={0: 8, 1: 8, 2: 8}), {"a": 0, "b": 5, "c": 4})
    assert move
    assert move.server == "c"


def test_of_equally_full_servers_one_gives_that_can() -> None:
    """What the last one by name has is too large for the empty server."""
    found, names = groups(a={0: 8, 1: 8}, b={2: 16}), servers("a", "b", "c")
    assert rebalance(found, names) == Move(0, "c", (1,))
    found[2] = GroupLoad("b", {2: 16 * MB + 1})
    assert rebalance(found, names) == Move(0, "c", (1,)), "one byte makes a difference"
    barred = {2: {"c"}, 3: {"c"}}
    assert rebalance(whole(a=[8, 8], b=[8, 8]), names, barred=barred) == Move(0, "c")


def test_a_server_that_is_not_as_full_does_not_give() -> None:
    assert rebalance(groups(a={0: 7, 1: 7}, b={2: 16}), servers("a", "b", "c")) is None


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=16), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_moves_come_to_an_end_and_leave_nothing_that_one_shard_could_mend(sizes: list[list[int]], more: int) -> None:
    found, shard = dict[int, GroupLoad](), 0
    for number, of_server in enumerate(sizes):
        shards = {shard + place: MB * size for place, size in enumerate(of_server)}
        found[shard] = GroupLoad(f"s{number}", shards)
        shard += len(of_server)
    names = servers(*(f"s{it}" for it in range(len(sizes) + more)))
    before = {shard: size for group in found.values() for shard, size in group.shards.items()}
    found, moves = evened(found, names)
    assert moves <= 4 * shard
    assert {shard: size for group in found.values() for shard, size in group.shards.items()} == before
    assert all(number == min(group.shards) for number, group in found.items())


def test_another_group_moves_instead_of_one_that_is_barred_from_the_emptiest_server() -> None:
    found, names = whole(a=[8, 8], b=[8]), servers("a", "b", "c")
    assert rebalance(found, names) == Move(0, "c")
    assert rebalance(found, names, barred={0: {"c"}}) == Move(1, "c")


def test_a_group_that_fits_worse_moves_instead_of_one_that_is_barred() -> None:
    found, names = whole(a=[4, 8], b=[8]), servers("a", "b", "c")
    assert rebalance(found, names) == Move(0, "c")
    assert rebalance(found, names, barred={0: {"c"}, 1: {"b"}}) == Move(1, "c")


def test_a_group_that_is_barred_is_not_split_either() -> None:
    found, names = groups(a={0: 8, 1: 8}), servers("a", "b")
    assert rebalance(found, names) == Move(0, "b", (1,))
    assert rebalance(found, names, barred={0: {"b"}}) is None


def test_groups_stay_if_all_are_barred_from_the_emptiest_server() -> None:
    found, names = whole(a=[8, 8]), servers("a", "b")
    assert rebalance(found, names) == Move(0, "b")
    assert rebalance(found, names, barred={0: {"b"}, 1: {"b"}}) is None


def test_a_server_that_is_barred_for_one_group_takes_others() -> None:
    found, names = whole(a=[8, 8, 8, 8]), servers("a", "b")
    found, moves = evened(found, names, barred={0: {"b"}, 2: {"b"}})
    assert moves == 2
    assert {number for number, group in found.items() if group.server == "b"} == {1, 3}


def test_groups_that_are_barred_from_the_emptiest_server_move_to_the_next_one() -> None:
    found, names = whole(a=[4, 4, 4, 4], b=[4]), servers("a", "b", "c")
    assert rebalance(found, names, barred={number: {"c"} for number in range(4)}) == Move(0, "b")


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 60)), min_size=1, max_size=16),
    st.integers(0, 2),
)
def test_groups_never_move_to_a_server_that_they_are_barred_from(drawn: list[tuple[int, int, int]], more: int) -> None:
    """The groups are backups, and each is barred from the server of its primary.

    In the end, no move of one of them off one of the fullest servers makes the shares more even.
    """
    found = {number: GroupLoad(f"s{server}", {number: MB * size}) for number, (server, _, size) in enumerate(drawn)}
    barred = {number: {f"s{primary if primary != server else 5}"} for number, (server, primary, _) in enumerate(drawn)}
    names = servers(*(f"s{it}" for it in range(6 + more)))
    found, moves = evened(found, names, splits=False, barred=barred)
    assert moves <= 4 * len(found)
    assert all(group.server not in barred[number] for number, group in found.items())
    loads, least = loads_of(found, names), max(MB, TOLERANCE / 2 * sum(loads_of(found, names).values()) / len(names))
    for number, group in found.items():
        if loads[group.server] == max(loads.values()):
            others = names.keys() - barred[number]
            assert not any(least < group.nbytes < loads[group.server] - loads[it] - least for it in others)
