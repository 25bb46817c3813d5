"""Borrowed arrays: memory is returned when the last view of it is deleted, and not before."""

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest

from shoal._memory.borrowed_arrays import lend
from shoal._transport.segment import Regions

VIEWS = {
    "a slice": lambda array: array[8:24],
    "a view of a view of a view": lambda array: array[8:][4:][2:4],
    "another dtype": lambda array: array.view(np.float32),
    "a column of another dtype and shape": lambda array: array.view(np.int16).reshape(4, 8).T[2],
    "an array over the array": lambda array: np.ndarray((4, 2), np.int32, array, 32),
    "an array over a view": lambda array: np.ndarray((2,), np.int32, array[8:].view(np.int16), 8),
    "a memoryview": lambda array: memoryview(array)[3:],
    "an array over a memoryview": lambda array: np.frombuffer(memoryview(array)[8:], np.int64),
    "what iterates over it": iter,
    "an array without dimensions": lambda array: array[0, ...],
}


class Loan:
    """Sixty-four bytes, lent once."""

    def __init__(self) -> None:
        self.memory = bytearray(range(64))
        self.returns: list[str] = []
        self.array = lend(memoryview(self.memory), self.returns.append, "back")


def test_loan_is_the_memory_itself_as_bytes() -> None:
    loan = Loan()
    assert (loan.array.dtype, loan.array.shape, loan.array.flags.writeable) == (np.dtype(np.uint8), (64,), True)
    loan.array[3] = 77
    assert loan.memory[3] == 77


def test_loan_is_returned_once() -> None:
    loan = Loan()
    assert loan.returns == []
    del loan.array
    assert loan.returns == ["back"]


@pytest.mark.parametrize("look", VIEWS.values(), ids=VIEWS)
def test_any_view_keeps_the_loan(look: Callable[[np.ndarray], object]) -> None:
    loan = Loan()
    view = look(loan.array)
    del loan.array
    assert loan.returns == []
    del view
    assert loan.returns == ["back"]


def test_a_copy_does_not_keep_it() -> None:
    loan = Loan()
    copy = loan.array[4:].copy()
    del loan.array
    assert loan.returns == ["back"]
    assert copy[0] == 4


def test_the_last_of_many_views_counts() -> None:
    loan = Loan()
    views = [loan.array[start:] for start in range(64)]
    del loan.array
    while len(views) > 1:
        views.pop(len(views) // 2)
        assert loan.returns == []
    views.clear()
    assert loan.returns == ["back"]


def test_another_thread_may_have_the_last_view() -> None:
    loan = Loan()
    views = [loan.array[1:]]
    del loan.array
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert loan.returns == ["back"]


def test_a_view_in_a_cycle_keeps_it_until_the_collector_comes() -> None:
    loan = Loan()
    gc.disable()
    try:
        cycle: list[object] = [loan.array[1:]]
        cycle.append(cycle)
        del loan.array, cycle
        assert loan.returns == []
        gc.collect()
        assert loan.returns == ["back"]
    finally:
        gc.enable()


# Regions.


def taken_from(regions: Regions) -> tuple[int, np.ndarray]:
    """Takes a region; asserts that one is free."""
    found = regions.take()
    assert found
    return found


def test_region_is_lent_to_one_user_until_its_last_view_is_gone() -> None:
    memory = memoryview(bytearray(3 * 4096))
    slots = Regions([memory[slot * 4096 : (slot + 1) * 4096] for slot in range(3)])
    taken = [taken_from(slots) for _ in range(3)]
    assert [index for index, _ in taken] == [0, 1, 2]
    assert slots.take() is None
    view = taken[1][1][64:].view("f4").reshape(-1, 8)[1]
    view[:] = 1.0
    assert bytes(memory[4096 + 96 :][:4]) == b"\0\0\x80?"
    taken.clear()
    others = [taken_from(slots), taken_from(slots)]
    assert {index for index, _ in others} == {0, 2}
    assert slots.take() is None
    del view
    index, array = taken_from(slots)
    assert (index, array.nbytes) == (1, 4096)


def test_the_slot_that_came_free_last_is_lent_first() -> None:
    slots = Regions([memoryview(bytearray(8)) for _ in range(3)])
    for _ in range(3):
        index, array = taken_from(slots)
        assert index == 0
        del array


def test_regions_are_freed_by_threads_and_by_the_collector() -> None:
    slots = Regions([memoryview(bytearray(8)) for _ in range(2)])
    taken = [taken_from(slots), taken_from(slots)]
    gc.disable()
    try:
        cycle: list[object] = [taken.pop()[1][1:]]
        cycle.append(cycle)
        thread = threading.Thread(target=taken.clear)
        thread.start()
        thread.join()
        assert taken_from(slots)[0] == 0
        first = taken_from(slots)
        del cycle
        assert first[0] == 0
        assert slots.take() is None
        gc.collect()
        assert taken_from(slots)[0] == 1
    finally:
        gc.enable()


@pytest.mark.parametrize("sizes", [[], [0], [8, 4]])
def test_slots_are_of_one_size(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="must have one size"):
        Regions([memoryview(bytearray(size)) for size in sizes])
