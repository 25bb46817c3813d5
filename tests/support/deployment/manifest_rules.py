"""Rules for Shoal's manifests beyond the schema. Each rule is a function from objects to complaints.

`manifest_network` has the rules of network policies, and `pod_security` those of the security of pods.
"""

from collections.abc import Callable, Iterator, Sequence

from jsonschema import Draft202012Validator

from support.deployment.custom_resources import SCHEMAS
from support.deployment.manifests import Object, Workload, named, of_kind, quantity, selects, workloads
from support.deployment.pod_security import violations

Rule = Callable[[Sequence[Object]], Iterator[str]]

MEMBERS = ("coordinator", "server", "worker")
_USER = 65532
# Roles serve these, wherever they run; those that are theirs alone, too.
_PORTS = {
    "coordinator": {"grpc": 7070, "page": 7080, "metrics": 7090},
    "server": {"grpc": 7070, "lanes": 7071, "metrics": 7090},
    "worker": {"grpc": 7070, "metrics": 7090},
    "client": {},
}
# The least that a process needs for itself beside its volumes in memory: about twice what one without jobs has
# resident (84, 283 and 81 MB; a worker's trainer comes to that).
_HEAP = {"coordinator": "256Mi", "server": "640Mi", "worker": "640Mi", "client": "128Mi"}
_CLUSTER_WIDE = {"Namespace", "PriorityClass"}


def restricted(objects: Sequence[Object]) -> Iterator[str]:
    """Every pod complies with the profile, and the namespace enforces the profile."""
    for workload in workloads(objects):
        yield from (f"{workload}: {complaint}" for complaint in violations(workload))
    for namespace in of_kind(objects, "Namespace"):
        for mode in ("enforce", "audit", "warn"):
            if namespace["metadata"].get("labels", {}).get(f"pod-security.kubernetes.io/{mode}") != "restricted":
                yield f"Namespace {namespace['metadata']['name']} does not {mode} the profile restricted"


def locked_down(objects: Sequence[Object]) -> Iterator[str]:
    """Pods do not have the permissions that the profile allows but Shoal does not need."""
    for workload in workloads(objects):
        context = workload.pod.get("securityContext", {})
        if context.get("runAsUser") != _USER or context.get("runAsGroup") != _USER:
            yield f"{workload} is not run as the image's user and group, {_USER}"
        if workload.pod.get("automountServiceAccountToken") is not False:
            yield f"{workload} mounts a token of its account"
        if workload.pod.get("enableServiceLinks") is not False:
            yield f"{workload} has variables of other services in its environment"
        for container in workload.containers:
            if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
                yield f"{workload}: the root file system of {container['name']} can be written"
    for account in of_kind(objects, "ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"ServiceAccount {account['metadata']['name']} gives its token to pods"


def accounts(objects: Sequence[Object]) -> Iterator[str]:
    """Each member has its own service account, which exists."""
    there = {account["metadata"]["name"] for account in of_kind(objects, "ServiceAccount")}
    for workload in _members(objects):
        if (account := workload.pod.get("serviceAccountName")) != workload.name or account not in there:
            yield f"{workload} has the account {account}, not one of its own"


def pinned_images(objects: Sequence[Object]) -> Iterator[str]:
    """An image is named by a version or by a digest."""
    for workload in workloads(objects):
        for container in workload.containers:
            image = container["image"]
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in image and tag in {"", "latest"}:
                yield f"{workload}: the image {image} is not pinned"


def resources(objects: Sequence[Object]) -> Iterator[str]:
    """Each container has requests and limits. No request exceeds its limit, and for devices they are equal."""
    for workload in workloads(objects):
        for container in workload.containers:
            wants, most = (container.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
            for name in sorted({"cpu", "memory", *wants, *most}):
                if name not in wants or name not in most:
                    yield f"{workload}: {container['name']} lacks a request or limit of {name}"
                elif quantity(wants[name]) > quantity(most[name]):
                    yield f"{workload}: {container['name']} requests more {name} than its limit"
                elif "/" in name and quantity(wants[name]) != quantity(most[name]):
                    yield f"{workload}: {container['name']} requests other than its limit of {name}"


def memory(objects: Sequence[Object]) -> Iterator[str]:
    """Volumes in memory leave enough of the pod's memory for its processes. All empty volumes have a size limit."""
    for workload in workloads(objects):
        empty = {
            volume["name"]: volume["emptyDir"] for volume in workload.pod.get("volumes", []) if "emptyDir" in volume
        }
        yield from (f"{workload}: volume {name} has no sizeLimit" for name in empty if "sizeLimit" not in empty[name])
        held = sum(quantity(each.get("sizeLimit", 0)) for each in empty.values() if each.get("medium") == "Memory")
        for kind in ("requests", "limits"):
            limit = sum(
                quantity(each.get("resources", {}).get(kind, {}).get("memory", 0)) for each in workload.containers
            )
            need = quantity(_HEAP[_component(workload)]) + (held if kind == "limits" else 0)
            if limit < need:
                yield f"{workload}: its memory's {kind} of {limit:.0f} bytes are below {need:.0f}"


def volumes(objects: Sequence[Object]) -> Iterator[str]:
    """All mounted volumes exist, all volumes are mounted, and their claims and maps exist."""
    claims = {claim["metadata"]["name"] for claim in of_kind(objects, "PersistentVolumeClaim")}
    maps = {found["metadata"]["name"] for found in of_kind(objects, "ConfigMap")}
    for workload in workloads(objects):
        listed = {volume["name"]: volume for volume in workload.pod.get("volumes", [])}
        templates = {claim["metadata"]["name"] for claim in workload.spec.get("volumeClaimTemplates", [])}
        mounted = {mount["name"] for each in workload.containers for mount in each.get("volumeMounts", [])}
        for name in sorted(mounted ^ (listed.keys() | templates)):
            yield f"{workload}: volume {name} is {'not there' if name in mounted else 'not used'}"
        if "/tmp" not in {mount["mountPath"] for each in workload.containers for mount in each.get("volumeMounts", [])}:
            yield f"{workload} has no /tmp, which is its home"
        for name, volume in listed.items():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            config = volume.get("configMap", {})
            if claim and claim not in claims:
                yield f"{workload}: there is no claim {claim} for volume {name}"
            if config and not config.get("optional") and config["name"] not in maps:
                yield f"{workload}: there is no map {config['name']} for volume {name}"
    users = [(workload, each) for workload in workloads(objects) for each in workload.pod.get("volumes", [])]
    for claim in sorted(claims):
        using = {w.name for w, each in users if each.get("persistentVolumeClaim", {}).get("claimName") == claim}
        if using != {"coordinator", "server"}:
            yield f"claim {claim} is used by {sorted(using)}, not by the coordinator and the servers"


def selectors(objects: Sequence[Object]) -> Iterator[str]:
    """Each selector selects the intended pods."""
    everything = list(workloads(objects))
    for workload in everything:
        if workload.kind != "Job" and not selects(workload.spec["selector"], workload.labels):
            yield f"{workload} does not select its own pods"
        for where, selector in _neighbours(workload.pod):
            if not any(selects(selector, other.labels) for other in everything):
                yield f"{workload}: {where} selects no pods"
    for found in of_kind(objects, "Service", "PodDisruptionBudget", "PodMonitor"):
        selector = found["spec"]["selector"]
        if found["kind"] == "Service":
            selector = {"matchLabels": selector}
        selected = {workload.name for workload in everything if selects(selector, workload.labels)}
        name = found["metadata"]["name"]
        if selected != (set(MEMBERS) if found["kind"] == "PodMonitor" else {name}):
            yield f"{found['kind']} {name} selects pods of {sorted(selected)}"


def identities(objects: Sequence[Object]) -> Iterator[str]:
    """A StatefulSet's pods have DNS names from their start to their end, and there is one coordinator."""
    services = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "Service")}
    for workload in _members(objects):
        if workload.kind != "StatefulSet":
            continue
        service = services.get(workload.spec["serviceName"])
        if service is None or service.get("clusterIP") != "None":
            yield f"{workload}: its service {workload.spec['serviceName']} is not there, or not headless"
        elif not service.get("publishNotReadyAddresses"):
            yield f"{workload}: its pods' names resolve only while they are ready"
        if workload.name == "coordinator" and workload.spec.get("replicas") != 1:
            yield f"{workload}: there has to be one"


def ports(objects: Sequence[Object]) -> Iterator[str]:
    """Containers list the ports that their role serves, and services lead to these ports."""
    lists = {}
    for workload in workloads(objects):
        lists[workload.name] = {
            port["name"]: port["containerPort"] for each in workload.containers for port in each.get("ports", [])
        }
        if lists[workload.name] != _PORTS[_component(workload)]:
            yield f"{workload} lists the ports {lists[workload.name]}"
    for service in of_kind(objects, "Service"):
        name = service["metadata"]["name"]
        found = {port["name"]: (port["targetPort"], port["port"]) for port in service["spec"]["ports"]}
        if found != {port: (port, number) for port, number in lists.get(name, {}).items()}:
            yield f"Service {name} has the ports {found}"
    for monitor in of_kind(objects, "PodMonitor"):
        if [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]] != ["metrics"]:
            yield "PodMonitor does not scrape the port metrics alone"


def budgets(objects: Sequence[Object]) -> Iterator[str]:
    """Workloads with several pods have disruption budgets, and no budget blocks a drain forever."""
    there = {found["metadata"]["name"]: found["spec"] for found in of_kind(objects, "PodDisruptionBudget")}
    for name, budget in there.items():
        if "minAvailable" in budget or str(budget.get("maxUnavailable")) in {"0", "0%"}:
            yield f"PodDisruptionBudget {name} may block a drain forever"
        if budget.get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
            yield f"PodDisruptionBudget {name} keeps pods that do not serve"
    for workload in _members(objects):
        if workload.name != "coordinator" and workload.name not in there:
            yield f"{workload} has no PodDisruptionBudget"


def autoscaling(objects: Sequence[Object]) -> Iterator[str]:
    """An autoscaler has a target, and no manifest sets the target's number of replicas."""
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = named(objects, scaler["spec"]["scaleTargetRef"]["kind"], scaler["spec"]["scaleTargetRef"]["name"])
        if "replicas" in target["spec"]:
            yield f"{target['kind']} {target['metadata']['name']} has replicas, and an autoscaler"
        if not 1 <= scaler["spec"]["minReplicas"] <= scaler["spec"]["maxReplicas"]:
            yield "HorizontalPodAutoscaler has bounds that make no sense"


def one_namespace(objects: Sequence[Object]) -> Iterator[str]:
    """All objects are in the namespace that has the labels and the policies."""
    for found in objects:
        where = found["metadata"].get("namespace")
        if (where is None) != (found["kind"] in _CLUSTER_WIDE) or where not in {None, "shoal"}:
            yield f"{found['kind']} {found['metadata']['name']} is in the namespace {where}"


def monitoring(objects: Sequence[Object]) -> Iterator[str]:
    """Custom resources are valid for their operator."""
    for kind, schema in SCHEMAS.items():
        for found in of_kind(objects, kind):
            for error in Draft202012Validator(schema).iter_errors(found):
                yield f"{kind} {found['metadata']['name']} at {error.json_path}: {error.message}"


def _members(objects: Sequence[Object]) -> Iterator[Workload]:
    return (workload for workload in workloads(objects) if _component(workload) in MEMBERS)


def _component(workload: Workload) -> str:
    return workload.labels["app.kubernetes.io/component"]


def _neighbours(pod: Object) -> Iterator[tuple[str, Object]]:
    for spread in pod.get("topologySpreadConstraints", []):
        yield "a topology spread", spread["labelSelector"]
    for kind in ("podAffinity", "podAntiAffinity"):
        affinity = pod.get("affinity", {}).get(kind, {})
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", []):
            yield kind, term["labelSelector"]
        for weighted in affinity.get("preferredDuringSchedulingIgnoredDuringExecution", []):
            yield kind, weighted["podAffinityTerm"]["labelSelector"]
