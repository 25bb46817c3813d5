"""Updates and bytes per second of each server, from the totals in its heartbeats (no I/O)."""

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.status import MemberStatus, Role, ServerLoad

# The shortest and the longest time between two totals that give a rate. A longer time, in which no page was open, would
# not show the current rate.
_LEAST_S, _MOST_S = 0.9, 10.0


@dataclass(frozen=True, slots=True)
class ServerRates:
    """The rates of a server.

    Attributes:
        updates: Updates of shards applied per second.
        received_bytes: Bytes of gradients and values received per second.
        sent_bytes: Bytes of values sent per second.
    """

    updates: float
    received_bytes: float
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class _ServerTotal:
    incarnation: int
    at: float
    load: ServerLoad


class Rates:
    """The last totals and rates of all live servers."""

    def __init__(self) -> None:
        self._totals: dict[str, _ServerTotal] = {}
        self._rates: dict[str, ServerRates] = {}

    def update(self, members: Iterable[MemberStatus], now: float) -> dict[str, ServerRates]:
        """Updates the totals and returns the rates.

        Args:
            members: All members of the cluster.
            now: Seconds of Unix time.

        Returns:
            Rates by server. A server with only one recent total of its incarnation has none.
        """
        totals, rates = {}, {}
        for it in members:
            if it.role is not Role.SERVER or not it.alive:
                continue
            last, current = self._totals.get(it.member), _ServerTotal(it.incarnation, now - it.silent_s, it.load)
            if not last or not _comparable(last, current):
                totals[it.member] = current
                continue
            seconds = current.at - last.at
            if seconds >= _LEAST_S:
                totals[it.member], rates[it.member] = current, _between(last.load, it.load, seconds)
            else:
                totals[it.member] = last
                if it.member in self._rates:
                    rates[it.member] = self._rates[it.member]
        self._totals, self._rates = totals, rates
        return dict(rates)


def _comparable(last: _ServerTotal, now: _ServerTotal) -> bool:
    same = last.incarnation == now.incarnation and last.load.updates <= now.load.updates
    return same and now.at - last.at <= _MOST_S


def _between(last: ServerLoad, now: ServerLoad, seconds: float) -> ServerRates:
    return ServerRates(
        max(0, now.updates - last.updates) / seconds,
        max(0, now.received_bytes - last.received_bytes) / seconds,
        max(0, now.sent_bytes - last.sent_bytes) / seconds,
    )


__all__ = ["Rates", "ServerRates"]
