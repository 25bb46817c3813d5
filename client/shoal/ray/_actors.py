"""The actors of a cluster, and the placement groups that reserve their resources."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal import errors
from shoal._engines import Request, RoleSpec, shortage
from shoal.ray._actor import RoleActor

# Seconds for a call of an actor, which may be starting again, and for the end of an actor that was killed.
CALL_S, _GONE_S = 30.0, 10.0
_ACTOR = ray.remote(max_restarts=-1, max_task_retries=-1, max_concurrency=8)(RoleActor)


class RoleActors:
    """The actors of one cluster, by the names of their roles.

    One placement group has the coordinator and the servers, which Ray spreads over the nodes. Each worker has a group
    of its own, so its resources are free when it is removed. Resources stay reserved while Ray starts an actor again.

    Args:
        cluster: name of the cluster.
        namespace: namespace of the actors.
        resources: the resources by role.

    Attributes:
        handles: the handles of the actors, the oldest first.
    """

    def __init__(self, cluster: str, namespace: str, resources: Mapping[str, Mapping[str, float]]) -> None:
        self._cluster, self._namespace, self._resources = cluster, namespace, resources
        self.handles: dict[str, Any] = {}
        self._groups: dict[str, PlacementGroup] = {}  # by the name of a worker; "" is that of all other roles

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

    def place(self, wanted: Sequence[Request], deadline: float) -> None:
        """Reserves the resources of roles.

        Args:
            wanted: the roles.
            deadline: end of the time for it, in seconds of the monotonic clock.

        Raises:
            StartFailed: the nodes have too little, or other programs use it.
        """
        if lacking := shortage(wanted, [node["Resources"] for node in ray.nodes() if node["Alive"]]):
            raise errors.StartFailed(
                f"Ray's nodes are too small: {lacking}. Add nodes, start fewer roles, or change `resources`"
            )
        fixed = [dict(request.amounts) for request in wanted if not _is_worker(request.name)]
        bundles = {"": fixed} if fixed else {}
        bundles |= {request.name: [dict(request.amounts)] for request in wanted if _is_worker(request.name)}
        made = {name: placement_group(each, strategy="PACK" if name else "SPREAD") for name, each in bundles.items()}
        self._groups |= made
        for group in made.values():
            if not group.wait(max(1.0, deadline - time.monotonic())):
                raise errors.StartFailed(
                    f"Ray has not reserved the resources in time, because other programs use them: {_used(wanted)}"
                )

    def launch(self, spec: RoleSpec) -> None:
        """Starts the actor of a role, whose resources are reserved.

        Raises:
            StartFailed: the namespace has an actor of this name.
        """
        number = spec.name.rpartition("-")[2]
        amounts = dict(self._resources[spec.role])
        strategy = PlacementGroupSchedulingStrategy(
            self._groups[spec.name if _is_worker(spec.name) else ""], int(number) + 1 if spec.role == "server" else 0
        )
        options = {
            "name": self._actor_name(spec.name),
            "namespace": self._namespace,
            "scheduling_strategy": strategy,
            "num_cpus": amounts.pop("CPU", 0),
            "num_gpus": amounts.pop("GPU", 0),
            "memory": amounts.pop("memory", None),
            "resources": amounts,
        }
        coordinator = "" if spec.role == "coordinator" else self._actor_name("coordinator")
        try:
            self.handles[spec.name] = _ACTOR.options(**options).remote(spec, coordinator, self._namespace)
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
            StartFailed: the actor or the role cannot start, or the role has left. The message has the end of its log.
        """
        report: dict[str, Any] = self.call(name, "ready", timeout_s, wait_s=timeout_s + 5)
        if "failure" in report:
            raise errors.StartFailed(report["failure"], name=name)
        return report

    def call(self, name: str, method: str, *arguments: Any, wait_s: float = CALL_S) -> Any:
        """Calls a method of an actor, and returns its result. Ray repeats the call when it has started the actor again.

        Raises:
            Unreachable: the actor does not answer.
            StartFailed: the actor cannot start.
        """
        try:
            return ray.get(getattr(self.handles[name], method).remote(*arguments), timeout=wait_s)
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
        with suppress(ray.exceptions.RayError):
            if ending := [getattr(self.handles[name], how).remote() for name in names]:
                ray.wait(ending, num_returns=len(ending), timeout=timeout_s)
        for name in names:
            ray.kill(self.handles.pop(name))
        deadline = time.monotonic() + _GONE_S
        while any(map(self._exists, names)) and time.monotonic() < deadline:
            time.sleep(0.02)
        for name in names:
            self.free(name)

    def free(self, worker: str) -> None:
        """Frees the resources of a worker that has ended, if some are reserved."""
        if worker in self._groups:
            remove_placement_group(self._groups.pop(worker))

    def close(self) -> None:
        """Frees all resources. The roles have ended."""
        for name in [*self._groups]:
            self.free(name)

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


def _used(wanted: Iterable[Request]) -> str:
    needed = ", ".join(f"{request.name} needs {dict(request.amounts)}" for request in wanted)
    free = {name: amount for name, amount in ray.available_resources().items() if "_group_" not in name}
    return f"{needed}. Free are {free}"


__all__ = ["CALL_S", "RoleActors"]
