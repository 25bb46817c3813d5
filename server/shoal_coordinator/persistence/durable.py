"""A cluster that can be written down and restored: its records now, those that changed, and one made of them. Pure."""

from collections.abc import Mapping

from google.protobuf.message import Message

from shoal import errors
from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.cluster.machine import Cluster, ClusterPolicy
from shoal_coordinator.cluster.outstanding import effect_to_proto
from shoal_coordinator.messages.effects import Effect
from shoal_coordinator.messages.refs import JobRef
from shoal_coordinator.persistence.durable_job import DurableJob
from shoal_coordinator.persistence.records import CLUSTER, Kind, Saved, encoded, key


class DurableCluster(Cluster):
    """A cluster that knows its records.

    Whoever makes each of its changes durable before anything that follows from them is seen can lose it at any time,
    and restore another one that goes on as this one would have.
    """

    @classmethod
    def restored(cls, records: Mapping[str, bytes], policy: ClusterPolicy, now: float) -> "DurableCluster | None":
        """The cluster that an earlier coordinator has left; None: there was none.

        It may have been away for long: all leases begin now.

        Raises:
            StoreUnreadable: what it left makes no sense.
        """
        saved = Saved.of(records)
        if saved is None:
            return None
        cluster = cls(saved.cluster.cluster, policy, now)
        try:
            cluster._restore(saved, now)
            cluster.validate()
        except errors.ShoalError as error:
            raise errors.StoreUnreadable(f"its records contradict each other: {error.message}") from error
        except (AssertionError, KeyError, ValueError) as error:
            raise errors.StoreUnreadable(f"its records contradict each other: {error!r}") from error
        return cluster

    @property
    def outstanding(self) -> list[Effect]:
        """What was decided and is not known to be done, in order; all of it may be done again."""
        return list(self._outstanding)

    @property
    def changed(self) -> bool:
        """Whether `changes` has anything."""
        return bool(self._touched)

    def changes(self) -> dict[str, bytes | None]:
        """The records that are others now than at the last call, by key; None: to be taken out."""
        jobs = self._by_submission()
        return {name: self._record(name, jobs) for name in self._touched.take()}

    def records(self) -> dict[str, bytes]:
        """All records, as they should be now."""
        jobs = self._by_submission()
        keys = [
            CLUSTER,
            *(key(Kind.MEMBER, member.id) for member in self._members),
            *(key(Kind.JOB, number, part) for number, job in jobs.items() for part in job.parts),
            *(key(Kind.EFFECT, effect.number) for effect in self._outstanding),
        ]
        records = {name: self._record(name, jobs) for name in keys}
        return {name: record for name, record in records.items() if record is not None}

    def _restore(self, saved: Saved, now: float) -> None:
        counts = saved.cluster
        self._submissions = counts.submissions
        self._scheduler.epoch, self._scheduler.assignments = counts.epoch, counts.assignments
        self._members.restore(saved.members, counts.incarnation, now)
        for number, job in saved.jobs.items():
            spec = Job.from_proto(job.submission.spec)
            self._new_job(JobRef(spec.name, number), spec, now, job.submission.token, job)
        self._outstanding.restore(saved.effects, counts.effects)
        for life in self._jobs.values():
            life.validate()  # before anything is made of it
        # By this coordinator's policy, which may be another one: without a folder, no last checkpoint is waited for.
        for life in self._jobs.live:
            self._emit(life.end_when_saved(now))
        self._schedule(now)
        self._effects.clear()  # they are outstanding, as all others are

    def _by_submission(self) -> dict[int, DurableJob]:
        return {job.ref.submission: job for job in self._jobs.values()}

    def _record(self, name: str, jobs: Mapping[int, DurableJob]) -> bytes | None:
        """A record as it should be now; None: it should not be there."""
        kind, _, rest = name.partition("/")
        message: Message | None
        match kind:
            case Kind.MEMBER:
                member = self._members.find(rest)
                message = member.to_proto() if member else None
            case Kind.JOB:
                number, _, part = rest.partition("/")
                job = jobs.get(int(number))
                message = job.record(part) if job else None
            case Kind.EFFECT:
                effect = self._outstanding.find(int(rest))
                message = effect_to_proto(effect) if effect else None
            case _:
                message = self._counts()
        return None if message is None else encoded(message)

    def _counts(self) -> state_pb2.ClusterRecord:
        return state_pb2.ClusterRecord(
            cluster=self._id,
            epoch=self._scheduler.epoch,
            submissions=self._submissions,
            assignments=self._scheduler.assignments,
            effects=self._outstanding.last,
            incarnation=self._members.incarnation,
        )
