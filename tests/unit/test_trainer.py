"""What a trainer says of its end. Whole trainers run in the tests of clusters."""

import os

import pytest

from shoal import errors
from shoal._cursor import Cursor
from shoal_worker.messages import LEAVE, Outcome, decode, encode
from shoal_worker.trainer import _read_line, log_failure, outcome_of


def raising(error: Exception):
    def run() -> None:
        raise error

    return run


def test_a_failure_is_in_the_log_with_its_traceback(capfd):
    log_failure(outcome_of(raising(errors.ProgramError("program a:b raised\nTraceback: \ud800"))))
    assert capfd.readouterr().err == "PROGRAM_ERROR: program a:b raised\nTraceback: ?\n"


@pytest.mark.parametrize("outcome", [Outcome(), Outcome("another life goes on", fenced=True)])
def test_what_is_no_failure_of_the_jobs_is_not(capfd, outcome):
    log_failure(outcome)
    assert capfd.readouterr().err == ""


def test_an_outcome_survives_the_way_to_the_daemon():
    for outcome in (Outcome(), Outcome("no", fenced=True), Outcome(left=True), Outcome(left=True, cursor=Cursor(3, 8))):
        assert decode(encode(outcome)) == outcome


def test_a_word_that_comes_with_the_instructions_is_heard():
    reading, writing = os.pipe()
    os.write(writing, b"{}\n" + LEAVE)
    assert _read_line(reading) == (b"{}", LEAVE)
    os.close(reading)
    os.close(writing)
