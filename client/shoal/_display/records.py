"""JSON records that `--json` prints and the page reads.

The fields are a contract with scripts, so each is named here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal import errors
from shoal._display.group_records import group_timings
from shoal._job.description import labelled_values, to_json
from shoal._wire.limits import KEPT_TIMINGS
from shoal.checkpoints import Checkpoint
from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.job import Job
from shoal.status import (
    ClusterStatus,
    DataAccount,
    DataCount,
    Evaluation,
    HeldRange,
    JobMember,
    JobResult,
    JobStatus,
    MemberStatus,
    PlacedRows,
    Progress,
    SavedCheckpoint,
    ServerLoad,
    StepTiming,
    Timings,
)
from shoal.timings import PHASES, Straggler

# Seconds of silence after which a member is late, in a cluster whose interval of heartbeats is short or not known.
LATE_S = 2.0
# Seconds by which a second heartbeat may be late by chance, as on a busy host.
LATE_BY_CHANCE_S = 0.25


def job(status: JobStatus) -> dict[str, Any]:
    """Returns the record of a job."""
    return {
        "name": status.name,
        "state": status.state.value,
        "reason": status.reason,
        **to_json(status.job),
        "workers": list(status.workers),
        "submitted_at": status.submitted_at,
        "started_at": status.started_at,
        "finished_at": status.finished_at,
        "progress": progress(status.progress),
        "checkpoint": checkpoint(status.checkpoint) if status.checkpoint else None,
        "checkpoint_failure": status.checkpoint_failure,
        "restarts": status.restarts,
        "copies": status.copies,
        "failovers": status.failovers,
        "restart_point": asdict(status.restart_point) if status.restart_point else None,
        "restore_note": status.restore_note,
        "evaluation": evaluation(status.evaluation),
        "best": evaluation(status.best),
    }


def listed_job(status: JobStatus) -> dict[str, Any]:
    """Returns the record of a job in a list, which has all fields but the settings."""
    record = job(status)
    del record["settings"]
    return record


def specification(job: Job) -> list[dict[str, Any]]:
    """Returns the fields of a job that the page shows, each with its label."""
    return [{"label": label, "value": value} for label, value in labelled_values(job)]


def progress(done: Progress) -> dict[str, Any]:
    """Returns the record of a job's progress."""
    return {
        "steps": done.steps,
        "samples": done.samples,
        "total_samples": done.total_samples,
        "epoch": done.epoch,
        "samples_per_s": done.samples_per_s,
        "loss": done.loss,
        "staleness_p50": done.staleness_p50,
        "staleness_max": done.staleness_max,
        "rejected": done.rejected,
        "dropped": done.dropped,
        "earlier_steps": done.earlier_steps,
        "lost_steps": done.lost_steps,
        "ended": done.ended,
        "seconds_left": done.seconds_left,
    }


def evaluation(found: Evaluation | None) -> dict[str, Any] | None:
    """Returns the record of an evaluation, or None if there is none."""
    if found is None:
        return None
    return {
        "number": found.number,
        "step": found.step,
        "values": dict(found.values),
        "samples": found.samples,
        "seconds": found.seconds,
        "time": found.time,
    }


def checkpoint(saved: SavedCheckpoint) -> dict[str, Any]:
    """Returns the record of a complete checkpoint."""
    return {"number": saved.number, "step": saved.step, "bytes": saved.nbytes, "time": saved.time}


def stored_checkpoint(found: Checkpoint, *, variables: bool = True) -> dict[str, Any]:
    """Returns the record of a complete checkpoint in storage, with or without its variables."""
    shapes = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in found.variables.items()}
    return {
        "job": found.job,
        "number": found.number,
        "created_at": found.created_at,
        "step": found.step,
        "version": found.version,
        "bytes": found.nbytes,
        **({"variables": shapes} if variables else {}),
        "skipped": list(found.skipped),
        "evaluation": evaluation(found.evaluation),
    }


def damaged_checkpoint(error: errors.ShoalError) -> dict[str, Any]:
    """Returns the record of an unusable checkpoint. The details of `error` have the checkpoint's name."""
    job, _, number = str(error.details["checkpoint"]).rpartition("/")
    fields = {"code": error.code, "message": error.message, "details": error.details}
    return {"job": job, "number": int(number), "error": fields}


def result(result: JobResult) -> dict[str, Any]:
    """Returns the record of a job's result."""
    return {
        "name": result.job,
        "state": "succeeded",
        "reason": result.reason,
        "seconds": result.seconds,
        "progress": progress(result.progress),
        "evaluation": evaluation(result.evaluation),
        "best": evaluation(result.best),
    }


def metrics(job: str, reports: Sequence[MetricsReported], members: Mapping[str, JobMember]) -> dict[str, Any]:
    """Returns the record of the latest reports of a job's workers.

    Args:
        job: name of the job.
        reports: the latest report of each worker.
        members: the members of the job, by member id. A worker that another one has replaced is not among them.
    """
    workers = [
        {
            "worker": it.worker,
            "rank": members[it.worker].rank if it.worker in members else None,
            "state": members[it.worker].state if it.worker in members else "left",
            "step": it.step,
            "time": it.time,
            "values": dict(it.values),
        }
        for it in reports
    ]
    return {"name": job, "workers": workers}


def placement(job: str, rows: Sequence[PlacedRows]) -> dict[str, Any]:
    """Returns the record of where a job's variables are. Rows are `[start, stop)`."""
    placed = [
        {
            "variable": it.variable,
            "start": it.start,
            "stop": it.stop,
            "bytes": it.nbytes,
            "shard": it.shard,
            "server": it.server,
            "address": it.address,
        }
        for it in rows
    ]
    return {"name": job, "rows": placed}


def data(job: str, account: DataAccount) -> dict[str, Any]:
    """Returns the record of a job's data account."""
    return {
        "name": job,
        "samples": account.samples,
        "epochs": account.epochs,
        "epoch": account.epoch,
        "total": data_count(account.total),
        "in_progress": [{"epoch": epoch, **data_count(count)} for epoch, count in account.in_progress.items()],
        "held": [held_range(held) for held in account.held],
    }


def data_count(count: DataCount) -> dict[str, int]:
    """Returns the numbers of samples by state."""
    return {"done": count.done, "leased": count.leased, "requeued": count.requeued, "unleased": count.unleased}


def held_range(held: HeldRange) -> dict[str, Any]:
    """Returns the record of a range that a worker has leased."""
    return {
        "worker": held.worker,
        "rank": held.rank,
        "epoch": held.epoch,
        "start": held.start,
        "stop": held.stop,
    }


def timings(job: str, found: Timings, last: int = KEPT_TIMINGS) -> dict[str, Any]:
    """Returns the timings of a job's latest steps.

    Args:
        job: name of the job.
        found: the timings. All of them are compared.
        last: largest number of steps that are listed for each worker.
    """
    compared = found.compared()
    return {
        "name": job,
        "straggler": straggler(compared.straggler) if compared.straggler else None,
        "workers": [
            {
                "worker": worker,
                "typical": step_timing(compared.typical[worker]) if worker in compared.typical else None,
                "slowest": compared.slowest.get(worker),
                "steps": [step_timing(step) for step in steps[-last:]],
                "group": group_timings(found.groups[worker]) if worker in found.groups else None,
            }
            for worker, steps in found.steps.items()
        ],
        "staleness": {str(versions): count for versions, count in found.staleness.items()},
    }


def straggler(found: Straggler) -> dict[str, Any]:
    """Returns the record of the worker that the others wait for."""
    return {
        "worker": found.worker,
        "ratio": found.ratio,
        "seconds": found.seconds,
        "phase": found.phase,
    }


def step_timing(timing: StepTiming) -> dict[str, Any]:
    """Returns the phases of one step, in seconds."""
    phases = {phase: getattr(timing, phase) for phase in PHASES}
    return {"step": timing.step, "began": timing.began, **phases, "own": timing.own}


def member(member: MemberStatus, late_s: float = LATE_S) -> dict[str, Any]:
    """Returns the record of a member, which is late after more than `late_s` seconds of silence."""
    return {
        "member": member.member,
        "role": member.role.value,
        "state": member_state(member, late_s),
        "incarnation": member.incarnation,
        "address": member.address,
        "device": member.device,
        "metrics_address": member.metrics_address,
        "alive": member.alive,
        "silent_s": member.silent_s,
        "shards": member.shards,
        "bytes": member.bytes,
        "job": member.job,
        "load": server_load(member.load),
        "draining": member.draining,
        "moving_groups": member.moving_groups,
        "waiting_jobs": list(member.waiting_jobs),
        "drained": member.drained,
        "ended_jobs": list(member.ended_jobs),
        "zone": member.zone,
    }


def member_state(member: MemberStatus, late_s: float = LATE_S) -> str:
    """Returns the name of a member's state.

    Returns:
        One of these words: `alive`; `late`, alive but silent for more than `late_s` seconds; `draining`, a server that
        was asked to drain and still serves; `left`, stopped gracefully; `lost`, its heartbeat timeout expired.
    """
    if not member.alive:
        return "left" if member.draining else "lost"
    if member.silent_s > late_s:
        return "late"
    return "draining" if member.draining else "alive"


def server_load(load: ServerLoad) -> dict[str, int]:
    """Returns what a server has done since its process started, and the number of waiting pulls."""
    return {
        "updates": load.updates,
        "received_bytes": load.received_bytes,
        "sent_bytes": load.sent_bytes,
        "waiting_pulls": load.waiting_pulls,
    }


def cluster(status: ClusterStatus, late_s: float | None = None) -> dict[str, Any]:
    """Returns the record of the cluster. Members are late after more than `late_s` seconds of silence."""
    late_s = late_after_s(status) if late_s is None else late_s
    return {**totals(status), "members": [member(each, late_s) for each in status.members]}


def late_after_s(status: ClusterStatus, at_least_s: float = LATE_S) -> float:
    """Returns the seconds of silence after which a member counts as late: two intervals, and at least `at_least_s`."""
    return max(at_least_s, 2 * status.heartbeat_interval_s + LATE_BY_CHANCE_S)


def totals(status: ClusterStatus) -> dict[str, Any]:
    """Returns the record of the cluster without its members."""
    return {
        "cluster": status.cluster,
        "generation": status.generation,
        "heartbeat_interval_s": status.heartbeat_interval_s,
        "shards": status.shards,
        "bytes": status.bytes,
    }


def event(event: Event) -> dict[str, Any]:
    """Returns the record of an event. Its field `event` names the kind."""
    record: dict[str, Any] = {"event": "other", "sequence": event.sequence, "time": event.time}
    match event:
        case StateChanged():
            record |= {"event": "state", "state": event.state.value, "reason": event.reason}
        case MetricsReported():
            record |= {
                "event": "metrics",
                "worker": event.worker,
                "step": event.step,
                "values": dict(event.values),
                "progress": progress(event.progress),
            }
        case CheckpointEnded():
            record |= {
                "event": "checkpoint",
                "attempt": event.attempt,
                "saved": checkpoint(event.saved) if event.saved else None,
                "seconds": event.seconds,
                "failure": event.failure,
            }
        case EvaluationEnded():
            record |= {
                "event": "evaluation",
                "worker": event.worker,
                "result": evaluation(event.result),
                "best": event.best,
            }
        case LogLine():
            record |= {"event": "log", "worker": event.worker, "text": event.text}
    return record


__all__ = [
    "LATE_S",
    "checkpoint",
    "cluster",
    "damaged_checkpoint",
    "data",
    "data_count",
    "evaluation",
    "event",
    "held_range",
    "job",
    "late_after_s",
    "listed_job",
    "member",
    "member_state",
    "placement",
    "progress",
    "result",
    "server_load",
    "step_timing",
    "stored_checkpoint",
    "straggler",
    "timings",
    "totals",
]
