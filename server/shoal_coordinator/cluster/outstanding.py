"""Effects that were decided and are not known to be performed: what a coordinator that comes back has to do. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shoal._wire.layout import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.status import Evaluation
from shoal.v1 import state_pb2
from shoal_coordinator.messages.effects import (
    AdmitWorker,
    CountCheckpoints,
    CreateShards,
    DropShards,
    Effect,
    RemoveWorker,
    TakeCut,
    WriteCheckpoint,
)
from shoal_coordinator.messages.events import CutMade
from shoal_coordinator.messages.refs import JobRef, ServerRef


class Outstanding:
    """The effects of one cluster, in the order in which they were decided, which is that of their numbers.

    Args:
        changed: told the number of an effect whose record is another one now, or gone.
    """

    def __init__(self, changed: Callable[[int], None] = lambda _: None) -> None:
        self._changed = changed
        self._effects: dict[int, Effect] = {}
        self.last = 0  # the latest number

    def restore(self, effects: Iterable[Effect], last: int) -> None:
        """Takes up what an earlier coordinator has left to do."""
        self._effects = {effect.number: effect for effect in sorted(effects, key=lambda effect: effect.number)}
        self.last = last

    def __iter__(self) -> Iterator[Effect]:
        """Those that are not over, in order."""
        return iter(list(self._effects.values()))

    def find(self, number: int) -> Effect | None:
        """An effect that is not over."""
        return self._effects.get(number)

    def add(self, effect: Effect) -> Effect:
        """Gives an effect its number."""
        self.last += 1
        numbered = self._effects[self.last] = replace(effect, number=self.last)
        self._changed(self.last)
        return numbered

    def fenced(self, number: int, committed_steps: int) -> None:
        """Notes that the first half of a removal is done."""
        effect = self._effects.get(number)
        if isinstance(effect, RemoveWorker):
            self._effects[number] = replace(effect, committed_steps=committed_steps)
            self._changed(number)

    def end(self, number: int) -> bool:
        """Notes that an effect is over; False if it was before, or was given up."""
        if not self._effects.pop(number, None):
            return False
        self._changed(number)
        return True

    def abandon(self, job: JobRef) -> None:
        """Gives up what was to be done with a job's shards, which are lost. Those that are to be dropped still are."""
        for effect in self:
            if effect.job == job and not isinstance(effect, DropShards):
                self.end(effect.number)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        numbers = list(self._effects)
        assert numbers == sorted(numbers)
        assert all(0 < number == effect.number <= self.last for number, effect in self._effects.items())


def effect_to_proto(effect: Effect) -> state_pb2.EffectRecord:
    """The record of an effect; its number is the key."""
    record = state_pb2.EffectRecord(job=effect.job.name, submission=effect.job.submission)
    match effect:
        case CreateShards():
            created = state_pb2.CreateShardsEffect(
                placement=effect.placement.to_proto(),
                spec=effect.spec.to_proto(),
                sources=[source.to_proto() for source in effect.sources],
            )
            record.create_shards.CopyFrom(created)
        case AdmitWorker():
            admitted = state_pb2.AdmitWorkerEffect(
                worker=effect.worker,
                incarnation=effect.incarnation,
                rank=effect.rank,
                assignment=effect.assignment,
                servers=_server_records(effect.servers),
            )
            record.admit_worker.CopyFrom(admitted)
        case RemoveWorker():
            removed = state_pb2.RemoveWorkerEffect(
                worker=effect.worker,
                incarnation=effect.incarnation,
                servers=_server_records(effect.servers),
                committed_steps=effect.committed_steps,
            )
            record.remove_worker.CopyFrom(removed)
        case DropShards():
            record.drop_shards.CopyFrom(state_pb2.DropShardsEffect(servers=_server_records(effect.servers)))
        case CountCheckpoints():
            record.count_checkpoints.SetInParent()
        case TakeCut():
            taken = state_pb2.TakeCutEffect(
                epoch=effect.epoch,
                servers=_server_records(effect.servers),
                number=effect.checkpoint,
                last=effect.last,
            )
            record.take_cut.CopyFrom(taken)
        case WriteCheckpoint():
            cut = effect.cut
            written = state_pb2.WriteCheckpointEffect(
                placement=effect.placement.to_proto(),
                spec=effect.spec.to_proto(),
                number=cut.number,
                step=cut.step,
                version=cut.version,
                time=cut.time,
                data=cut.data,
                tally=cut.tally,
                best=effect.best.to_proto() if effect.best else None,
                keep=effect.keep,
                held_by=cut.held_by,
            )
            record.write_checkpoint.CopyFrom(written)
    return record


def effect_from_proto(number: int, record: state_pb2.EffectRecord) -> Effect:
    """The effect that a record is of.

    Raises:
        ShoalError: its placement or its specification makes no sense.
        ValueError: it is of no kind that there is.
    """
    job = JobRef(record.job, record.submission)
    match record.WhichOneof("kind"):
        case "create_shards":
            created = record.create_shards
            return CreateShards(
                job,
                Placement.from_proto(created.placement),
                Job.from_proto(created.spec),
                tuple(CheckpointChoice.from_proto(source) for source in created.sources),
                number=number,
            )
        case "admit_worker":
            admitted = record.admit_worker
            return AdmitWorker(
                job,
                admitted.worker,
                admitted.incarnation,
                admitted.rank,
                admitted.assignment,
                _servers(admitted.servers),
                number=number,
            )
        case "remove_worker":
            removed = record.remove_worker
            committed = removed.committed_steps if removed.HasField("committed_steps") else None
            return RemoveWorker(
                job, removed.worker, removed.incarnation, _servers(removed.servers), committed, number=number
            )
        case "drop_shards":
            return DropShards(job, _servers(record.drop_shards.servers), number=number)
        case "count_checkpoints":
            return CountCheckpoints(job, number=number)
        case "take_cut":
            taken = record.take_cut
            return TakeCut(job, taken.epoch, _servers(taken.servers), taken.number, taken.last, number=number)
        case "write_checkpoint":
            written = record.write_checkpoint
            cut = CutMade(
                job,
                number=written.number,
                step=written.step,
                version=written.version,
                time=written.time,
                data=written.data if written.HasField("data") else None,
                tally=written.tally,
                held_by=written.held_by,
            )
            return WriteCheckpoint(
                job,
                Placement.from_proto(written.placement),
                Job.from_proto(written.spec),
                cut,
                Evaluation.from_proto(written.best) if written.HasField("best") else None,
                tuple(written.keep),
                number=number,
            )
    raise ValueError(f"effect {number} is of no kind that there is")


def _server_records(servers: Iterable[ServerRef]) -> list[state_pb2.ServerRecord]:
    return [state_pb2.ServerRecord(member=server.member, address=server.address) for server in servers]


def _servers(records: Iterable[state_pb2.ServerRecord]) -> tuple[ServerRef, ...]:
    return tuple(ServerRef(record.member, record.address) for record in records)
