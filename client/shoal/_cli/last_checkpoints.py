"""The last checkpoints of running jobs, which a local cluster takes before it stops."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from shoal import errors
from shoal._cli.output import Output
from shoal._display import counted
from shoal.client import Client
from shoal.local_cluster import LocalCluster
from shoal.status import JobState, JobStatus

# Longest wait for the servers, in seconds, and the time between two checks whether they have ended.
_LIMIT_S, _POLL_S = 30.0, 0.1


@contextmanager
def saving_jobs(cluster: LocalCluster, out: Output, *, storage: bool) -> Iterator[None]:
    """Takes last checkpoints if Ctrl-C or SIGTERM ends the block.

    Args:
        cluster: the cluster.
        out: the command's output.
        storage: whether the cluster has checkpoint storage.
    """
    try:
        yield
    except KeyboardInterrupt:
        save_jobs(cluster, out, storage=storage)
        raise


def save_jobs(
    cluster: LocalCluster,
    out: Output,
    *,
    storage: bool,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Stops the servers of a cluster as SIGTERM does: they first take a last checkpoint of each job that trains.

    Says what happens. Does nothing if no job trains. Only warns if there is no checkpoint storage.

    Args:
        cluster: the cluster.
        out: the command's output.
        storage: whether the cluster has checkpoint storage.
        clock: returns seconds.
        sleep: waits for a number of seconds.
    """
    if cluster.process("coordinator").returncode is not None:
        return
    try:
        with cluster.client() as client:
            jobs = [it.name for it in client.jobs(ended=0) if it.state is JobState.RUNNING]
            if jobs and storage:
                out.message(
                    f"taking a last checkpoint of {_named(jobs)}, for at most {_LIMIT_S:g} s; Ctrl-C stops at once ...",
                    {"event": "saving", "jobs": jobs},
                )
                _drain(cluster, clock, sleep)
                _report(client, jobs, out)
            elif jobs:
                out.message(
                    f"the cluster has no checkpoint storage, so the work of {_named(jobs)} is lost; "
                    "`shoal up --checkpoints FOLDER` keeps it",
                    {"event": "not saved", "jobs": jobs, "reason": "no checkpoint storage"},
                )
    except errors.ShoalError as error:
        said = f"could not take last checkpoints: {error.message}"
        out.message(said, {"event": "not saved", "reason": error.message})


def _drain(cluster: LocalCluster, clock: Callable[[], float], sleep: Callable[[float], object]) -> None:
    servers = [process for process in cluster.processes if process.role == "server" and process.returncode is None]
    for process in servers:
        process.send_signal(signal.SIGTERM)
    deadline = clock() + _LIMIT_S
    while any(process.returncode is None for process in servers) and clock() < deadline:
        sleep(_POLL_S)


def _report(client: Client, jobs: Iterable[str], out: Output) -> None:
    for name in jobs:
        status = client.job(name).status()
        saved = status.state is not JobState.RUNNING  # a saved job has left its servers
        late = "" if saved else f" was not saved within {_LIMIT_S:g} s"
        newest = status.checkpoint.number if status.checkpoint else None
        record = {"event": "saved" if saved else "not saved", "jobs": [name], "checkpoint": newest}
        out.message(f"job {name}{late}: {_newest(status)}", record)


def _newest(status: JobStatus) -> str:
    if status.checkpoint is None:
        return "it has no checkpoint"
    return f"its newest checkpoint is {status.name}/{status.checkpoint.number}, step {status.checkpoint.step}"


def _named(jobs: list[str]) -> str:
    return f"{counted(len(jobs), 'job')} ({', '.join(jobs)})"


__all__ = ["save_jobs", "saving_jobs"]
