"""Waiting pulls compared with a naive implementation, which scans all of them."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from shoal_server.shards.machine.pulls import WaitingPulls


@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "take"]), st.integers(0, 20), st.integers(0, 6)), max_size=60
    )
)
def test_pulls_leave_as_a_scan_lets_them_go(moves: list[tuple[str, int, int]]) -> None:
    pulls, naive = WaitingPulls(), dict[int, int]()
    for move, ticket, step in moves:
        if move == "add" and ticket not in naive:
            pulls.add(ticket, "a", step)
            naive[ticket] = step
        elif move == "remove":
            pulls.remove(ticket)
            naive.pop(ticket, None)
        elif move == "take":
            ready = [(wanted, ticket) for ticket, wanted in naive.items() if wanted <= step]
            ready.sort(key=lambda each: each[0])  # those of one step in the order in which they came
            assert [(reached, ticket) for reached, them in pulls.pop_up_to(step) for ticket in them] == ready
            for _, taken in ready:
                del naive[taken]
        assert {ticket: pull.step for ticket, pull in pulls.items()} == naive
        assert len(pulls) == len(naive)
    assert pulls.clear() == [*naive]
    assert len(pulls) == 0


def test_a_pull_that_waits_long_does_not_let_the_heap_grow() -> None:
    pulls = WaitingPulls()
    pulls.add("last", "b", 0)
    tracemalloc.start()
    try:
        for step in range(1, 10_000):
            pulls.add(step, "a", step)
            pulls.remove(step)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(pulls) == 1
    assert held < 20_000, "a heap that kept each step would hold 80,000 bytes of references alone"
