"""The restart pause of a role whose process is new after each death. The number of deaths is in the role's folder."""

from contextlib import suppress
from pathlib import Path

from shoal._role.supervision import RestartPolicy

_FILE = "deaths"
_ANY_STATUS = 1  # but not 0, with which a role is not started again


def pause_after_death(folder: Path, lived_s: float) -> float:
    """Counts the death of a role, and returns the seconds before it is started again. There is always another start.

    Args:
        folder: private folder of the role.
        lived_s: seconds between its being ready and its death; 0 if it was not ready.
    """
    file, earlier = folder / _FILE, 0
    with suppress(OSError, ValueError):
        earlier = max(0, int(file.read_text()))
    death = RestartPolicy(-lived_s, deaths=earlier, max_deaths=None).died(_ANY_STATUS, 0.0)
    with suppress(OSError):  # the disk is full: the next death counts as an earlier one again
        file.write_text(str(death.deaths))
    assert death.restart_at is not None
    return death.restart_at


__all__ = ["pause_after_death"]
