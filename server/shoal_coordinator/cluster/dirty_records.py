"""Dirty-record tracking for the metadata store. Pure: no I/O."""

from shoal_coordinator.messages import record_keys


class DirtyRecords:
    """Keys of records that changed, or that came or went; in the beginning the cluster's own, which is new."""

    def __init__(self) -> None:
        self._keys = {record_keys.CLUSTER}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def counts(self) -> None:
        """Marks the cluster's own record, which has the last number of each kind."""
        self._keys.add(record_keys.CLUSTER)

    def member(self, member: str) -> None:
        """Marks a member, which may have been given an incarnation."""
        self._keys |= {record_keys.of_member(member), record_keys.CLUSTER}

    def job(self, submission: int, part: str) -> None:
        """Marks one of a job's records."""
        self._keys.add(record_keys.of_job(submission, part))

    def effect(self, number: int) -> None:
        """Marks an effect, which may be a new one."""
        self._keys |= {record_keys.of_effect(number), record_keys.CLUSTER}

    def take(self) -> list[str]:
        """Returns all keys that were marked since the last call, in order."""
        taken, self._keys = sorted(self._keys), set()
        return taken
