"""Dirty-record tracking for the metadata store (no I/O)."""

from shoal_coordinator.messages import record_keys


class DirtyRecords:
    """The keys of records that were changed, added or removed; at first the cluster's own record, which is new."""

    def __init__(self) -> None:
        self._keys = {record_keys.CLUSTER}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def counts(self) -> None:
        """Marks the cluster's own record, which holds the last numbers (`ClusterCounters`)."""
        self._keys.add(record_keys.CLUSTER)

    def member(self, member: str) -> None:
        """Marks a member's record, and the cluster's, since the member may have a new incarnation."""
        self._keys |= {record_keys.of_member(member), record_keys.CLUSTER}

    def job(self, submission: int, part: str) -> None:
        """Marks one record of a job."""
        self._keys.add(record_keys.of_job(submission, part))

    def effect(self, number: int) -> None:
        """Marks an effect's record, and the cluster's, since the effect may be new."""
        self._keys |= {record_keys.of_effect(number), record_keys.CLUSTER}

    def take(self) -> list[str]:
        """Returns all keys marked since the last call, in order."""
        taken, self._keys = sorted(self._keys), set()
        return taken
