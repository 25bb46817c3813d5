"""Exit codes of the commands and the roles, by error."""

from collections.abc import Mapping

from shoal import errors

FAILED, INVALID, UNREACHABLE, UNKNOWN, CONFLICT, TIMEOUT, JOB_FAILED, INTERRUPTED = 1, 2, 3, 4, 5, 6, 7, 130

_EXIT_CODES: Mapping[type[errors.ShoalError], int] = {
    errors.BadRequest: INVALID,
    errors.InvalidJob: INVALID,
    errors.InvalidOptimizer: INVALID,
    errors.InvalidVariable: INVALID,
    errors.InvalidLayer: INVALID,
    errors.InvalidShape: INVALID,
    errors.InvalidData: INVALID,
    errors.ProgramError: INVALID,
    errors.ProgramNotAllowed: INVALID,
    errors.IncompatibleCheckpoint: INVALID,
    errors.Forbidden: INVALID,
    errors.LimitExceeded: INVALID,
    errors.Unreachable: UNREACHABLE,
    errors.StartFailed: UNREACHABLE,
    errors.PortInUse: UNREACHABLE,
    errors.UnknownJob: UNKNOWN,
    errors.UnknownCheckpoint: UNKNOWN,
    errors.UnknownGroup: UNKNOWN,
    errors.UnknownMember: UNKNOWN,
    errors.JobExists: CONFLICT,
    errors.JobRunning: CONFLICT,
    errors.JobEnded: CONFLICT,
    errors.NotPlaced: CONFLICT,
    errors.ServerNeeded: CONFLICT,
    errors.DeadlineExceeded: TIMEOUT,
    # A crash of Python exits with 1, and a script must not take that for the end of a job.
    errors.JobFailed: JOB_FAILED,
    errors.Cancelled: JOB_FAILED,
}


def exit_code(error: errors.ShoalError) -> int:
    """Returns the exit code for an error."""
    return _EXIT_CODES.get(type(error), FAILED)


__all__ = [
    "CONFLICT",
    "FAILED",
    "INTERRUPTED",
    "INVALID",
    "JOB_FAILED",
    "TIMEOUT",
    "UNKNOWN",
    "UNREACHABLE",
    "exit_code",
]
