"""Which records are others than when they were last written. Pure."""

from shoal_coordinator.messages.record_keys import CLUSTER, Kind, key


class Touched:
    """Keys of records that changed, or that came or went; in the beginning the cluster's own, which is new."""

    def __init__(self) -> None:
        self._keys = {CLUSTER}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def counts(self) -> None:
        """One of the numbers that count for ever."""
        self._keys.add(CLUSTER)

    def member(self, member: str) -> None:
        """A member, which may have been given an incarnation."""
        self._keys |= {key(Kind.MEMBER, member), CLUSTER}

    def job(self, submission: int, part: str) -> None:
        """One of a job's records."""
        self._keys.add(key(Kind.JOB, submission, part))

    def effect(self, number: int) -> None:
        """An effect, which may be a new one."""
        self._keys |= {key(Kind.EFFECT, number), CLUSTER}

    def take(self) -> list[str]:
        """All keys since the last time, in order."""
        taken, self._keys = sorted(self._keys), set()
        return taken
