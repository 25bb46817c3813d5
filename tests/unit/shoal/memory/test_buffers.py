"""Buffer pool: it lends buffers again within limits of bytes and time, whichever thread returns them."""

import gc
import threading
import weakref

import numpy as np
import pytest

from shoal._memory.buffers import SMALLEST_BYTES, BufferPool

SIZE = SMALLEST_BYTES + 8


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def new_pool(buffers: int = 4, clock: Clock | None = None) -> BufferPool:
    """A pool for so many free buffers of SIZE bytes, which are dropped after ten seconds."""
    return BufferPool(max_bytes=buffers * SIZE, idle_s=10.0, clock=clock or Clock())


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def lend_and_return(pool: BufferPool, *sizes: int) -> list[int]:
    """Takes buffers, all at once, and gives them back in that order; their addresses."""
    arrays = [pool.take(size) for size in sizes]
    addresses = [address(array) for array in arrays]
    while arrays:
        arrays.pop(0)
    return addresses


@pytest.mark.parametrize("nbytes", [0, 1, SMALLEST_BYTES - 1, SMALLEST_BYTES, SIZE + 1, 4 * SIZE, 4 * SIZE + 1])
def test_a_buffer_has_the_size_asked_for_and_begins_at_a_cache_line(nbytes: int) -> None:
    pool = new_pool()
    for _ in range(3):
        array = pool.take(nbytes)
        assert (array.dtype, array.shape) == (np.dtype(np.uint8), (nbytes,))
        assert address(array) % 64 == 0
        array[:] = 1
        del array


def test_buffer_is_lent_again_after_its_last_view() -> None:
    pool = new_pool()
    array = pool.take(SIZE)
    first = address(array)
    view = array[8:].view(np.float64)
    del array
    other = pool.take(SIZE)
    assert address(other) != first
    assert pool.free_bytes == 0
    del view
    assert pool.free_bytes == SIZE
    again = pool.take(SIZE)
    assert address(again) == first
    assert pool.free_bytes == 0


def test_only_a_buffer_of_the_same_size_is_lent_again() -> None:
    pool = new_pool()
    (first,) = lend_and_return(pool, SIZE)
    other = pool.take(SIZE + 1)
    assert address(other) != first
    assert pool.free_bytes == SIZE
    assert address(pool.take(SIZE)) == first


def test_the_buffer_that_came_back_last_is_lent_first() -> None:
    pool = new_pool()
    _, second = lend_and_return(pool, SIZE, SIZE)
    assert address(pool.take(SIZE)) == second


def test_small_buffers_and_ones_that_the_pool_could_not_hold_bypass_it() -> None:
    pool = new_pool()
    lend_and_return(pool, SMALLEST_BYTES - 1, 4 * SIZE + 1)
    assert pool.free_bytes == 0


def test_the_oldest_are_dropped_to_stay_within_the_bound() -> None:
    pool = new_pool(buffers=2)
    arrays = [pool.take(SIZE) for _ in range(3)]
    first, second, third = map(address, arrays)
    for _ in range(3):
        arrays.pop(0)
        assert pool.free_bytes <= 2 * SIZE
    assert pool.free_bytes == 2 * SIZE
    taken = [pool.take(SIZE), pool.take(SIZE)]
    assert [address(array) for array in taken] == [third, second]
    assert first not in (second, third)


def test_one_large_buffer_pushes_several_small_ones_out() -> None:
    pool = new_pool(buffers=4)
    lend_and_return(pool, SIZE, SIZE, SIZE, 3 * SIZE)
    assert pool.free_bytes == 4 * SIZE


def test_buffers_idle_for_long_are_trimmed() -> None:
    clock = Clock()
    pool = new_pool(clock=clock)
    lend_and_return(pool, SIZE)
    clock.now += 6
    lend_and_return(pool, SIZE + 1)
    clock.now += 3.9
    pool.trim()
    assert pool.free_bytes == 2 * SIZE + 1
    clock.now += 0.1
    pool.trim()
    assert pool.free_bytes == SIZE + 1
    clock.now += 6
    pool.trim()
    assert pool.free_bytes == 0


def test_buffers_in_use_are_not_idle() -> None:
    clock = Clock()
    pool = new_pool(clock=clock)
    for _ in range(5):
        clock.now += 9
        pool.trim()
        lend_and_return(pool, SIZE)
    assert pool.free_bytes == SIZE


def test_buffer_is_returned_from_another_thread() -> None:
    pool = new_pool()
    arrays = [pool.take(SIZE)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert pool.free_bytes == SIZE


def test_buffer_returned_during_a_call_of_the_same_thread_is_not_lost() -> None:
    """The clock stands for the garbage collector, which may run at any point, also where the lock is held."""
    held: list[np.ndarray] = []
    taken: list[np.ndarray] = []

    class Collecting(Clock):
        def __call__(self) -> float:
            if held:
                taken.append(pool.take(SIZE))  # what a user's own finalizer might do
                held.clear()
            return super().__call__()

    pool = new_pool(clock=Collecting())
    held.append(pool.take(SIZE))
    other = pool.take(SIZE)
    first = address(other)
    del other
    assert pool.free_bytes == 2 * SIZE
    assert address(taken[0]) != first


def test_buffer_in_a_cycle_is_returned_by_the_collector() -> None:
    pool = new_pool()
    gc.disable()
    try:
        cycle: list[object] = [pool.take(SIZE)[1:]]
        cycle.append(cycle)
        del cycle
        assert pool.free_bytes == 0
        gc.collect()
        assert pool.free_bytes == SIZE
    finally:
        gc.enable()


def test_an_array_does_not_keep_the_pool() -> None:
    pool = new_pool()
    array = pool.take(SIZE)
    alive = weakref.ref(pool)
    del pool
    assert alive() is None
    array[:] = 1
    del array


def test_threads_never_hold_the_same_buffer() -> None:
    pool = new_pool(buffers=3)
    wrong: list[str] = []

    def use(number: int) -> None:
        for _ in range(300):
            array = pool.take(SIZE)
            array[:] = number
            view = array[::7]
            del array
            if not (view == number).all():
                wrong.append(f"thread {number} saw another's")
            if pool.free_bytes > 3 * SIZE:
                wrong.append(f"{pool.free_bytes} bytes are free")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.trim()
    assert wrong == []
    assert 0 < pool.free_bytes <= 3 * SIZE
    assert pool.free_bytes % SIZE == 0
