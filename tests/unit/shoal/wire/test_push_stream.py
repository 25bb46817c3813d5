"""Groups of arrays are given out as soon as all that they are made of is there, to the thread that sends them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._wire.push_stream import PushStream

PATIENCE_S = 30


@dataclass(frozen=True)
class SliceGroup:
    names: tuple[str, ...]


groups = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4).map(tuple).map(SliceGroup), max_size=8)


@given(groups, st.permutations("abcdef"))
def test_each_group_comes_once_and_with_the_last_of_its_arrays(wanted, order):
    push_stream = PushStream()
    given_out = []
    taken = push_stream.ready(wanted)
    there = set()
    for name in order:
        push_stream.add(name, name)
        there.add(name)
        due = [group for group in wanted if name in group.names and there.issuperset(group.names)]
        given_out += [next(taken) for _ in due]
        assert sorted(map(id, given_out)) == sorted(id(group) for group in wanted if there.issuperset(group.names))
    push_stream.end()
    assert next(taken, None) is None
    assert push_stream.complete
    assert list(push_stream.ready(wanted)) != [] or not wanted  # again, from the beginning


def test_several_senders_get_each_their_own_groups_while_arrays_come():
    push_stream = PushStream()
    names = [f"v{number}" for number in range(300)]
    shares = [[SliceGroup((name,)) for name in names[first::3]] for first in range(3)]
    with ThreadPoolExecutor(3) as pool:
        senders = [pool.submit(lambda share=share: list(push_stream.ready(share))) for share in shares]
        for name in names:
            push_stream.add(name, None)
        push_stream.end()
        assert [sender.result(PATIENCE_S) for sender in senders] == shares


@pytest.mark.parametrize("when", ["before", "while they wait"])
def test_a_failure_ends_all_senders(when):
    push_stream = PushStream()
    begun = threading.Event()

    def send():
        for _ in push_stream.ready([SliceGroup(("a",)), SliceGroup(("b",))]):
            begun.set()

    push_stream.add("a", None)
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


def test_a_failure_after_the_end_is_none():
    push_stream = PushStream()
    push_stream.add("a", 1)
    push_stream.end()
    push_stream.fail()
    push_stream.wait()
    assert list(push_stream.ready([SliceGroup(("a",))])) == [SliceGroup(("a",))]
