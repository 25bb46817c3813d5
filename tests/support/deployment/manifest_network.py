"""Simulation of network policies: which pods of a namespace can connect to which, by Kubernetes' documented rules.

A connection needs permission at both ends: from the egress policies that select its source, and from the ingress
policies that select its target. An end that no policy selects allows all connections.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from support.deployment.manifests import Object, of_kind, selects

NAMESPACE = "shoal"
PORTS = ("UDP/53", *(f"TCP/{port}" for port in (53, 443, 4317, 7070, 7071, 7080, 7090, 9999)))

Flow = tuple[str, str, str]  # who, whom, at which port


@dataclass(frozen=True)
class Peer:
    """A pod that calls or is called. If `namespace` is empty, it is a peer outside the cluster."""

    name: str
    namespace: str = NAMESPACE
    labels: Mapping[str, str] = field(default_factory=dict)
    bound: bool = True  # by this namespace's policies; what others allow themselves is not ours to test

    @property
    def outside(self) -> bool:
        return not self.namespace


def _ours(component: str) -> Peer:
    labels = {"app.kubernetes.io/component": component, "app.kubernetes.io/part-of": "shoal"}
    return Peer(component, labels={"app.kubernetes.io/name": "shoal", **labels})


MEMBERS = tuple(_ours(component) for component in ("coordinator", "server", "worker", "client"))
_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}
OTHERS = (
    Peer("guest", labels={"app": "guest"}, bound=False),  # a pod in our namespace that may call what it likes
    Peer("stranger", namespace="default", labels={"app.kubernetes.io/component": "worker"}, bound=False),
    Peer("prometheus", namespace="monitoring", labels=_PROMETHEUS, bound=False),
    Peer("grafana", namespace="monitoring", labels={"app.kubernetes.io/name": "grafana"}, bound=False),
    Peer("impostor", namespace="default", labels=_PROMETHEUS, bound=False),
    Peer("collector", namespace="observability", labels={"app.kubernetes.io/name": "collector"}, bound=False),
    Peer("observer", namespace="observability", labels={"app.kubernetes.io/name": "other"}, bound=False),
    Peer("names", namespace="kube-system", labels={"k8s-app": "kube-dns"}, bound=False),
    Peer("neighbour", namespace="kube-system", labels={"k8s-app": "other"}, bound=False),
    Peer("internet", namespace="", bound=False),
)

# What a Shoal needs. Nobody else reaches anything.
NEEDED = frozenset(
    {
        *((peer.name, "names", port) for peer in MEMBERS for port in ("UDP/53", "TCP/53")),
        *((member, "coordinator", "TCP/7070") for member in ("server", "worker", "client")),
        *((member, "server", "TCP/7070") for member in ("coordinator", "server", "worker", "client")),
        *((member, "server", "TCP/7071") for member in ("worker", "client")),
        ("client", "coordinator", "TCP/7080"),
    }
)
SCRAPES = frozenset(("prometheus", member, "TCP/7090") for member in ("coordinator", "server", "worker"))
# HTTPS anywhere, as a policy cannot name a store's host: to whatever lets it in.
STORES = frozenset((role, far.name, "TCP/443") for role in ("coordinator", "server") for far in OTHERS)
# To a collector, as docs/how-to/tracing.md shows it.
TRACES = frozenset((peer.name, "collector", "TCP/4317") for peer in MEMBERS)

# The overlays, with the connections that each must allow.
OVERLAYS = {
    "base": NEEDED,
    "overlays/local": NEEDED,
    "overlays/production": NEEDED | SCRAPES,
    "overlays/gpu": NEEDED,
}


def flows(objects: Sequence[Object]) -> frozenset[Flow]:
    """Returns all possible connections that have at least one end in our namespace."""
    policies = [policy["spec"] for policy in of_kind(objects, "NetworkPolicy")]
    return frozenset(
        (source.name, target.name, port)
        for source in (*MEMBERS, *OTHERS)
        for target in (*MEMBERS, *OTHERS)
        if source.bound or target.bound
        for port in PORTS
        if _allowed(policies, "Egress", source, target, port) and _allowed(policies, "Ingress", target, source, port)
    )


def _allowed(policies: Sequence[Object], direction: str, end: Peer, other: Peer, port: str) -> bool:
    if not end.bound:
        return True
    binding = [
        each for each in policies if direction in each["policyTypes"] and selects(each["podSelector"], end.labels)
    ]
    rules = [rule for policy in binding for rule in policy.get(direction.lower(), [])]
    return not binding or any(_lets(rule, direction, other, port) for rule in rules)


def _lets(rule: Object, direction: str, other: Peer, port: str) -> bool:
    ports = rule.get("ports")
    if ports is not None and port not in {f"{each.get('protocol', 'TCP')}/{each['port']}" for each in ports}:
        return False
    peers = rule.get("to" if direction == "Egress" else "from")
    return peers is None or any(_is(peer, other) for peer in peers)


def _is(peer: Object, other: Peer) -> bool:
    assert "ipBlock" not in peer, "addresses are not played here: extend Peer by one"
    if other.outside:
        return False
    namespaces = peer.get("namespaceSelector")
    of_namespace = {"kubernetes.io/metadata.name": other.namespace}
    right_namespace = other.namespace == NAMESPACE if namespaces is None else selects(namespaces, of_namespace)
    return right_namespace and selects(peer.get("podSelector", {}), other.labels)


def complaints(objects: Sequence[Object], needed: frozenset[Flow]) -> Iterator[str]:
    """Yields the differences between possible and needed connections."""
    possible = flows(objects)
    for source, target, port in sorted(needed - possible):
        yield f"{source} cannot reach {target} at {port}"
    for source, target, port in sorted(possible - needed):
        yield f"{source} can reach {target} at {port}, and need not"
