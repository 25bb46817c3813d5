"""Cluster resolvers: which tasks a training run has, where they are, and which one this process is.

The names are those of `tf.distribute.cluster_resolver` and `tf.train`. A resolver only describes. `task_group` connects
the tasks.
"""

import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal import errors
from shoal._system import tf_config

# Port of the tasks that TF_CONFIG lists without one.
DEFAULT_PORT = 7090
# The task types whose tasks are ranks, in the order of their ranks. `master` is the old name of the chief.
RANK_TYPES = ("chief", "master", "worker")
_ADDRESS = re.compile(r"[^\s/:]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")


class ClusterSpec:
    """The addresses of all tasks, by task type.

        ClusterSpec({"worker": ["host-a:7090", "host-b:7090"], "ps": ["host-c:7090"]})

    Args:
        cluster: a list of host:port for each task type. Without a port, an address has `DEFAULT_PORT`.

    Raises:
        BadRequest: a list is empty, or an entry is not an address.
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]]) -> None:
        self._tasks = {kind: _addresses(kind, listed) for kind, listed in cluster.items()}

    @property
    def jobs(self) -> list[str]:
        """The task types, sorted. TensorFlow calls them jobs."""
        return sorted(self._tasks)

    def as_dict(self) -> dict[str, list[str]]:
        """Returns the addresses by task type."""
        return {kind: list(listed) for kind, listed in self._tasks.items()}

    def num_tasks(self, job_name: str) -> int:
        """Returns the number of tasks of a type.

        Raises:
            BadRequest: there is no task of this type.
        """
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the tasks of a type.

        Raises:
            BadRequest: there is no task of this type.
        """
        return list(range(self.num_tasks(job_name)))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns host:port of a task.

        Raises:
            BadRequest: there is no such task.
        """
        listed = self.job_tasks(job_name)
        if not 0 <= task_index < len(listed):
            raise errors.BadRequest(
                f"there is no task {task_index} of type {job_name}; the cluster has {len(listed)} of this type"
            )
        return listed[task_index]

    def job_tasks(self, job_name: str) -> list[str]:
        """Returns the addresses of all tasks of a type, by index.

        Raises:
            BadRequest: there is no task of this type.
        """
        if job_name not in self._tasks:
            raise errors.BadRequest(
                f"the cluster has no tasks of type {reprlib.repr(job_name)}; it has {', '.join(self.jobs) or 'none'}"
            )
        return list(self._tasks[job_name])

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(tuple(sorted((kind, tuple(listed)) for kind, listed in self._tasks.items())))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


class ClusterResolver(Protocol):
    """What a strategy asks a resolver.

    Attributes:
        task_type: type of this process's task, such as "worker"; None if this process is the only one.
        task_id: the task's index in the list of its type; None likewise.
    """

    @property
    def task_type(self) -> str | None: ...

    @property
    def task_id(self) -> int | None: ...

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all tasks; an empty one if this process is the only one."""
        ...


class SimpleClusterResolver:
    """A resolver of given values.

    Args:
        cluster_spec: the addresses of all tasks.
        task_type: type of this process's task.
        task_id: the task's index in the list of its type.

    Raises:
        BadRequest: the cluster has no such task.
    """

    def __init__(self, cluster_spec: ClusterSpec, task_type: str | None = None, task_id: int | None = None) -> None:
        if task_type is not None and task_id is not None:
            cluster_spec.task_address(task_type, task_id)
        self._spec = cluster_spec
        self.task_type, self.task_id = task_type, task_id

    def cluster_spec(self) -> ClusterSpec:
        return self._spec


class TFConfigClusterResolver(SimpleClusterResolver):
    """A resolver of the environment variable `TF_CONFIG`, as it is when the resolver is made.

        os.environ["TF_CONFIG"] = json.dumps(
            {"cluster": {"worker": ["host-a", "host-b"]}, "task": {"type": "worker", "index": 0}}
        )

    Without the variable, the cluster is empty: this process trains alone.

    Args:
        task_type: replaces the task type of the variable.
        task_id: replaces the task index of the variable.
        environment: the environment variables.

    Raises:
        BadRequest: the variable is not valid, lists an address twice, or does not list this task.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        text = environment.get(tf_config.VARIABLE)
        if not text:
            super().__init__(ClusterSpec({}), task_type, task_id)
            return
        found = tf_config.parse(text, default_port=DEFAULT_PORT)
        cluster = {kind: [f"{host}:{port}" for host, port in listed] for kind, listed in found.cluster.items()}
        kind = found.task_type if task_type is None else task_type
        super().__init__(ClusterSpec(cluster), kind, found.task_index if task_id is None else task_id)


@dataclass(frozen=True, slots=True)
class RankedTasks:
    """The tasks that train together, in the order of their ranks: the chief first, then the workers by index.

    Attributes:
        rank: rank of this process.
        addresses: host:port of each rank.
    """

    rank: int
    addresses: tuple[str, ...]


def ranked_tasks(resolver: ClusterResolver) -> RankedTasks | None:
    """Returns the tasks that train together, or None if this process trains alone.

    Args:
        resolver: describes the cluster. Tasks of the types `ps` and `evaluator` are no ranks.

    Raises:
        BadRequest: this process is no rank, or the resolver does not say which task it is.
    """
    spec = resolver.cluster_spec()
    tasks = [
        (kind, index, address)
        for kind in RANK_TYPES
        if kind in spec.jobs
        for index, address in enumerate(spec.job_tasks(kind))
    ]
    if not spec:
        return None
    places = {(kind, index): rank for rank, (kind, index, _) in enumerate(tasks)}
    own = (resolver.task_type or "", -1 if resolver.task_id is None else resolver.task_id)
    if own not in places:
        raise errors.BadRequest(
            f"this process is task {resolver.task_id} of type {resolver.task_type}; only tasks of the types "
            f"{', '.join(RANK_TYPES)} train together, and the cluster has {len(tasks)} of them"
        )
    return RankedTasks(places[own], tuple(address for _, _, address in tasks))


def _addresses(kind: str, listed: object) -> tuple[str, ...]:
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
        raise errors.BadRequest(
            f"the addresses of {reprlib.repr(kind)} are {reprlib.repr(listed)}; give a list of one or more host:port"
        )
    return tuple(_address(kind, address) for address in listed)


def _address(kind: str, address: object) -> str:
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if not found or not isinstance(address, str):
        raise errors.BadRequest(f"{reprlib.repr(address)} of {reprlib.repr(kind)} is not an address; give host:port")
    return address if found[1] or found[2] else f"{address}:{DEFAULT_PORT}"


__all__ = [
    "DEFAULT_PORT",
    "RANK_TYPES",
    "ClusterResolver",
    "ClusterSpec",
    "RankedTasks",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "ranked_tasks",
]
