"""Control of the garbage collector: it skips objects from the start of the process, but collects later ones."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from shoal._memory import gc_control


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    assert gc.isenabled()


def test_objects_made_meanwhile_are_never_collected_or_scanned() -> None:
    with gc_control.frozen_from_gc():
        assert not gc.isenabled()
        loaded = Ring()
    assert gc.isenabled()
    assert not any(found is loaded for found in gc.get_objects())
    frozen_from_gc = weakref.ref(loaded)
    del loaded
    gc.collect()
    assert frozen_from_gc() is not None


def test_later_garbage_is_collected() -> None:
    with gc_control.frozen_from_gc():
        pass
    ring = Ring()
    gone = weakref.ref(ring)
    del ring
    gc.collect()
    assert gone() is None


def test_a_start_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(OSError, match="in use"), gc_control.frozen_from_gc():
        raise OSError("in use")
    assert gc.isenabled()


def test_garbage_collection_is_delayed_until_the_last_of_blocks_that_overlap() -> None:
    first, second = gc_control.delayed_gc(), gc_control.delayed_gc()
    with first:
        second.__enter__()
        assert not gc.isenabled()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_a_collector_that_a_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_control.delayed_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
