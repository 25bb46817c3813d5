"""Restart of roles that die: when each one is started again, and when it is abandoned (no processes, no clock)."""

from dataclasses import dataclass

# Seconds from a role's first death to its restart. The pause doubles for each further death in a row, up to the limit.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# A role that lived for so many seconds works: its earlier deaths do not count any more.
STEADY_S = 60.0
# Deaths in a row after which a role is not started again, because it would not live: its configuration, its disk or
# the host prevent it.
MAX_DEATHS = 5
_DOUBLINGS = 5  # they reach the longest pause


@dataclass(frozen=True, slots=True)
class Death:
    """What follows from a death of a role.

    Attributes:
        exit_status: the exit status of its process; negative if a signal killed it.
        deaths: number of its deaths in a row.
        restart_at: when it is started again, by the caller's clock; None if it is not.
    """

    exit_status: int
    deaths: int
    restart_at: float | None


class RestartPolicy:
    """Decides when one role is started again.

    Args:
        now: when it was started, in seconds of any clock, as in every method.
        deaths: number of its earlier deaths in a row.
        max_deaths: number of deaths in a row after which it is not started again. None means no limit.

    Attributes:
        death: its latest death, until it is started again; None while it lives.
    """

    def __init__(self, now: float, *, deaths: int = 0, max_deaths: int | None = MAX_DEATHS) -> None:
        self._started_at, self._deaths, self._max_deaths = now, deaths, max_deaths
        self.death: Death | None = None

    def died(self, exit_status: int, now: float) -> Death:
        """Records a death. A role that ended with status 0 was asked to stop, and is not started again."""
        self._deaths = 1 if now - self._started_at >= STEADY_S else self._deaths + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._deaths - 1, _DOUBLINGS), LONGEST_PAUSE_S)
        again = exit_status != 0 and (self._max_deaths is None or self._deaths < self._max_deaths)
        self.death = Death(exit_status, self._deaths, now + pause_s if again else None)
        return self.death

    def due(self, now: float) -> bool:
        """Returns whether it should be started again now."""
        return self.death is not None and self.death.restart_at is not None and now >= self.death.restart_at

    def restarted(self, now: float) -> None:
        """Records that its process was started again; it may die at once."""
        self._started_at, self.death = now, None


__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "MAX_DEATHS", "STEADY_S", "Death", "RestartPolicy"]
