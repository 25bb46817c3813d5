"""Rendezvous: where the replicas of one process, each in a thread, exchange values."""

import threading
from dataclasses import dataclass, field
from typing import Any

from shoal import errors


@dataclass
class _Round:
    """One exchange. `values` and `error` are set when it is over."""

    given: dict[int, tuple[str, Any]] = field(default_factory=dict)  # by replica: what it does, and its value
    over: bool = False
    values: list[Any] = field(default_factory=list)
    error: str = ""


class Rendezvous:
    """Exchanges values between the replicas of one call of `Strategy.run`, any number of times.

    All replicas must make the same exchanges in the same order. If they do not, or if one returns or raises while
    others wait for it, those get an error that names it: nobody waits forever.

    Args:
        replicas: number of replicas.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._condition = threading.Condition()  # guards what follows
        self._round = _Round()
        self._left: dict[int, str] = {}  # replicas that take part in no more exchanges, and why

    def exchange(self, replica: int, what: str, value: Any) -> list[Any]:
        """Waits for all replicas.

        Args:
            replica: number of the calling replica.
            what: what the replica does, in words; the same for all replicas.
            value: its value.

        Returns:
            The values of all replicas, in order.

        Raises:
            RanksDisagree: another replica does something else, or has returned.
        """
        with self._condition:
            own = self._round
            own.given[replica] = what, value
            if self._left or len(own.given) == self._replicas:
                self._finish()
            else:
                self._condition.wait_for(lambda: own.over)
        if own.error:
            raise errors.RanksDisagree(own.error)
        return own.values

    def leave(self, replica: int, why: str) -> None:
        """Records that a replica takes part in no more exchanges: those that wait for it get an error.

        Args:
            replica: its number.
            why: what it did, in words.
        """
        with self._condition:
            self._left[replica] = why
            if self._round.given:
                self._finish()

    def _finish(self) -> None:
        done, self._round = self._round, _Round()
        done.error = self._disagreement(done)
        done.values = [done.given[replica][1] for replica in sorted(done.given)]
        done.over = True
        self._condition.notify_all()

    def _disagreement(self, done: _Round) -> str:
        calls = {replica: what for replica, (what, _) in sorted(done.given.items())}
        if self._left:
            replica, why = next(iter(self._left.items()))
            waits = next(iter(calls.values()))
            return f"replica {replica} {why} while another one waits in {waits}; all replicas must make the same calls"
        if len({*calls.values()}) > 1:
            said = "; ".join(f"replica {replica}: {what}" for replica, what in calls.items())
            return f"the replicas make different calls ({said}); all must make the same ones"
        return ""


__all__ = ["Rendezvous"]
