"""The coordinator's clock, and the thread that tells the coordinator at intervals that time has passed."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

import structlog

from shoal import errors
from shoal.status import Role
from shoal_coordinator.cluster import ExpiryHold
from shoal_coordinator.messages import events

_log = structlog.get_logger(__name__)

# Longest seconds between two ticks, which bounds how late a lost member is found and the wait of a worker ends.
_LONGEST_TICK_S = 0.25
# Ticks after which unused channels are closed: a second.
_CHORES_EVERY = 4


def steady_clock() -> Callable[[], float]:
    """Returns a clock that starts at the current Unix time, and never jumps or goes back."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


class Ticked(Protocol):
    """What the ticker needs of the coordinator."""

    def handle(self, event: events.TimePassed) -> Mapping[str, Role]:
        """Feeds an event to the machine. Returns the members that are declared lost."""

    def end_expired_waits(self) -> ExpiryHold | None:
        """Ends the waits of workers whose time is over. Returns the hold of expiry in progress."""

    def close_unused_channels(self) -> None:
        """Closes the channels to servers that are gone."""


class Ticker:
    """The thread that tells a coordinator that time has passed.

    Args:
        coordinator: The coordinator.
        heartbeat_timeout_s: Seconds without a heartbeat after which a member is lost.
        died: Called with the role of each member that is declared lost.
        clock: Returns seconds of Unix time that never jump.
    """

    def __init__(
        self,
        coordinator: Ticked,
        heartbeat_timeout_s: float,
        died: Callable[[Role], None],
        clock: Callable[[], float],
    ) -> None:
        self._coordinator, self._died, self._clock = coordinator, died, clock
        self._every_s = min(heartbeat_timeout_s / 10, _LONGEST_TICK_S)
        self._heartbeat_delays: Callable[[], tuple[float, int]] = lambda: (0.0, 0)
        self._each_second: Callable[[], object] = bool  # does nothing
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="ticker", daemon=True)

    def start(self, heartbeat_delays: Callable[[], tuple[float, int]], each_second: Callable[[], object]) -> None:
        """Starts to tick.

        Args:
            heartbeat_delays: Returns the longest wait of a heartbeat in the server's queue since its last call, in
                seconds, and the number of refused ones.
            each_second: Called about once a second. It must not block.
        """
        self._heartbeat_delays, self._each_second = heartbeat_delays, each_second
        self._thread.start()

    def stop(self) -> None:
        """Stops, and waits for the tick in progress."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _tick(self) -> None:
        held: ExpiryHold | None = None
        ticks = 0
        while not self._stopped.wait(self._every_s):
            ticks += 1
            try:
                for member, role in self._coordinator.handle(events.TimePassed(*self._heartbeat_delays())).items():
                    _log.warning("declared lost", member=member)
                    self._died(role)
                held = self._tell_hold(self._coordinator.end_expired_waits(), held)
                if ticks % _CHORES_EVERY == 0:
                    self._coordinator.close_unused_channels()
                    self._each_second()
            except errors.Unreachable:  # the coordinator stops
                return
            except Exception:  # the ticker must survive a defect, since it declares members lost
                _log.exception("tick failed")

    def _tell_hold(self, hold: ExpiryHold | None, told: ExpiryHold | None) -> ExpiryHold | None:
        """Logs the beginning and the end of a hold of expiry. Returns the hold in progress."""
        if hold and not told:
            _log.warning("declaring no member lost for a while", silent=hold.silent, reason=hold.why)
        elif told and not hold:
            _log.warning("silent members are declared lost again", held_s=round(self._clock() - told.since, 1))
        return hold


__all__ = ["Ticked", "Ticker", "steady_clock"]
