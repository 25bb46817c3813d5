"""Codecs that map effects to records and back, one for each kind of effect."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from shoal._wire import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.optim import PlateauState, Schedule
from shoal.status import Evaluation
from shoal.v1 import state_pb2
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    CommitCheckpoint,
    CreateShards,
    CutTaken,
    DropBackup,
    DropCopy,
    DropShards,
    Effect,
    JobRef,
    ProbeServer,
    Promote,
    RemoveWorker,
    ScanCheckpoints,
    ServerRef,
    SetLearningRate,
    SplitGroup,
    TakeCut,
)

E = TypeVar("E", bound=Effect)
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class _Codec(Generic[E, M]):
    """The codec of one kind of effect.

    Attributes:
        field: The field of `EffectRecord` that has the message of this kind.
        encode: Returns the message of an effect.
        decode: Returns the effect of a job, a number and a message.
    """

    field: str
    encode: Callable[[E], M]
    decode: Callable[[JobRef, int, M], E]


def effect_to_proto(effect: Effect) -> state_pb2.EffectRecord:
    """Returns the record of an effect. The effect's number is not in the record but in its key."""
    codec = _CODECS[type(effect)]
    record = state_pb2.EffectRecord(job=effect.job.name, submission=effect.job.submission)
    message: Message = getattr(record, codec.field)
    message.SetInParent()  # sets the kind even if the message is empty
    message.CopyFrom(codec.encode(effect))
    return record


def effect_from_proto(number: int, record: state_pb2.EffectRecord) -> Effect:
    """Returns the effect of a record.

    Raises:
        ShoalError: Its placement or its specification is invalid.
        ValueError: Its kind is unknown.
    """
    field = record.WhichOneof("kind")
    if field is None:
        raise ValueError(f"effect {number} has an unknown kind")
    effect: Effect = _BY_FIELD[field].decode(JobRef(record.job, record.submission), number, getattr(record, field))
    return effect


def _create_shards_record(effect: CreateShards) -> state_pb2.CreateShardsEffect:
    return state_pb2.CreateShardsEffect(
        placement=effect.placement.to_proto(),
        spec=effect.spec.to_proto(),
        sources=[source.to_proto() for source in effect.sources],
    )


def _create_shards(job: JobRef, number: int, record: state_pb2.CreateShardsEffect) -> CreateShards:
    sources = tuple(CheckpointChoice.from_proto(source) for source in record.sources)
    placement = Placement.from_proto(record.placement)
    return CreateShards(job, placement, Job.from_proto(record.spec), sources, number=number)


def _admit_worker_record(effect: AdmitWorker) -> state_pb2.AdmitWorkerEffect:
    return state_pb2.AdmitWorkerEffect(
        worker=effect.worker,
        incarnation=effect.incarnation,
        rank=effect.rank,
        assignment=effect.assignment,
        servers=_server_records(effect.servers),
    )


def _admit_worker(job: JobRef, number: int, record: state_pb2.AdmitWorkerEffect) -> AdmitWorker:
    return AdmitWorker(
        job,
        record.worker,
        record.incarnation,
        record.rank,
        record.assignment,
        _servers(record.servers),
        number=number,
    )


def _remove_worker_record(effect: RemoveWorker) -> state_pb2.RemoveWorkerEffect:
    return state_pb2.RemoveWorkerEffect(
        worker=effect.worker,
        incarnation=effect.incarnation,
        servers=_server_records(effect.servers),
        committed_steps=effect.committed_steps,
    )


def _remove_worker(job: JobRef, number: int, record: state_pb2.RemoveWorkerEffect) -> RemoveWorker:
    committed = record.committed_steps if record.HasField("committed_steps") else None
    return RemoveWorker(job, record.worker, record.incarnation, _servers(record.servers), committed, number=number)


def _set_learning_rate_record(effect: SetLearningRate) -> state_pb2.SetLearningRateEffect:
    servers = _server_records(effect.servers)
    return state_pb2.SetLearningRateEffect(learning_rate=effect.learning_rate.to_proto(), servers=servers)


def _set_learning_rate(job: JobRef, number: int, record: state_pb2.SetLearningRateEffect) -> SetLearningRate:
    return SetLearningRate(job, Schedule.from_proto(record.learning_rate), _servers(record.servers), number=number)


def _drop_shards_record(effect: DropShards) -> state_pb2.DropShardsEffect:
    return state_pb2.DropShardsEffect(servers=_server_records(effect.servers))


def _drop_shards(job: JobRef, number: int, record: state_pb2.DropShardsEffect) -> DropShards:
    return DropShards(job, _servers(record.servers), number=number)


def _scan_checkpoints_record(_: ScanCheckpoints) -> state_pb2.ScanCheckpointsEffect:
    return state_pb2.ScanCheckpointsEffect()


def _scan_checkpoints(job: JobRef, number: int, _: state_pb2.ScanCheckpointsEffect) -> ScanCheckpoints:
    return ScanCheckpoints(job, number=number)


def _take_cut_record(effect: TakeCut) -> state_pb2.TakeCutEffect:
    return state_pb2.TakeCutEffect(
        generation=effect.generation,
        servers=_server_records(effect.servers),
        number=effect.checkpoint,
        last=effect.last,
    )


def _take_cut(job: JobRef, number: int, record: state_pb2.TakeCutEffect) -> TakeCut:
    return TakeCut(job, record.generation, _servers(record.servers), record.number, record.last, number=number)


def _commit_checkpoint_record(effect: CommitCheckpoint) -> state_pb2.CommitCheckpointEffect:
    cut = effect.cut
    return state_pb2.CommitCheckpointEffect(
        placement=effect.placement.to_proto(),
        spec=effect.spec.to_proto(),
        number=cut.number,
        step=cut.step,
        version=cut.version,
        time=cut.time,
        data=cut.data,
        progress_totals=cut.progress_totals,
        best=effect.best.to_proto() if effect.best else None,
        keep=effect.keep,
        held_by=cut.held_by,
        learning_rate=effect.learning_rate.to_proto() if effect.learning_rate else None,
        plateau=effect.plateau.to_proto() if effect.plateau else None,
        submitter=effect.submitter,
        keeps_others=effect.keeps_others,
    )


def _commit_checkpoint(job: JobRef, number: int, record: state_pb2.CommitCheckpointEffect) -> CommitCheckpoint:
    cut = CutTaken(
        job,
        number=record.number,
        step=record.step,
        version=record.version,
        time=record.time,
        data=record.data if record.HasField("data") else None,
        progress_totals=record.progress_totals,
        held_by=record.held_by,
    )
    return CommitCheckpoint(
        job,
        Placement.from_proto(record.placement),
        Job.from_proto(record.spec),
        cut,
        Evaluation.from_proto(record.best) if record.HasField("best") else None,
        tuple(record.keep),
        Schedule.from_proto(record.learning_rate) if record.HasField("learning_rate") else None,
        PlateauState.from_proto(record.plateau) if record.HasField("plateau") else None,
        record.submitter,
        record.keeps_others,
        number=number,
    )


def _group_record(kind: Any, effect: AddBackup | DropBackup | DropCopy | Promote | SplitGroup) -> Any:
    [server] = _server_records(effect.servers)
    return kind(generation=effect.generation, group=effect.group, term=effect.term, server=server)


def _add_backup_record(effect: AddBackup) -> state_pb2.AddBackupEffect:
    record: state_pb2.AddBackupEffect = _group_record(state_pb2.AddBackupEffect, effect)
    record.backup.member, record.backup.address = effect.backup
    record.keeps_term, record.as_backup = effect.keeps_term, effect.as_backup
    return record


def _add_backup(job: JobRef, number: int, record: state_pb2.AddBackupEffect) -> AddBackup:
    server, backup = _servers([record.server, record.backup])
    about = record.generation, record.group, record.term, server, backup
    return AddBackup(job, *about, record.keeps_term, record.as_backup, number=number)


def _drop_backup_record(effect: DropBackup) -> state_pb2.DropBackupEffect:
    record: state_pb2.DropBackupEffect = _group_record(state_pb2.DropBackupEffect, effect)
    record.keeps_term, record.as_backup = effect.keeps_term, effect.as_backup
    return record


def _drop_backup(job: JobRef, number: int, record: state_pb2.DropBackupEffect) -> DropBackup:
    [server] = _servers([record.server])
    about = record.generation, record.group, record.term, server
    return DropBackup(job, *about, record.keeps_term, record.as_backup, number=number)


def _drop_copy(job: JobRef, number: int, record: state_pb2.DropCopyEffect) -> DropCopy:
    [server] = _servers([record.server])
    return DropCopy(job, record.generation, record.group, record.term, server, number=number)


def _promote_record(effect: Promote) -> state_pb2.PromoteEffect:
    record: state_pb2.PromoteEffect = _group_record(state_pb2.PromoteEffect, effect)
    record.keeps_term = effect.keeps_term
    record.split_off.extend(effect.split_off)
    return record


def _promote(job: JobRef, number: int, record: state_pb2.PromoteEffect) -> Promote:
    [server] = _servers([record.server])
    about = record.generation, record.group, record.term, server, record.keeps_term, tuple(record.split_off)
    return Promote(job, *about, number=number)


def _split_group_record(effect: SplitGroup) -> state_pb2.SplitGroupEffect:
    record: state_pb2.SplitGroupEffect = _group_record(state_pb2.SplitGroupEffect, effect)
    record.shards.extend(effect.shards)
    if effect.backup:
        record.keeps_term = effect.keeps_term
        record.backup.member, record.backup.address = effect.backup
    return record


def _split_group(job: JobRef, number: int, record: state_pb2.SplitGroupEffect) -> SplitGroup:
    [server] = _servers([record.server])
    [backup] = _servers([record.backup]) if record.HasField("backup") else (None,)
    about = record.generation, record.group, record.term, server, tuple(record.shards)
    return SplitGroup(job, *about, record.keeps_term, backup, number=number)


def _probe_server_record(effect: ProbeServer) -> state_pb2.ProbeServerEffect:
    [server] = _server_records(effect.servers)
    return state_pb2.ProbeServerEffect(server=server, incarnation=effect.incarnation, asked_at=effect.asked_at)


def _probe_server(job: JobRef, number: int, record: state_pb2.ProbeServerEffect) -> ProbeServer:
    [server] = _servers([record.server])
    return ProbeServer(job, server, record.incarnation, record.asked_at, number=number)


@functools.lru_cache(maxsize=64)  # the effects of a thousand workers name the same servers
def _server_records(servers: tuple[ServerRef, ...]) -> list[state_pb2.ServerRecord]:
    return [state_pb2.ServerRecord(member=server.member, address=server.address) for server in servers]


def _servers(records: Iterable[state_pb2.ServerRecord]) -> tuple[ServerRef, ...]:
    return tuple(ServerRef(record.member, record.address) for record in records)


_CODECS: dict[type[Effect], _Codec[Any, Any]] = {
    CreateShards: _Codec("create_shards", _create_shards_record, _create_shards),
    AdmitWorker: _Codec("admit_worker", _admit_worker_record, _admit_worker),
    RemoveWorker: _Codec("remove_worker", _remove_worker_record, _remove_worker),
    SetLearningRate: _Codec("set_learning_rate", _set_learning_rate_record, _set_learning_rate),
    DropShards: _Codec("drop_shards", _drop_shards_record, _drop_shards),
    ScanCheckpoints: _Codec("scan_checkpoints", _scan_checkpoints_record, _scan_checkpoints),
    TakeCut: _Codec("take_cut", _take_cut_record, _take_cut),
    CommitCheckpoint: _Codec("commit_checkpoint", _commit_checkpoint_record, _commit_checkpoint),
    AddBackup: _Codec("add_backup", _add_backup_record, _add_backup),
    DropBackup: _Codec("drop_backup", _drop_backup_record, _drop_backup),
    DropCopy: _Codec("drop_copy", functools.partial(_group_record, state_pb2.DropCopyEffect), _drop_copy),
    Promote: _Codec("promote", _promote_record, _promote),
    SplitGroup: _Codec("split_group", _split_group_record, _split_group),
    ProbeServer: _Codec("probe_server", _probe_server_record, _probe_server),
}
_BY_FIELD = {codec.field: codec for codec in _CODECS.values()}

__all__ = ["effect_from_proto", "effect_to_proto"]
