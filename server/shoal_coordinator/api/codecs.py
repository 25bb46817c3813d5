"""Encoders of the coordinator's replies. The types' own `from_proto` and the servicers decode requests."""

from shoal._wire import Lease, NoRange
from shoal.status import (
    ClusterStatus,
    DataAccount,
    DataCount,
    JobStatus,
    MemberStatus,
    Role,
    Timings,
)
from shoal.v1 import coordinator_pb2, job_pb2
from shoal_coordinator.messages import JoinResult, progress_message, state_code

_UINT64 = 2**64 - 1


def role_code(role: Role) -> "coordinator_pb2.Role.ValueType":
    """Returns the protocol's number of a role."""
    return coordinator_pb2.Role.Value(role.name)


def job_message(status: JobStatus) -> job_pb2.JobStatus:
    """Encodes the status of a job."""
    return job_pb2.JobStatus(
        spec=status.job.to_proto(),
        state=state_code(status.state),
        reason=status.reason,
        submitted_at=status.submitted_at,
        started_at=status.started_at,
        finished_at=status.finished_at,
        workers=status.workers,
        progress=progress_message(status.progress),
        checkpoint=status.checkpoint.to_proto() if status.checkpoint else None,
        checkpoint_failure=status.checkpoint_failure,
        restarts=status.restarts,
        evaluation=status.evaluation.to_proto() if status.evaluation else None,
        best=status.best.to_proto() if status.best else None,
    )


def timings_message(timings: Timings) -> job_pb2.GetTimingsReply:
    """Encodes the timings of a job's latest steps."""
    workers = (
        job_pb2.WorkerTimings(
            worker=worker,
            steps=[step.to_proto() for step in steps],
            last_reported_at=timings.last_reported_at.get(worker, 0.0),
        )
        for worker, steps in timings.steps.items()
    )
    return job_pb2.GetTimingsReply(workers=workers, staleness=timings.staleness)


def join_message(joined: JoinResult) -> job_pb2.JoinReply:
    """Encodes the state of a worker's entry into a job."""
    return job_pb2.JoinReply(
        ready=joined.ready,
        placement=joined.placement.to_proto() if joined.placement else None,
        rank=joined.rank,
        step=joined.step,
        spec=joined.spec.to_proto(),
        state=state_code(joined.state),
        assign_values=joined.assign_values,
        restored=sorted(joined.restored),
    )


def lease_message(answer: Lease | NoRange) -> job_pb2.LeaseReply:
    """Encodes a leased range of data, or the reason why there is none."""
    match answer:
        case Lease():
            return job_pb2.LeaseReply(range=answer.to_proto(), order=answer.order)
        case NoRange.WAIT:
            return job_pb2.LeaseReply(wait=True)
        case NoRange.FINISHED:
            return job_pb2.LeaseReply(finished=True)


def data_message(account: DataAccount) -> job_pb2.GetDataReply:
    """Encodes the account of a job's data."""
    return job_pb2.GetDataReply(
        samples=account.samples,
        epochs=account.epochs,
        epoch=account.epoch,
        total=_count_message(account.total),
        in_progress=[
            job_pb2.EpochData(epoch=epoch, count=_count_message(count)) for epoch, count in account.in_progress.items()
        ],
        held=[
            job_pb2.HeldRange(
                worker=held.worker,
                rank=held.rank,
                range=job_pb2.DataRange(epoch=held.epoch, start=held.start, stop=held.stop),
            )
            for held in account.held
        ],
    )


def _count_message(count: DataCount) -> job_pb2.DataCount:
    return job_pb2.DataCount(
        done=min(count.done, _UINT64),
        leased=min(count.leased, _UINT64),
        requeued=min(count.requeued, _UINT64),
        unleased=min(count.unleased, _UINT64),
    )


def cluster_message(status: ClusterStatus) -> coordinator_pb2.GetStatusReply:
    """Encodes the members of the cluster and what they hold."""
    members = [_member_message(member) for member in status.members]
    return coordinator_pb2.GetStatusReply(
        cluster=status.cluster,
        generation=status.generation,
        members=members,
        heartbeat_interval_s=status.heartbeat_interval_s,
    )


def _member_message(member: MemberStatus) -> coordinator_pb2.Member:
    return coordinator_pb2.Member(
        member=member.member,
        role=role_code(member.role),
        incarnation=member.incarnation,
        address=member.address,
        device=member.device,
        metrics_address=member.metrics_address,
        alive=member.alive,
        silent_s=member.silent_s,
        shards=member.shards,
        bytes=member.bytes,
        job=member.job,
        load=member.load.to_proto() if member.role is Role.SERVER else None,
        draining=member.draining,
    )
