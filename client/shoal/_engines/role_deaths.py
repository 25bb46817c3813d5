"""Restart pauses of a role that keeps dying. The count is in its folder, so it survives a new process."""

from contextlib import suppress
from pathlib import Path

# Seconds after which a ready role works: its earlier deaths do not count any more.
_STEADY_S = 20.0
# Seconds of the first pause, which follows the second death in a row. It doubles at each further one, up to the limit.
_FIRST_S, _LONGEST_S, _DOUBLINGS = 1.0, 30.0, 5
_FILE = "deaths"


def pause_after_death(folder: Path, lived_s: float) -> float:
    """Counts the death of a role that was ready, and returns the seconds before it is started again.

    Args:
        folder: private folder of the role.
        lived_s: seconds between its being ready and its death.
    """
    file, earlier = folder / _FILE, 0
    with suppress(OSError, ValueError):
        earlier = int(file.read_text())
    deaths = 1 if lived_s >= _STEADY_S else earlier + 1
    with suppress(OSError):  # the disk is full: the next death counts as an earlier one again
        file.write_text(str(deaths))
    return 0.0 if deaths == 1 else min(_FIRST_S * 2.0 ** min(deaths - 2, _DOUBLINGS), _LONGEST_S)


__all__ = ["pause_after_death"]
