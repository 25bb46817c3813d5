"""Tasks of a cluster with parameter servers, as `TF_CONFIG` describes them: one script is the program of each task.

A `ps` task becomes a server. The `chief` starts the coordinator as a child process, then trains as a worker does. A
`worker` trains.
"""

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import shoal
from shoal import errors
from shoal._role import ForkServer, RoleProcess
from shoal._system.waits import wait_notice
from shoal.consistency import Asynchronous, Consistency
from shoal_distribute.resolver import ClusterResolver, ClusterSpec, TFConfigClusterResolver

_START_S, _STOP_S = 60.0, 10.0
_NAME_LENGTH = 63
_CHIEFS = ("chief", "master")


@dataclass
class TrainingTask:
    """This process's part in a cluster that its tasks form.

    Attributes:
        coordinator: host:port of the coordinator.
        workers: number of processes that train.
        number: number of this process among them: the chief is 0.
        is_chief: whether this process runs the coordinator.
        worker_addresses: host:port of each worker, without the chief.
        ends: ends what this process runs for the others.
    """

    coordinator: str
    workers: int
    number: int
    is_chief: bool
    worker_addresses: tuple[str, ...] = ()
    ends: ExitStack = field(default_factory=ExitStack)

    def close(self, client: shoal.Client, *jobs: str) -> None:
        """Ends the coordinator if this process runs it, after the other workers have finished the jobs.

        Args:
            client: a client of the cluster.
            *jobs: names of the jobs.
        """
        for job in jobs if self.is_chief else ():
            try:
                with wait_notice("the chief", lambda: "for the other workers to finish the job"):
                    client.job(job).wait()
            except errors.ShoalError:  # there is no such job, or it has failed, which its workers say
                pass
        self.ends.close()


def enter_task(resolver: ClusterResolver) -> TrainingTask:
    """Starts what this process runs for the cluster. Does not return in a `ps` task, which becomes a server.

    Args:
        resolver: describes the tasks.

    Raises:
        BadRequest: the cluster has no chief or no ps, or this process is no task of it.
        StartFailed: the coordinator did not start.
    """
    spec, kind, number = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    chiefs = [address for chief in _CHIEFS if chief in spec.jobs for address in spec.job_tasks(chief)]
    if len(chiefs) != 1 or "ps" not in spec.jobs:
        raise errors.BadRequest(
            f"the cluster lists {len(chiefs)} chiefs and has the task types {', '.join(spec.jobs)}; a "
            "ParameterServerStrategy needs one chief, at whose address the coordinator listens, and at least one ps"
        )
    if kind not in (*_CHIEFS, "ps", "worker") or number is None:
        raise errors.BadRequest(f"this process is task {kind} {number}; it must be a chief, a ps or a worker")
    environment = {**os.environ, "TF_CONFIG": _tf_config(spec, kind, number)}
    if kind == "ps":
        os.execve(sys.executable, [sys.executable, "-P", "-m", "shoal", "server"], environment)  # noqa: S606 - becomes it
    workers = tuple(spec.job_tasks("worker")) if "worker" in spec.jobs else ()
    is_chief = kind in _CHIEFS
    task = TrainingTask(chiefs[0], len(workers) + 1, 0 if is_chief else number + 1, is_chief, workers)
    if task.is_chief:
        _start_coordinator(task, environment)
    return task


def _start_coordinator(task: TrainingTask, environment: dict[str, str]) -> None:
    with ExitStack() as undo:
        state = undo.enter_context(tempfile.TemporaryDirectory(prefix="shoal-"))
        forks = ForkServer(environment, show_log=False)
        undo.callback(forks.close)
        flags = ["--store", f"{state}/coordinator.db", "--page-listen", "", "--metrics-listen", "127.0.0.1:0"]
        process = RoleProcess("coordinator", 0, flags, fork_server=forks)
        undo.callback(process.reap, _STOP_S)
        undo.callback(process.ask_to_stop)
        process.wait_ready(_START_S)
        task.ends = undo.pop_all()


def _tf_config(spec: ClusterSpec, kind: str, number: int) -> str:
    return json.dumps({"cluster": spec.as_dict(), "task": {"type": kind, "index": number}})


def resolver_of_cluster(resolver: ClusterResolver | None, client: shoal.Client | None) -> ClusterResolver | None:
    """Returns the resolver whose tasks form the cluster; None if there is a cluster already.

    Args:
        resolver: the resolver that was given. Without `ps` tasks, it lists only the workers of a cluster that runs.
        client: the client that was given.
    """
    elsewhere = client is not None or bool(os.environ.get("SHOAL_COORDINATOR"))
    if elsewhere and (resolver is None or "ps" not in resolver.cluster_spec().jobs):
        return None
    found = resolver or TFConfigClusterResolver()
    return found if found.cluster_spec() else None


def script_name(path: str) -> str:
    """Returns a job's name for a script: its file name, with only the characters that names may have.

    Args:
        path: path of the script.
    """
    stem = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in Path(path).stem.lower())
    return stem.strip("-0123456789")[:_NAME_LENGTH].rstrip("-") or "strategy"


def check_schedulable(consistency: Consistency, *, grouped: bool) -> None:
    """Checks that a `ClusterCoordinator` can give the steps of a strategy to its workers.

    Args:
        consistency: the job's consistency.
        grouped: whether the workers are in hybrid groups.

    Raises:
        BadRequest: it cannot.
    """
    if not isinstance(consistency, Asynchronous):
        raise errors.BadRequest(
            f"the consistency is {type(consistency).__name__}, but a ClusterCoordinator gives the workers different "
            "numbers of steps, which only Asynchronous allows; leave out consistency, or let each worker run the loop "
            "itself, without a ClusterCoordinator"
        )
    if grouped:
        raise errors.BadRequest(
            "a ClusterCoordinator gives each worker calls of its own, but the workers of a hybrid group take each step "
            "together; leave out group_size and group"
        )


__all__ = ["TrainingTask", "check_schedulable", "enter_task", "resolver_of_cluster", "script_name"]
