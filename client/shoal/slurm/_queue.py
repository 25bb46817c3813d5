"""The state of a job of Slurm, as `squeue` says it."""

import enum
import shutil
import subprocess

_TIMEOUT_S = 20.0
# From the manual of squeue, "JOB STATE CODES". A job in any other state has processes, or had them a moment ago.
_WAITING = frozenset(("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"))
_ENDED = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    )
)


class Presence(enum.Enum):
    """Whether an allocation exists: it waits, it runs, it has ended, or Slurm does not answer."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


def presence(job: str) -> Presence:
    """Asks Slurm for an allocation. It has also ended if Slurm does not know it any more.

    Args:
        job: the id of Slurm's job.
    """
    squeue = shutil.which("squeue")
    if squeue is None:
        return Presence.UNKNOWN
    command = [squeue, "--noheader", "--states=all", "--format=%T", f"--jobs={job}"]
    try:
        asked = subprocess.run(  # noqa: S603 - our own command line
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Presence.UNKNOWN
    if asked.returncode:
        return Presence.ENDED if "Invalid job id" in asked.stderr else Presence.UNKNOWN
    states = set(asked.stdout.split())
    if states <= _ENDED:
        return Presence.ENDED
    return Presence.WAITING if states <= _ENDED | _WAITING else Presence.RUNNING


__all__ = ["Presence", "presence"]
