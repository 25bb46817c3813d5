"""Reads of a storage with a deadline: results and errors pass through, and the threads that hang are limited."""

import itertools
import threading

import pytest

from shoal import errors
from shoal_coordinator.effects.storage_reads import StorageReads
from support.waiting import wait_until


def forever() -> bool:
    return True


def test_results_and_errors_of_a_read_are_those_of_the_storage() -> None:
    reads = StorageReads(60.0)
    assert reads.run("a", "x", lambda: 3, forever) == 3

    def fail() -> None:
        raise errors.CorruptCheckpoint("damaged")

    def late() -> None:
        raise TimeoutError("the disk's own limit")

    with pytest.raises(errors.CorruptCheckpoint, match="damaged"):
        reads.run("a", "x", fail, forever)
    with pytest.raises(TimeoutError, match="the disk's own limit"):
        reads.run("a", "x", late, forever)


def test_a_job_reads_again_after_its_hanging_read_has_ended() -> None:
    answers = threading.Event()
    ticks = itertools.chain([0.0, 60.0], itertools.repeat(60.0))
    reads = StorageReads(60.0, lambda: next(ticks))
    with pytest.raises(errors.StorageFailed, match="did not return x within 60 s"):
        reads.run("a", "x", lambda: answers.wait(30), forever)
    with pytest.raises(errors.StorageFailed, match="an earlier access to x for job a hangs"):
        reads.run("a", "y", lambda: True, forever)
    answers.set()

    def read_again() -> bool:
        try:
            return reads.run("a", "y", lambda: True, forever)
        except errors.StorageFailed:
            return False

    wait_until(read_again, what="the end of the hanging read")


def test_reads_of_other_jobs_go_on_until_too_many_hang() -> None:
    answers = threading.Event()
    reads = StorageReads(0.0)
    for number in range(32):
        with pytest.raises(errors.StorageFailed, match="within 0 s"):
            reads.run(f"job-{number}", "x", lambda: answers.wait(30), forever)
    with pytest.raises(errors.StorageFailed, match="y was not reached, because 32 other accesses hang"):
        reads.run("another", "y", lambda: True, forever)
    answers.set()


def test_a_read_that_is_not_needed_any_more_is_left() -> None:
    answers = threading.Event()
    with pytest.raises(errors.Cancelled, match="to return x is not needed any more"):
        StorageReads(60.0).run("a", "x", lambda: answers.wait(30), lambda: False)
    answers.set()
