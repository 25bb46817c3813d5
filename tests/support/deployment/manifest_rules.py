"""Rules for Shoal's manifests that Kubernetes' schemas do not check, and the check against these schemas.

Each rule is a function from objects to complaints; `RULES` lists all of them. The rule for network policies depends on
the overlay and is in `manifest_network`. Decision 30 says why no linter replaces these rules.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any
from unittest import mock

import kubernetes_validate
import typer
from opentelemetry.sdk import environment_variables

from shoal._cli.app import app
from shoal_coordinator.page.server import rules_for
from support.deployment import manifest_tls
from support.deployment.manifests import (
    Object,
    Rule,
    Workload,
    environment,
    named,
    of_kind,
    quantity,
    selects,
    workloads,
)

NEWEST = "1.36.0"  # strict: no field that this version does not know
OLDEST = "1.30.0"  # that docs/how-to/kubernetes.md names: preStop's sleep is of 1.30

MEMBERS = ("coordinator", "server", "worker")
# Variables that a module reads itself, and not the command line.
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

_USER = 65532  # of the image
_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
# The ports of each role, and the variables that set where it listens.
_PORTS = {
    "coordinator": ("grpc", "page", "metrics"),
    "server": ("grpc", "lanes", "metrics"),
    "worker": ("grpc", "metrics"),
    "client": (),
}
_LISTEN = {
    "grpc": "SHOAL_LISTEN",
    "lanes": "SHOAL_LANE_PORT",
    "page": "SHOAL_PAGE_LISTEN",
    "metrics": "SHOAL_METRICS_LISTEN",
}
# The least memory of a pod's processes, without its volumes in memory: about twice the resident size of a role without
# jobs, which is 84 MB for a coordinator and 283 MB for a server. A worker has 81 MB, and its trainer is larger.
_HEAP = {"coordinator": "256Mi", "server": "640Mi", "worker": "640Mi", "client": "128Mi"}
_EXIT_S = 5  # for a process to exit after its grace period


def security(objects: Sequence[Object]) -> Iterator[str]:
    """All pods have the same few settings, which the profile `restricted` allows, and their namespace enforces it."""
    for workload in workloads(objects):
        pod = workload.pod
        settings = pod.get("securityContext", {})
        if {name: value for name, value in settings.items() if not name.startswith("fsGroup")} != _POD_SECURITY:
            yield f"{workload}: its pods have the securityContext {settings}"
        yield from (f"{workload} sets {name}" for name in ("hostNetwork", "hostPID", "hostIPC") if name in pod)
        for name in ("automountServiceAccountToken", "enableServiceLinks"):
            if pod.get(name) is not False:
                yield f"{workload}: {name} is not false"
        for volume in pod.get("volumes", []):
            if not volume.keys() & _VOLUMES:
                yield f"{workload}: volume {volume['name']} is of another kind than {sorted(_VOLUMES)}"
        for container in workload.containers:
            if container.get("securityContext") != _CONTAINER_SECURITY:
                yield f"{workload}: {container['name']} has the securityContext {container.get('securityContext')}"
            if any("hostPort" in port for port in container.get("ports", [])):
                yield f"{workload}: {container['name']} uses a port of its node"
    [namespace] = {found["metadata"]["name"] for found in of_kind(objects, "Namespace")} or {"shoal"}
    for found in objects:
        metadata, cluster_wide = found["metadata"], found["kind"] in {"Namespace", "PriorityClass"}
        if metadata.get("namespace") != (None if cluster_wide else namespace):
            yield f"{found['kind']} {metadata['name']} is in the namespace {metadata.get('namespace')}"
        labels = metadata.get("labels", {})
        if found["kind"] == "Namespace" and labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"Namespace {metadata['name']} does not enforce the profile restricted"


def resources(objects: Sequence[Object]) -> Iterator[str]:
    """Each container has requests and limits, with enough memory for its process and its volumes in memory."""
    for workload in workloads(objects):
        empty = [volume["emptyDir"] for volume in workload.pod.get("volumes", []) if "emptyDir" in volume]
        if not all("sizeLimit" in each for each in empty):
            yield f"{workload}: an empty volume has no sizeLimit"
        held = sum(quantity(each.get("sizeLimit", 0)) for each in empty if each.get("medium") == "Memory")
        for container in workload.containers:
            wants, most = (container.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
            if not {"cpu", "memory"} <= wants.keys() == most.keys():
                yield f"{workload}: {container['name']} requests {sorted(wants)}, and has limits of {sorted(most)}"
                continue
            if excess := [name for name in wants if quantity(wants[name]) > quantity(most[name])]:
                yield f"{workload}: {container['name']} requests more than its limit of {', '.join(excess)}"
            heap = quantity(_HEAP[_component(workload)])
            if quantity(wants["memory"]) < heap or quantity(most["memory"]) < heap + held:
                yield f"{workload}: {container['name']} needs {heap:.0f} bytes, and {held:.0f} for volumes in memory"


def volumes(objects: Sequence[Object]) -> Iterator[str]:
    """All volumes are there and mounted, and each folder that a process uses is on one of them."""
    claims = {claim["metadata"]["name"] for claim in of_kind(objects, "PersistentVolumeClaim")}
    for workload in workloads(objects):
        [container] = workload.containers
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        listed = {volume["name"]: volume for volume in workload.pod.get("volumes", [])}
        templates = {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates", [])}
        for name in sorted(mounts.keys() ^ (listed.keys() | templates)):
            yield f"{workload}: volume {name} is {'not there' if name in mounts else 'not used'}"
        claimed = [
            each["persistentVolumeClaim"]["claimName"] for each in listed.values() if "persistentVolumeClaim" in each
        ]
        yield from (f"{workload}: there is no claim {name}" for name in claimed if name not in claims)
        variables, known = environment(container, objects), _variables(container["args"][0])
        used = {"SHOAL_STORE", "SHOAL_PATH", "SHOAL_CHECKPOINTS"} & variables.keys() & known
        for name, path in {"HOME": "/tmp", **{each: variables[each] for each in sorted(used)}}.items():
            if "://" not in path and not path.startswith(tuple(mounts.values())):
                yield f"{workload}: {name} is {path}, where nothing is mounted"


def selectors(objects: Sequence[Object]) -> Iterator[str]:
    """Each selector selects the intended pods."""
    pods = {workload.name: workload.labels for workload in workloads(objects)}
    for workload in workloads(objects):
        if "selector" in workload.spec and not selects(workload.spec["selector"], workload.labels):
            yield f"{workload} does not select its own pods"
        for selector in _values_of("labelSelector", workload.pod):
            if not any(selects(selector, labels) for labels in pods.values()):
                yield f"{workload}: the labelSelector {selector} selects no pods"
    for found in of_kind(objects, "Service", "PodDisruptionBudget", "PodMonitor"):
        name, selector = found["metadata"]["name"], found["spec"]["selector"]
        selector = {"matchLabels": selector} if found["kind"] == "Service" else selector
        selected = {each for each, labels in pods.items() if selects(selector, labels)}
        if selected != {name}:
            yield f"{found['kind']} {name} selects pods of {sorted(selected)}"


def identities(objects: Sequence[Object]) -> Iterator[str]:
    """There is one coordinator, which all find. A StatefulSet's pods have DNS names from their start to their end."""
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}
    coordinator = named(objects, "StatefulSet", "coordinator")["spec"]
    if coordinator["replicas"] != 1:
        yield f"there are {coordinator['replicas']} coordinators"
    for workload in workloads(objects):
        variables = environment(workload.containers[0], objects)
        # The coordinator's own is for commands in its container: the access file is found by this address.
        host = "localhost" if workload.name == "coordinator" else f"coordinator-0.{coordinator['serviceName']}"
        if variables["SHOAL_COORDINATOR"] != f"{host}:7070":
            yield f"{workload} looks for the coordinator at {variables['SHOAL_COORDINATOR']}"
        if workload.kind == "StatefulSet":
            name = workload.spec["serviceName"]
            service = services.get(name, {})
            if service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
                yield f"{workload}: its service {name} is not there, not headless, or without pods that are not ready"
            if variables["SHOAL_SERVICE"] != name:
                yield f"{workload}: SHOAL_SERVICE is {variables['SHOAL_SERVICE']}"


def ports(objects: Sequence[Object]) -> Iterator[str]:
    """Processes listen at the ports that their containers list, and services and monitors lead to these ports."""
    lists = {}
    for workload in workloads(objects):
        [container] = workload.containers
        variables = environment(container, objects)
        listed = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
        lists[workload.name] = {name: (name, port) for name, port in listed.items()}
        expected = {name: str(port) if name == "lanes" else f"0.0.0.0:{port}" for name, port in listed.items()}
        listens = {name: variables.get(_LISTEN[name]) for name in _PORTS[_component(workload)]}
        if expected != listens:
            yield f"{workload} lists the ports {listed}, and listens at {listens}"
    for service in of_kind(objects, "Service"):
        name = service["metadata"]["name"]
        found = {port["name"]: (port["targetPort"], port["port"]) for port in service["spec"]["ports"]}
        if found != lists[name]:
            yield f"Service {name} has the ports {found}"
    for monitor in of_kind(objects, "PodMonitor"):
        if [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] != ["metrics"]:
            yield "PodMonitor does not scrape the port metrics alone"


def command_lines(objects: Sequence[Object]) -> Iterator[str]:
    """Each container's arguments and variables belong to the command that it runs."""
    for workload in workloads(objects):
        for container in workload.containers:
            found, command = environment(container, objects), container["args"][0]
            own = {variable["name"] for variable in container["env"]}
            known = _variables(command) | READ_ELSEWHERE | _NOT_OURS
            known |= {"SHOAL_COORDINATOR"} if command == "coordinator" else set()  # for `kubectl exec`
            of_any = known.union(*map(_variables, MEMBERS))
            for name in sorted((own - known) | (found.keys() - of_any)):
                yield f"{workload}: shoal {command} does not read {name}"
            if complaint := _parse(container["args"], found):
                yield f"{workload}: shoal {' '.join(container['args'])}: {complaint}"


def page_names(objects: Sequence[Object]) -> Iterator[str]:
    """The page answers to each name by which pods reach it, and to no other."""
    [container] = named(objects, "StatefulSet", "coordinator")["spec"]["template"]["spec"]["containers"]
    found = environment(container, objects)
    given = [name for name in found.get("SHOAL_PAGE_HOSTS", "").split(",") if name]
    rules = rules_for(found["SHOAL_PAGE_LISTEN"].rpartition(":")[0], given)
    hosts, suffixes = ("coordinator", "coordinator-0.coordinator"), ("", ".shoal", ".shoal.svc")
    names = {f"{host}{suffix}" for host in hosts for suffix in suffixes}
    yield from (f"the page does not answer to {name}" for name in sorted(names) if not rules.knows(name))
    yield from (f"the page answers to {name}" for name in sorted(set(given) - names))


def probes(objects: Sequence[Object]) -> Iterator[str]:
    """Each member is probed over TLS, at /healthz: the kubelet cannot probe gRPC with TLS.

    The startup probe lasts longer than the member's search for its coordinator.
    """
    for workload in _members(objects):
        [container] = workload.containers
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            if container.get(name, {}).get("httpGet") != {"path": "/healthz", "port": "metrics", "scheme": "HTTPS"}:
                yield f"{workload}: {name} does not ask for /healthz over TLS at the port metrics"
        startup = container.get("startupProbe", {})
        patience_s = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
        retries_s = float(environment(container, objects).get("SHOAL_RETRY_FOR", 20))
        if workload.name != "coordinator" and patience_s <= retries_s:
            yield f"{workload}: its startupProbe gives up after {patience_s} s, before its {retries_s:g} s are over"


def endings(objects: Sequence[Object]) -> Iterator[str]:
    """No member is killed within its grace period, and the coordinator runs until the servers' last checkpoint."""
    needed_s = {}
    for workload in _members(objects):
        [container] = workload.containers
        before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed_s[workload.name] = before_s + float(environment(container, objects).get("SHOAL_GRACE_PERIOD", 0))
        if workload.pod.get("terminationGracePeriodSeconds", 30) < needed_s[workload.name] + _EXIT_S:
            yield f"{workload} is killed before its {needed_s[workload.name]:g} s are over"
    if needed_s["coordinator"] < needed_s["server"] + _EXIT_S:
        yield f"the coordinator is gone after {needed_s['coordinator']:g} s, while servers still need it"


RULES: list[Rule] = [
    security,
    resources,
    volumes,
    selectors,
    identities,
    ports,
    command_lines,
    page_names,
    probes,
    endings,
    *manifest_tls.RULES,
]


def complaints(objects: Sequence[Object]) -> list[str]:
    """Returns the complaints of all rules about some objects."""
    return [complaint for rule in RULES for complaint in rule(objects)]


def schema_errors(objects: Sequence[Object], version: str) -> list[str]:
    """Returns the errors by Kubernetes' own schema of this version, which does not include custom resources."""
    errors = []
    for found in objects:
        if not found["apiVersion"].startswith(("monitoring.coreos.com/", "cert-manager.io/")):
            try:
                assert kubernetes_validate.validate(found, version, strict=True) == version.rpartition(".")[0]
            except kubernetes_validate.ValidationError as error:
                errors.append(f"{found['kind']} {found['metadata']['name']}: {error.message}")
    return errors


def _members(objects: Sequence[Object]) -> Iterator[Workload]:
    return (workload for workload in workloads(objects) if workload.name in MEMBERS)


def _component(workload: Workload) -> str:
    return workload.labels["app.kubernetes.io/component"]


def _values_of(key: str, found: Any) -> Iterator[Any]:
    """Yields the values of a key at any depth."""
    if isinstance(found, list):
        for each in found:
            yield from _values_of(key, each)
    elif isinstance(found, dict):
        yield from (value for name, value in found.items() if name == key)
        for value in found.values():
            yield from _values_of(key, value)


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
    # The folder is in the pod, not on this machine; `volumes` looks for it.
    given = {name: os.curdir if name == "SHOAL_PATH" else value for name, value in variables.items()}
    with mock.patch.dict(os.environ, given), group.make_context("shoal", [arguments[0]]) as context:
        try:
            group.get_command(context, arguments[0]).make_context(arguments[0], list(arguments[1:]))  # type: ignore[attr-defined]
        except Exception as error:  # click's, of which typer may have a copy of its own
            return str(error)
    return ""
