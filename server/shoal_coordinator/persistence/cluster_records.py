"""The mapping between a cluster and its records (no I/O).

Each change is durable before anyone sees its consequences, so a coordinator can fail at any time. The cluster that is
restored from the records continues where the failed coordinator stopped.
"""

from collections.abc import Callable, Mapping
from functools import partial

from google.protobuf.message import Message

from shoal import errors
from shoal.v1 import state_pb2
from shoal_coordinator.cluster import Cluster, ClusterCounters, ClusterPolicy
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import record_keys
from shoal_coordinator.persistence.effect_codec import effect_to_proto
from shoal_coordinator.persistence.snapshots import snapshot_of

# Makes a record; None if there should be none.
Later = Callable[[], Message | None]


def restored(records: Mapping[str, bytes], policy: ClusterPolicy, now: float) -> Cluster | None:
    """Returns the cluster of an earlier coordinator's records, or None if there are no records.

    The coordinator may have been away for long, so all heartbeat timeouts start again now.

    Args:
        records: Serialized records by key.
        policy: The operator's settings.
        now: Seconds of Unix time.

    Returns:
        The cluster, which has been validated.

    Raises:
        StoreUnreadable: A record is invalid, or records contradict each other.
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
        cluster: The cluster. It is only read, except that `changes` clears its dirty records.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def changes(self) -> dict[str, bytes | None]:
        """Returns the records that have changed since the last call, by key. None means to remove the record."""
        return encode_records(self.changes_later())

    def changes_later(self) -> dict[str, Later]:
        """Returns, as `changes`, functions that make the records as they are now, for `encode_records`.

        They may be called on any thread while the cluster changes. To make the records of 10,000 variables takes long.
        """
        jobs = self._cluster.submitted
        return {name: self._record(name, jobs) for name in self._cluster.take_dirty()}

    def all(self) -> dict[str, bytes]:
        """Returns all current records by key."""
        cluster, jobs = self._cluster, self._cluster.submitted
        keys = [
            record_keys.CLUSTER,
            *(record_keys.of_member(member.id) for member in cluster.members),
            *(record_keys.of_job(number, name) for number, job in jobs.items() for name in job.record_names),
            *(record_keys.of_effect(effect.number) for effect in cluster.pending_effects),
        ]
        records = encode_records({name: self._record(name, jobs) for name in keys})
        return {name: record for name, record in records.items() if record is not None}

    def _record(self, name: str, jobs: Mapping[int, JobMachine]) -> Later:
        """Returns a function that makes a current record, or None if there should be none."""
        kind, _, rest = name.partition("/")
        message: Message | None
        match kind:
            case record_keys.RecordKind.MEMBER:
                member = self._cluster.find_member(rest)
                message = member.to_proto() if member else None
            case record_keys.RecordKind.JOB:
                number, _, record_name = rest.partition("/")
                job = jobs.get(int(number))
                if job:
                    return job.record_later(record_name)
                message = None
            case record_keys.RecordKind.EFFECT:
                effect = self._cluster.find_effect(int(rest))
                if effect:  # it never changes
                    return partial(effect_to_proto, effect)
                message = None
            case _:
                message = _counts_record(self._cluster.counts)
        return lambda: message


def encode_records(records: Mapping[str, Later]) -> dict[str, bytes | None]:
    """Returns the serialized records. The same state gives the same bytes."""
    messages = {name: make() for name, make in records.items()}
    return {
        name: None if message is None else message.SerializeToString(deterministic=True)
        for name, message in messages.items()
    }


def _counts_record(counts: ClusterCounters) -> state_pb2.ClusterRecord:
    return state_pb2.ClusterRecord(
        cluster=counts.cluster,
        generation=counts.generation,
        submissions=counts.submissions,
        assignments=counts.assignments,
        effects=counts.effects,
        incarnation=counts.incarnation,
    )


__all__ = ["ClusterRecords", "Later", "encode_records", "restored"]
