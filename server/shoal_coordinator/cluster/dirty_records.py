"""Dirty-record tracking for the metadata store, and the set of changed jobs, for calls that wait for a job (no I/O)."""

from shoal_coordinator.messages import record_keys

# The records of a job whose changes may end the wait of a worker. Watchers wait for events.
_WAITED_FOR = {record_keys.JobRecordKind.STATE, record_keys.JobRecordKind.PLAN}


class DirtyRecords:
    """The keys of records that were changed, added or removed; at first the cluster's own record, which is new."""

    def __init__(self) -> None:
        self._keys = {record_keys.CLUSTER}
        self._changed_jobs: dict[int, bool] = {}  # by submission; see `take_changed_jobs`

    def __bool__(self) -> bool:
        return bool(self._keys)

    def counts(self) -> None:
        """Marks the cluster's own record, which holds the last numbers (`ClusterCounters`)."""
        self._keys.add(record_keys.CLUSTER)

    def member(self, member: str) -> None:
        """Marks a member's record, and the cluster's, since the member may have a new incarnation."""
        self._keys |= {record_keys.of_member(member), record_keys.CLUSTER}

    def job(self, submission: int, name: str) -> None:
        """Marks one record of a job."""
        if name in _WAITED_FOR:
            self._changed_jobs[submission] = True
        self._keys.add(record_keys.of_job(submission, name))

    def job_event(self, submission: int) -> None:
        """Marks a job that has a new event, which may have no record."""
        self._changed_jobs.setdefault(submission, False)

    def effect(self, number: int) -> None:
        """Marks an effect's record, and the cluster's, since the effect may be new."""
        self._keys |= {record_keys.of_effect(number), record_keys.CLUSTER}

    def take(self) -> list[str]:
        """Returns all keys marked since the last call, in order."""
        taken, self._keys = sorted(self._keys), set()
        return taken

    def take_changed_jobs(self) -> dict[int, bool]:
        """Returns the jobs with a new event, state or plan since the last call.

        Returns:
            By submission, whether the state or the plan may have changed, and not only the events.
        """
        taken, self._changed_jobs = self._changed_jobs, {}
        return taken
