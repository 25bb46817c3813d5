"""What a trainer says of its end. Whole trainers run in the tests of clusters."""

import pytest

from shoal import errors
from shoal_worker.messages import Outcome
from shoal_worker.trainer import log_failure, outcome_of


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
