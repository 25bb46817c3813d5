"""Push stream: each sending thread gets a group of arrays as soon as all arrays of the group have been added."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._wire.plans import PlannedSlice, SliceGroup
from shoal._wire.push_stream import PushStream

PATIENCE_S = 30


ARRAY = np.zeros(1)


def group_of(names: Sequence[str]) -> SliceGroup:
    """A group of whole arrays of one element each."""
    return SliceGroup([PlannedSlice(name, None, (1,), place, place + 1) for place, name in enumerate(names)])


groups = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map(group_of), max_size=8)


@given(groups, st.permutations("abcdef"))
def test_group_is_ready_once_with_the_last_of_its_arrays(wanted: Sequence[SliceGroup], order: list[str]) -> None:
    push_stream = PushStream()
    given_out: list[SliceGroup] = []
    taken = push_stream.ready(wanted)
    there: set[str] = set()
    for name in order:
        push_stream.add(name, ARRAY)
        there.add(name)
        due = [group for group in wanted if name in group.names and there.issuperset(group.names)]
        given_out += [next(taken) for _ in due]
        assert sorted(map(id, given_out)) == sorted(id(group) for group in wanted if there.issuperset(group.names))
    push_stream.end()
    assert next(taken, None) is None
    assert push_stream.complete
    assert list(push_stream.ready(wanted)) != [] or not wanted  # again, from the beginning


def test_several_senders_get_each_their_own_groups_while_arrays_come() -> None:
    push_stream = PushStream()
    names = [f"v{number}" for number in range(300)]

    def send(share: Sequence[SliceGroup]) -> list[SliceGroup]:
        return list(push_stream.ready(share))

    shares = [[group_of([name]) for name in names[first::3]] for first in range(3)]
    with ThreadPoolExecutor(3) as pool:
        senders = [pool.submit(send, share) for share in shares]
        for name in names:
            push_stream.add(name, ARRAY)
        push_stream.end()
        assert [sender.result(PATIENCE_S) for sender in senders] == shares


@pytest.mark.parametrize("when", ["before", "while they wait"])
def test_a_failure_ends_all_senders(when: str) -> None:
    push_stream = PushStream()
    begun = threading.Event()

    def send() -> None:
        for _ in push_stream.ready([group_of("a"), group_of("b")]):
            begun.set()

    push_stream.add("a", ARRAY)
    with ThreadPoolExecutor(2) as pool:
        if when == "before":
            push_stream.fail()
        waiting = [pool.submit(send), pool.submit(push_stream.wait)]
        if when != "before":
            assert begun.wait(PATIENCE_S)
            push_stream.fail()
        for sender in waiting:
            with pytest.raises(errors.Cancelled, match="never computed"):
                sender.result(PATIENCE_S)
    assert not push_stream.complete


def test_failure_after_the_end_is_ignored() -> None:
    push_stream = PushStream()
    push_stream.add("a", ARRAY)
    push_stream.end()
    push_stream.fail()
    push_stream.wait()
    group = group_of("a")
    assert list(push_stream.ready([group])) == [group]
