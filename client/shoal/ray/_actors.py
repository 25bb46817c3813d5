"""The actors of a cluster, and the placement groups that reserve their resources."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal import errors
from shoal._engines import Request, RoleSpec, shortage, waiting
from shoal.ray._actor import RoleActor

# Seconds for a call of an actor, which may be starting again, and for the end of an actor that was killed.
CALL_S, _GONE_S = 30.0, 10.0
# Seconds between two looks whether a role is ready, and between two whether the cluster stops while Ray has no room.
_READY_S, _LOOK_S = 0.1, 1
_ACTOR = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=8)(RoleActor)


class RoleActors:
    """The actors of one cluster, by the names of their roles.

    One placement group has the coordinator and the servers, which Ray spreads over the nodes. Each worker has a group
    of its own, so its resources are free when it is removed. Resources stay reserved while Ray starts an actor again.

    Args:
        cluster: name of the cluster.
        namespace: namespace of the actors.
        resources: the resources by role.

    Its methods may run in several threads.
    """

    def __init__(self, cluster: str, namespace: str, resources: Mapping[str, Mapping[str, float]]) -> None:
        self._cluster, self._namespace, self._resources = cluster, namespace, resources
        self._lock = threading.Lock()  # guards the attributes below; nobody waits for Ray's resources or roles with it
        self._handles: dict[str, Any] = {}
        self._groups: dict[str, PlacementGroup] = {}  # by the name of a worker; "" is that of all other roles
        self._workers: set[str] = set()  # names in use, from before their groups until after their ends
        self._stopping = False  # nothing new may start

    @property
    def handles(self) -> dict[str, Any]:
        """The handles of the actors, the oldest first."""
        with self._lock:
            return dict(self._handles)

    @property
    def workers(self) -> list[str]:
        """The names of the workers, the oldest first: from before they are placed until after their ends."""
        with self._lock:
            return sorted(self._workers, key=_number)

    def refuse(self) -> None:
        """Lets the starts that are under way, and all further ones, fail."""
        with self._lock:
            self._stopping = True

    def name_worker(self) -> str:
        """Returns the name of one more worker, and reserves it until the worker has ended."""
        with self._lock:
            name = f"worker-{max(map(_number, self._workers), default=-1) + 1}"
            self._workers.add(name)
            return name

    def check_name(self) -> None:
        """Checks that the namespace has no cluster of this name.

        Raises:
            StartFailed: it has one.
        """
        if self._exists("coordinator"):
            raise errors.StartFailed(
                f"the namespace {self._namespace!r} of Ray has a cluster {self._cluster!r} already; stop it, or give "
                "this one another name"
            )

    def place(self, wanted: Sequence[Request], deadline: float, *, wait_for_nodes: bool) -> None:
        """Reserves the resources of roles.

        Args:
            wanted: the roles.
            deadline: end of the time for it, in seconds of the monotonic clock.
            wait_for_nodes: whether nodes that can hold the roles may join meanwhile.

        Raises:
            StartFailed: the nodes have too little, other programs use it, or the cluster stops.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not wait_for_nodes and (lacking := shortage(wanted, nodes)):
            raise errors.StartFailed(
                f"Ray's nodes are too small: {lacking}. Add nodes, start fewer roles, or change `resources`"
            )
        groups = self._make_groups(wanted)
        for group in groups.values():
            while not group.wait(_LOOK_S):
                self._check_goes_on()
                if time.monotonic() >= deadline:
                    pending = [it for it in wanted if _is_pending(groups[_group_of(it.name)])] or wanted
                    raise errors.StartFailed(
                        f"timed out waiting for resources: {waiting(pending, ray.available_resources())}; stop other "
                        "programs or raise start_timeout_s"
                    )

    def _make_groups(self, wanted: Sequence[Request]) -> dict[str, PlacementGroup]:
        fixed = [dict(request.amounts) for request in wanted if not _is_worker(request.name)]
        bundles = {"": fixed} if fixed else {}
        bundles |= {request.name: [dict(request.amounts)] for request in wanted if _is_worker(request.name)}
        made = {}
        with self._lock:
            self._check_goes_on()
            for name, each in bundles.items():
                self._groups[name] = made[name] = placement_group(each, strategy="PACK" if name else "SPREAD")
            self._workers |= {*filter(None, bundles)}
        return made

    def launch(self, spec: RoleSpec) -> None:
        """Starts the actor of a role, whose resources are reserved.

        Raises:
            StartFailed: the namespace has an actor of this name, or the cluster stops.
        """
        amounts = dict(self._resources[spec.role])
        bundle = _number(spec.name) + 1 if spec.role == "server" else 0
        options = {
            "name": self._actor_name(spec.name),
            "namespace": self._namespace,
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "memory": amounts.pop("memory", None),
            "resources": amounts,
        }
        coordinator = "" if spec.role == "coordinator" else self._actor_name("coordinator")
        with self._lock:
            self._check_goes_on()
            strategy = PlacementGroupSchedulingStrategy(self._groups[_group_of(spec.name)], bundle)
            actor = _ACTOR.options(**options, scheduling_strategy=strategy)
            try:
                self._handles[spec.name] = actor.remote(spec, coordinator, self._namespace)
            except ValueError as error:  # another driver was faster
                raise errors.StartFailed(f"Ray refuses the actor {options['name']}: {error}") from None

    def wait_ready(self, names: Iterable[str], deadline: float) -> None:
        """Waits until roles are ready.

        Raises:
            StartFailed: a role ended, or was not ready at the deadline. The message has the end of its log.
        """
        for name in names:
            self.report(name, max(1.0, deadline - time.monotonic()))

    def report(self, name: str, timeout_s: float = CALL_S) -> dict[str, Any]:
        """Returns what a role reports when it is ready; see `RoleActor.ready`.

        Raises:
            Unreachable: the actor does not answer.
            StartFailed: the actor or the role cannot start, or the role has left: the message has the end of its log.
                Or the cluster stops.
        """
        deadline = time.monotonic() + timeout_s
        while not (ready := self.call(name, "ready", wait_s=max(0.0, deadline - time.monotonic()) + 5)):
            if time.monotonic() >= deadline:
                excerpt = self.call(name, "log_excerpt")
                raise errors.StartFailed(f"{name} was not ready in time{excerpt}", name=name)
            self._check_goes_on()
            time.sleep(_READY_S)
        report: dict[str, Any] = ready
        if "failure" in report:
            raise errors.StartFailed(report["failure"], name=name)
        return report

    def call(self, name: str, method: str, *arguments: Any, wait_s: float = CALL_S) -> Any:
        """Calls a method of an actor, and returns its result. Ray repeats the call when it has started the actor again.

        Raises:
            BadRequest: there is no role of this name.
            Unreachable: the actor does not answer.
            StartFailed: the actor cannot start.
        """
        handle = self.handles.get(name)
        if handle is None:
            raise errors.BadRequest(f"there is no role {name!r}; `actors` has the names")
        try:
            return ray.get(getattr(handle, method).remote(*arguments), timeout=wait_s)
        except ray.exceptions.GetTimeoutError:
            raise errors.Unreachable(f"the actor of {name} has not answered for {wait_s:.0f} s") from None
        except ray.exceptions.RayError as error:
            raise errors.StartFailed(f"the actor of {name} failed: {error}", name=name) from None

    def end(self, names: Sequence[str], how: str, timeout_s: float) -> None:
        """Ends roles, and then their actors. Their names are free afterwards.

        Args:
            names: names of the roles.
            how: the method that ends a role.
            timeout_s: seconds for it; the actors are then killed.
        """
        handles = [handle for name, handle in self.handles.items() if name in names]
        with suppress(ray.exceptions.RayError):
            if ending := [getattr(handle, how).remote() for handle in handles]:
                ray.wait(ending, num_returns=len(ending), timeout=timeout_s)
        for handle in handles:
            with suppress(ray.exceptions.RayError):
                ray.kill(handle)
        with self._lock:
            for name in names:
                self._handles.pop(name, None)
        deadline = time.monotonic() + _GONE_S
        while any(map(self._exists, names)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name in names:
            if _is_worker(name):
                self._free(name)

    def close(self) -> None:
        """Frees all resources. The roles have ended."""
        with self._lock:
            names = [*self._groups]
        for name in names:
            self._free(name)

    def _free(self, group: str) -> None:
        """Frees the resources of a group, if they are reserved, and the name of its worker."""
        with self._lock:
            if reserved := self._groups.pop(group, None):
                remove_placement_group(reserved)
            self._workers.discard(group)

    def _check_goes_on(self) -> None:
        if self._stopping:
            raise errors.StartFailed("the cluster stops, so nothing more starts")

    def _exists(self, name: str) -> bool:
        try:
            ray.get_actor(self._actor_name(name), namespace=self._namespace)
        except ValueError:
            return False
        return True

    def _actor_name(self, name: str) -> str:
        return f"{self._cluster}:{name}"


def _is_worker(name: str) -> bool:
    return name.startswith("worker-")


def _group_of(name: str) -> str:
    return name if _is_worker(name) else ""


def _is_pending(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group)["state"] != "CREATED")


def _number(name: str) -> int:
    return int(name.rpartition("-")[2])


__all__ = ["CALL_S", "RoleActors"]
