"""Rules for the start, the probes and the end of Shoal's processes in manifests, derived from the roles' options."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from unittest import mock

import typer
from opentelemetry.sdk import environment_variables

from shoal._cli.app import app
from shoal_coordinator.page.server import rules_for
from support.deployment.manifest_rules import MEMBERS
from support.deployment.manifests import Object, Workload, named, of_kind, workloads

# Read by a module of its own, not by a flag.
READ_ELSEWHERE = {
    "SHOAL_ALLOCATOR",
    "SHOAL_KERNEL_THREADS",
    "SHOAL_POD_IP",
    "SHOAL_POD_NAME",
    "SHOAL_POD_NAMESPACE",
    "SHOAL_SERVICE",
    "SHOAL_SHARED_MEMORY",
    "SHOAL_TRANSPORT",
}
_NOT_OURS = {"OMP_NUM_THREADS", *(name for name in vars(environment_variables) if name.startswith("OTEL_"))}
_FIELDS = {"metadata.name": "pod-0", "metadata.namespace": "shoal", "status.podIP": "10.0.0.7", "limits.cpu": "4"}
# A variable that stands before it in the list; another one is left as it is.
_REFERENCE = re.compile(r"\$\((\w+)\)")
_SUFFIXES = ("", ".shoal", ".shoal.svc")
_END_S = 5  # what is left to a process when its grace is over


def environment(container: Object, objects: Sequence[Object]) -> dict[str, str]:
    """Returns the environment variables of a container's process.

    Raises:
        KeyError: the container names a map that does not exist.
    """
    found: dict[str, str] = {}
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]] if "configMapRef" in source else {}
    for variable in container.get("env", []):
        given = variable.get("valueFrom", {})
        field = given.get("fieldRef", {}).get("fieldPath") or given.get("resourceFieldRef", {}).get("resource")
        found[variable["name"]] = _FIELDS[field] if field else _REFERENCE.sub(_value_in(found), variable["value"])
    return found


def _value_in(found: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda reference: found.get(reference[1], reference[0])


def command_lines(objects: Sequence[Object]) -> Iterator[str]:
    """Each container's arguments and variables belong to the command that it runs."""
    for workload in workloads(objects):
        for container in workload.containers:
            found, command = environment(container, objects), container["args"][0]
            own = {variable["name"] for variable in container.get("env", [])}
            known = _variables(command) | READ_ELSEWHERE | _NOT_OURS
            yield from (f"{workload}: {name} is no variable of shoal {command}" for name in sorted(own - known))
            of_any = known.union(*(_variables(role) for role in MEMBERS))
            yield from (
                f"{workload}: {name} is no variable of any role" for name in sorted(found.keys() - own - of_any)
            )
            if complaint := _parse(container["args"], found):
                yield f"{workload}: shoal {' '.join(container['args'])}: {complaint}"


def addresses(objects: Sequence[Object]) -> Iterator[str]:
    """Processes listen at the ports that their containers list, and use the coordinator's real address."""
    service = named(objects, "StatefulSet", "coordinator")["spec"]["serviceName"]
    for workload in workloads(objects):
        [container] = workload.pod["containers"]
        found = environment(container, objects)
        listed = {port["name"]: str(port["containerPort"]) for port in container.get("ports", [])}
        told = {"grpc": "SHOAL_LISTEN", "metrics": "SHOAL_METRICS_LISTEN", "page": "SHOAL_PAGE_LISTEN"}
        expected = {name: f"0.0.0.0:{listed[name]}" for name in told if name in listed}
        for name, address in expected.items():
            if found.get(told[name]) != address:
                yield f"{workload}: {told[name]} is {found.get(told[name])}, not {address}"
        if listed.get("lanes") != found.get("SHOAL_LANE_PORT"):
            yield f"{workload}: SHOAL_LANE_PORT is {found.get('SHOAL_LANE_PORT')}"
        if found.get("SHOAL_COORDINATOR") != f"coordinator-0.{service}:7070":
            yield f"{workload} looks for the coordinator at {found.get('SHOAL_COORDINATOR')}"
        if workload.kind == "StatefulSet" and found.get("SHOAL_SERVICE") != workload.spec["serviceName"]:
            yield f"{workload}: SHOAL_SERVICE is {found.get('SHOAL_SERVICE')}"


def page_names(objects: Sequence[Object]) -> Iterator[str]:
    """The page answers to each name by which pods reach it, and to no other."""
    found = next(
        environment(each.pod["containers"][0], objects) for each in workloads(objects) if each.name == "coordinator"
    )
    given = [name for name in found.get("SHOAL_PAGE_HOSTS", "").split(",") if name]
    rules = rules_for(found["SHOAL_PAGE_LISTEN"].rpartition(":")[0], given)
    names = {f"{host}{suffix}" for host in ("coordinator", "coordinator-0.coordinator") for suffix in _SUFFIXES}
    yield from (f"the page does not answer to {name}" for name in sorted(names) if not rules.knows(name))
    yield from (f"the page answers to {name}" for name in sorted(set(given) - names))


def mounted_folders(objects: Sequence[Object]) -> Iterator[str]:
    """Each folder that a process reads or writes is on a volume."""
    for workload in workloads(objects):
        [container] = workload.pod["containers"]
        found, mounts = environment(container, objects), container.get("volumeMounts", [])
        wanted = {"SHOAL_STORE", "SHOAL_PATH", "SHOAL_CHECKPOINTS"} & _variables(container["args"][0])
        for name in sorted(wanted & found.keys()):
            path = found[name]
            if "://" not in path and not any(path.startswith(mount["mountPath"]) for mount in mounts):
                yield f"{workload}: {name} is {path}, where nothing is mounted"


def probes(objects: Sequence[Object]) -> Iterator[str]:
    """Each member is probed by gRPC. The startup probe lasts longer than the member's search for its coordinator."""
    for workload in _members(objects):
        [container] = workload.pod["containers"]
        port = next((port["containerPort"] for port in container["ports"] if port["name"] == "grpc"), None)
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if container.get(name, {}).get("grpc", {}).get("port") != port:
                yield f"{workload}: {name} does not ask at the port grpc"
        startup = container.get("startupProbe", {})
        patience_s = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
        if workload.name != "coordinator":
            needed_s = float(environment(container, objects)["SHOAL_RETRY_FOR"])
            if patience_s <= needed_s:
                yield f"{workload}: its startupProbe gives up after {patience_s} s, before its {needed_s:g} s are over"


def endings(objects: Sequence[Object]) -> Iterator[str]:
    """No member is killed within its grace period, and the coordinator runs until the servers' last checkpoint."""
    needed_s = {}
    for workload in _members(objects):
        [container] = workload.pod["containers"]
        before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed_s[workload.name] = before_s + float(environment(container, objects).get("SHOAL_GRACE_PERIOD", 0))
        if workload.pod.get("terminationGracePeriodSeconds", 30) < needed_s[workload.name] + _END_S:
            yield f"{workload} is killed before its {needed_s[workload.name]:g} s are over"
    if needed_s and needed_s["coordinator"] < needed_s["server"] + _END_S:
        yield f"the coordinator is gone after {needed_s['coordinator']:g} s, while servers still need it"


def _members(objects: Sequence[Object]) -> Iterator[Workload]:
    return (workload for workload in workloads(objects) if workload.name in MEMBERS)


@cache
def _variables(command: str) -> frozenset[str]:
    """Returns the variables that a command of `shoal` takes."""
    group = typer.main.get_command(app)
    with group.make_context("shoal", [command]) as context:
        parameters = group.get_command(context, command).params  # type: ignore[attr-defined]
    given = [each.envvar for each in parameters if each.envvar]
    return frozenset(name for each in given for name in ([each] if isinstance(each, str) else each))


def _parse(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Returns the error of `shoal` for a command line, without running it."""
    group = typer.main.get_command(app)
    # The folder is in the pod, not on this machine; `mounted_folders` looks for it.
    given = {name: os.curdir if name == "SHOAL_PATH" else value for name, value in variables.items()}
    with mock.patch.dict(os.environ, given), group.make_context("shoal", [arguments[0]]) as context:
        try:
            group.get_command(context, arguments[0]).make_context(arguments[0], list(arguments[1:]))  # type: ignore[attr-defined]
        except Exception as error:  # click's, of which typer may have a copy of its own
            return str(error)
    return ""
