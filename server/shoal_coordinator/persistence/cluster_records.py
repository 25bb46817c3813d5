"""A cluster as records: all that it is, what has changed, and a cluster made of them. Pure: no I/O.

Whoever makes each of a cluster's changes durable before anything that follows from them is seen can lose the cluster at
any time, and restore another one that goes on as the lost one would have.
"""

from collections.abc import Mapping

from google.protobuf.message import Message

from shoal import errors
from shoal.v1 import state_pb2
from shoal_coordinator.cluster import Cluster, ClusterCounters, ClusterPolicy
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import record_keys
from shoal_coordinator.persistence.effect_codec import effect_to_proto
from shoal_coordinator.persistence.snapshots import snapshot_of


def restored(records: Mapping[str, bytes], policy: ClusterPolicy, now: float) -> Cluster | None:
    """Returns the cluster that an earlier coordinator has left in a store; None if the store is empty.

    The coordinator may have been away for long: all leases begin now.

    Raises:
        StoreUnreadable: the records make no sense.
    """
    snapshot = snapshot_of(records)
    if snapshot is None:
        return None
    try:
        cluster = Cluster.restored(snapshot, policy, now)
        cluster.validate()
    except errors.ShoalError as error:
        raise errors.StoreUnreadable(f"its records contradict each other: {error.message}") from error
    except (AssertionError, KeyError, ValueError) as error:
        raise errors.StoreUnreadable(f"its records contradict each other: {error!r}") from error
    return cluster


class ClusterRecords:
    """The records of one cluster.

    Args:
        cluster: whose; it is only read, but for its list of what has changed, which `changes` takes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def changes(self) -> dict[str, bytes | None]:
        """Returns the records that have changed since the last call, by key; None: to be removed from the store."""
        jobs = self._cluster.submitted
        return {name: self._record(name, jobs) for name in self._cluster.take_dirty()}

    def all(self) -> dict[str, bytes]:
        """Returns all records as they should be now, by key."""
        cluster, jobs = self._cluster, self._cluster.submitted
        keys = [
            record_keys.CLUSTER,
            *(record_keys.of_member(member.id) for member in cluster.members),
            *(record_keys.of_job(number, part) for number, job in jobs.items() for part in job.parts),
            *(record_keys.of_effect(effect.number) for effect in cluster.pending_effects),
        ]
        records = {name: self._record(name, jobs) for name in keys}
        return {name: record for name, record in records.items() if record is not None}

    def _record(self, name: str, jobs: Mapping[int, JobMachine]) -> bytes | None:
        """Returns a record as it should be now; None: it should not be there."""
        kind, _, rest = name.partition("/")
        message: Message | None
        match kind:
            case record_keys.Kind.MEMBER:
                member = self._cluster.find_member(rest)
                message = member.to_proto() if member else None
            case record_keys.Kind.JOB:
                number, _, part = rest.partition("/")
                job = jobs.get(int(number))
                message = job.record(part) if job else None
            case record_keys.Kind.EFFECT:
                effect = self._cluster.find_effect(int(rest))
                message = effect_to_proto(effect) if effect else None
            case _:
                message = _counts_record(self._cluster.counts)
        # Deterministic: the same bytes for the same state.
        return None if message is None else message.SerializeToString(deterministic=True)


def _counts_record(counts: ClusterCounters) -> state_pb2.ClusterRecord:
    return state_pb2.ClusterRecord(
        cluster=counts.cluster,
        generation=counts.generation,
        submissions=counts.submissions,
        assignments=counts.assignments,
        effects=counts.effects,
        incarnation=counts.incarnation,
    )


__all__ = ["ClusterRecords", "restored"]
