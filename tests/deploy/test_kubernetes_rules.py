"""Rules for manifests: each finds the mistakes for which it was written."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from support.deployment import manifest_network as network
from support.deployment.manifest_rules import NEWEST, READ_ELSEWHERE, complaints, schema_errors
from support.deployment.manifests import KUBERNETES, Object, named, of_kind, rendered, workloads

ROOT = KUBERNETES.parents[1]

Change = Callable[[list[Object]], object]


@pytest.fixture
def production() -> list[Object]:
    """Returns a copy, which tests break, of the overlay that has objects of all kinds."""
    return copy.deepcopy(rendered("overlays/production"))


def pod(objects: list[Object], name: str = "server") -> Object:
    [found] = [each.pod for each in workloads(objects) if each.name == name]
    return found


def container(objects: list[Object], name: str = "server") -> Object:
    first: Object = pod(objects, name)["containers"][0]
    return first


def variable(objects: list[Object], name: str, value: str, of: str = "server") -> None:
    env = container(objects, of)["env"]
    env[:] = [each for each in env if each["name"] != name] + [{"name": name, "value": value}]


def shared_variable(objects: list[Object], name: str, value: str) -> None:
    [settings] = of_kind(objects, "ConfigMap")
    settings["data"][name] = value


def spec(objects: list[Object], kind: str, name: str = "server") -> Any:
    return named(objects, kind, name)["spec"]


# What goes wrong in a cluster, a change to production that causes it, and the complaint.
BROKEN: list[tuple[str, Change, str]] = [
    (
        "the namespace refuses the pods",
        lambda o: container(o)["securityContext"].update(privileged=True),
        "server has the securityContext",
    ),
    (
        "the namespace refuses a volume of the node",
        lambda o: pod(o)["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        "volume x is of another kind",
    ),
    (
        "an overlay without the line `namespace` creates objects elsewhere",
        lambda o: named(o, "HorizontalPodAutoscaler", "worker")["metadata"].pop("namespace"),
        "in the namespace None",
    ),
    (
        "the API server refuses a request above the limit",
        lambda o: container(o)["resources"]["requests"].update(cpu="9"),
        "requests more than its limit of cpu",
    ),
    (
        "shared memory takes the memory of the trainer",
        lambda o: next(each for each in pod(o, "worker")["volumes"] if each["name"] == "shm")["emptyDir"].update(
            sizeLimit="15.6Gi"
        ),
        "for volumes in memory",
    ),
    (
        "the API server refuses a mount of a volume that an overlay removed",
        lambda o: pod(o)["volumes"].remove(next(each for each in pod(o)["volumes"] if each["name"] == "checkpoints")),
        "volume checkpoints is not there",
    ),
    (
        "checkpoints are lost with the container",
        lambda o: shared_variable(o, "SHOAL_CHECKPOINTS", "/data"),
        "SHOAL_CHECKPOINTS is /data",
    ),
    (
        "a service has no endpoints",
        lambda o: spec(o, "Service")["selector"].update(a="b"),
        "Service server selects pods of []",
    ),
    (
        "two servers share a node",
        lambda o: pod(o)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0].update(
            labelSelector={"matchLabels": {"a": "b"}}
        ),
        "selects no pods",
    ),
    (
        "nobody reaches a draining server",
        lambda o: spec(o, "Service").pop("publishNotReadyAddresses"),
        "without pods that are not ready",
    ),
    (
        "nobody finds the coordinator",
        lambda o: shared_variable(o, "SHOAL_COORDINATOR", "coordinator:7070"),
        "looks for the coordinator at coordinator:7070",
    ),
    (
        "a process listens where nobody calls it",
        lambda o: variable(o, "SHOAL_LANE_PORT", "7072"),
        "and listens at",
    ),
    (
        "a service leads to a wrong port",
        lambda o: spec(o, "Service")["ports"][0].update(targetPort="metrics"),
        "Service server has the ports",
    ),
    (
        "a misspelled variable has no effect",
        lambda o: shared_variable(o, "SHOAL_RETRY", "9"),
        "does not read SHOAL_RETRY",
    ),
    (
        "a variable of another role has no effect",
        lambda o: variable(o, "SHOAL_DEVICE", "cpu"),
        "shoal server does not read SHOAL_DEVICE",
    ),
    (
        "a process ends at once with a usage error",
        lambda o: container(o)["args"].append("--fast"),
        "No such option",
    ),
    (
        "the page refuses a name by which pods call it",
        lambda o: variable(o, "SHOAL_PAGE_HOSTS", "coordinator", "coordinator"),
        "does not answer to coordinator-0.coordinator.shoal.svc",
    ),
    (
        "the kubelet kills a member that waits for its coordinator",
        lambda o: container(o)["startupProbe"].update(failureThreshold=3),
        "gives up after 6 s",
    ),
    (
        "the kubelet kills a server that saves a checkpoint",
        lambda o: variable(o, "SHOAL_GRACE_PERIOD", "100"),
        "killed before its 105 s",
    ),
    (
        "the coordinator ends before the servers' last checkpoint",
        lambda o: container(o, "coordinator").pop("lifecycle"),
        "while servers still need it",
    ),
    (
        "a server holds the key of the coordinator",
        lambda o: next(each for each in pod(o)["volumes"] if each["name"] == "tls")["secret"].update(
            secretName="coordinator-tls"
        ),
        "server mounts the secrets",
    ),
    (
        "everybody can call a server",
        lambda o: variable(o, "SHOAL_INSECURE", "1"),
        "server is insecure",
    ),
    (
        "a role cannot read its key",
        lambda o: pod(o)["securityContext"].pop("fsGroup"),
        "its user cannot read its key",
    ),
    (
        "the kubelet asks for gRPC without TLS",
        lambda o: container(o).update(livenessProbe={"grpc": {"port": 7070}}),
        "livenessProbe does not ask for /healthz over TLS",
    ),
    (
        "Prometheus scrapes without a certificate",
        lambda o: spec(o, "PodMonitor")["podMetricsEndpoints"][0].pop("tlsConfig"),
        "PodMonitor server does not scrape over TLS",
    ),
    (
        "clients refuse the certificate of a server",
        lambda o: spec(o, "Certificate")["dnsNames"].remove("*.server.shoal.svc"),
        "Certificate server does not name server-0.server.shoal.svc",
    ),
    (
        "clients do not know the role of a server",
        lambda o: spec(o, "Certificate")["dnsNames"].remove("server.role.shoal.internal"),
        "Certificate server does not name server.role.shoal.internal",
    ),
    (
        "a worker poses as a server",
        lambda o: spec(o, "Certificate", "worker")["dnsNames"].append("*.role.shoal.internal"),
        "Certificate worker: its holder can pose as another role",
    ),
    (
        "a reader poses as a server",
        lambda o: spec(o, "Certificate", "reader").update(dnsNames=["server"]),
        "its holder can pose as ['server']",
    ),
    (
        "a worker has the rights of an admin",
        lambda o: spec(o, "Certificate", "worker").update(uris=["spiffe://shoal/admin"]),
        "Certificate worker names",
    ),
]


@pytest.mark.parametrize(("change", "complaint"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_the_rules_find(production: list[Object], change: Change, complaint: str) -> None:
    change(production)
    found = complaints(production)
    assert any(complaint in each for each in found), found


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda o: o.remove(named(o, "NetworkPolicy", "nothing")), "guest can reach client at TCP/9999"),
        (lambda o: o.remove(named(o, "NetworkPolicy", "names")), "worker cannot reach names at UDP/53"),
        (lambda o: spec(o, "NetworkPolicy")["ingress"].append({}), "stranger can reach server at TCP/7070"),
        (
            lambda o: spec(o, "NetworkPolicy", "metrics")["ingress"][0]["from"][0].update(namespaceSelector={}),
            "impostor can reach server at TCP/7090",
        ),
    ],
)
def test_the_simulated_policies_show(production: list[Object], change: Change, complaint: str) -> None:
    change(production)
    assert complaint in "\n".join(network.complaints(production, network.OVERLAYS["overlays/production"]))


def test_the_schemas_refuse_an_unknown_field(production: list[Object]) -> None:
    spec(production, "StatefulSet").update(replica=2)
    [error] = schema_errors(production, NEWEST)
    assert error.startswith("StatefulSet server: ")


def test_variables_without_an_option_are_read_somewhere() -> None:
    """So that a manifest does not keep a variable that no module reads any more."""
    sources = [path for package in ("client", "server", "worker") for path in (ROOT / package).rglob("*.py")]
    text = "".join(path.read_text() for path in sources)
    assert {name for name in READ_ELSEWHERE if f'"{name}"' in text} == READ_ELSEWHERE
