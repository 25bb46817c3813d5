"""Encoders of the coordinator's replies. Requests are decoded by `from_proto` of their types, and by the servicers."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from google.protobuf.message import Message

from shoal._wire import Lease, NoRange, ReportAck, without_middle
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
from shoal_coordinator.access import Revocations
from shoal_coordinator.cluster import ListedJob, token_after_job, token_after_member
from shoal_coordinator.job import JobView
from shoal_coordinator.messages import HeartbeatResult, progress_message, state_code

M = TypeVar("M", bound=Message)

_UINT64 = 2**64 - 1
# Bytes of the jobs or members in one reply, half of what a message may have, and of a job's reason in a list.
_PAGE_BYTES, _LISTED_TEXT_BYTES = 4 << 20, 4 << 10
# Leased ranges in an account of data: each worker has one, and 100,000 would be more than a message may have.
_HELD_RANGES = 10_000


def role_code(role: Role) -> "coordinator_pb2.Role.ValueType":
    """Returns the protocol's number of a role."""
    return coordinator_pb2.Role.Value(role.name)


def report_reply(ack: ReportAck, interval_s: float, ended: job_pb2.JobStatus | None) -> job_pb2.ReportReply:
    """Encodes the reply to a worker's report.

    Args:
        ack: the answer to the worker.
        interval_s: the heartbeat interval from now on, in seconds.
        ended: how its job has ended; see `end_message`.

    Returns:
        The reply.
    """
    return job_pb2.ReportReply(
        done=ack is ReportAck.DONE,
        stop_after_batch=ack is ReportAck.STOP_AFTER_BATCH,
        heartbeat_interval_s=interval_s,
        ended=ended,
    )


def end_message(job: JobView, now: float) -> job_pb2.JobStatus | None:
    """Encodes how a job of sessions has ended: without the lists of its status, which each session would get.

    Args:
        job: the job.
        now: seconds of Unix time.

    Returns:
        The message; None for a job that has not ended, or whose workers are told by their heartbeats.
    """
    if not (job.ended and job.spec.is_session):
        return None
    status = job.status(now)
    saved = status.checkpoint.to_proto() if status.checkpoint else None
    return job_pb2.JobStatus(state=state_code(status.state), reason=status.reason, checkpoint=saved)


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
        copies=status.copies,
        failovers=status.failovers,
        evaluation=status.evaluation.to_proto() if status.evaluation else None,
        best=status.best.to_proto() if status.best else None,
        members=[member.to_proto() for member in status.members],
        restart_point=status.restart_point.to_proto() if status.restart_point else None,
        restore_note=status.restore_note,
    )


def timings_message(timings: Timings) -> job_pb2.GetTimingsReply:
    """Encodes the timings of a job's latest steps."""
    workers = (
        job_pb2.WorkerTimings(
            worker=worker,
            steps=[step.to_proto() for step in steps],
            last_reported_at=timings.last_reported_at.get(worker, 0.0),
            ranks=[times.to_proto() for times in timings.groups[worker].ranks] if worker in timings.groups else [],
        )
        for worker, steps in timings.steps.items()
    )
    return job_pb2.GetTimingsReply(workers=workers, staleness=timings.staleness)


def heartbeat_message(
    result: HeartbeatResult, interval_s: float, revocations: Revocations, known_revision: int
) -> coordinator_pb2.HeartbeatReply:
    """Encodes the reply to a heartbeat.

    Args:
        result: what the member has to do.
        interval_s: the seconds to its next heartbeat.
        revocations: the revoked tokens.
        known_revision: the revision of them that the member knows.

    Returns:
        The reply. It has the revoked tokens only if their revision is another one.
    """
    reply = coordinator_pb2.HeartbeatReply(heartbeat_interval_s=interval_s, revoked_revision=revocations.revision)
    if known_revision != revocations.revision:
        reply.revoked_tokens.extend(revocations.tokens)
    reply.drains, reply.leave = result.drains, result.leave
    if assignment := result.assignment:
        reply.job, reply.assignment, reply.program = assignment.job, assignment.number, assignment.program
        reply.submitter, reply.submitter_role = assignment.submitter, assignment.submitter_role
    return reply


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
            for held in islice(account.held, _HELD_RANGES)
        ],
    )


def _count_message(count: DataCount) -> job_pb2.DataCount:
    return job_pb2.DataCount(
        done=min(count.done, _UINT64),
        leased=min(count.leased, _UINT64),
        requeued=min(count.requeued, _UINT64),
        unleased=min(count.unleased, _UINT64),
    )


def cluster_message(status: ClusterStatus, count: int) -> coordinator_pb2.GetStatusReply:
    """Encodes a page of the members of the cluster and what they hold.

    Args:
        status: the cluster, with the members from the page's first one on. If it has more members than the page, there
            is a next page.
        count: the page's number of members.
    """
    shown = _page(map(member_message, status.members), count)
    return coordinator_pb2.GetStatusReply(
        cluster=status.cluster,
        generation=status.generation,
        members=shown,
        next_page_token=token_after_member(shown[-1].member) if len(shown) < len(status.members) else "",
        heartbeat_interval_s=status.heartbeat_interval_s,
    )


def jobs_message(found: Sequence[ListedJob], count: int) -> job_pb2.ListReply:
    """Encodes a page of jobs.

    Args:
        found: the jobs from the page's first one on. If these are more than the page has, there is a next page.
        count: the page's number of jobs.
    """
    shown = _page((_listed_job_message(job.status) for job in found), count)
    token = token_after_job(found[len(shown) - 1].submission) if len(shown) < len(found) else ""
    return job_pb2.ListReply(jobs=shown, next_page_token=token)


def _page(messages: Iterable[M], count: int) -> list[M]:
    """Returns the first messages, at most `count`, as long as they are not too large for one reply."""
    shown: list[M] = []
    size = 0
    for message in islice(messages, count):
        size += message.ByteSize()
        if shown and size > _PAGE_BYTES:
            break
        shown.append(message)
    return shown


def _listed_job_message(status: JobStatus) -> job_pb2.JobStatus:
    bare = replace(
        status,
        job=replace(status.job, settings={}),  # they may take 1 MiB to encode
        reason=without_middle(status.reason, _LISTED_TEXT_BYTES),
        checkpoint_failure=without_middle(status.checkpoint_failure, _LISTED_TEXT_BYTES),
        restore_note=without_middle(status.restore_note, _LISTED_TEXT_BYTES),
        members=(),
    )
    message = job_message(bare)
    message.spec.ClearField("settings_json")
    return message


def member_message(member: MemberStatus) -> coordinator_pb2.Member:
    """Encodes the status of a member."""
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
        moving_groups=member.moving_groups,
        waiting_jobs=member.waiting_jobs,
        drained=member.drained,
        ended_jobs=member.ended_jobs,
        zone=member.zone,
    )
