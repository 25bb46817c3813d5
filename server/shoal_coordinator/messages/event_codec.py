"""Conversion of a job's events to protobuf messages, for watchers and the store.

`shoal.events.from_proto` is the inverse.
"""

from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.status import JobState, Progress
from shoal.v1 import job_pb2

_UINT64 = 2**64 - 1


def state_code(state: JobState) -> "job_pb2.JobState.ValueType":
    """Returns the protobuf number of a state."""
    return job_pb2.JobState.Value(state.name)


def progress_message(progress: Progress) -> job_pb2.Progress:
    """Returns a job's progress as a message."""
    return job_pb2.Progress(
        steps=progress.steps,
        samples=progress.samples,
        total_samples=min(progress.total_samples, _UINT64),
        epoch=progress.epoch,
        samples_per_s=progress.samples_per_s,
        loss=progress.loss,
        staleness_p50=progress.staleness_p50,
        staleness_max=progress.staleness_max,
        rejected=progress.rejected,
        dropped=progress.dropped,
        earlier_steps=progress.earlier_steps,
        lost_steps=progress.lost_steps,
    )


def event_message(event: Event) -> job_pb2.Event:
    """Returns a job's event as a message."""
    message = job_pb2.Event(sequence=event.sequence, time=event.time)
    match event:
        case StateChanged():
            message.state.CopyFrom(job_pb2.StateChange(state=state_code(event.state), reason=event.reason))
        case MetricsReported():
            metrics = job_pb2.Metrics(
                worker=event.worker,
                step=event.step,
                values=event.values,
                progress=progress_message(event.progress),
            )
            message.metrics.CopyFrom(metrics)
        case CheckpointEnded():
            end = job_pb2.CheckpointEnd(
                attempt=event.attempt,
                saved=event.saved.to_proto() if event.saved else None,
                seconds=event.seconds,
                failure=event.failure,
            )
            message.checkpoint.CopyFrom(end)
        case EvaluationEnded():
            evaluated = job_pb2.EvaluationEnd(worker=event.worker, result=event.result.to_proto(), best=event.best)
            message.evaluation.CopyFrom(evaluated)
        case LogLine():
            message.log.CopyFrom(job_pb2.LogLine(worker=event.worker, text=event.text))
    return message
