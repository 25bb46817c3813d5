"""Rules for the TLS of Shoal's manifests: which pod has which key, what certificates name, and no port is plain."""

from collections.abc import Iterator, Sequence

from shoal._security import NAMED_ROLES, VARIABLES, AccessRole, role_name
from shoal._security.certificate_identity import ROLE_URI
from support.deployment.manifests import Object, Rule, environment, of_kind, workloads

FOLDER = "/etc/shoal/tls"
# Trainers present a certificate of their own, which gives no rights.
_TRAINER = "trainer"
_TRAINER_FOLDER = "/etc/shoal/trainer-tls"
_TRAINER_FILES = {
    "SHOAL_TRAINER_TLS_CERT": f"{_TRAINER_FOLDER}/tls.crt",
    "SHOAL_TRAINER_TLS_KEY": f"{_TRAINER_FOLDER}/tls.key",
}
_FILES = tuple(f"{FOLDER}/{name}" for name in ("ca.crt", "tls.crt", "tls.key"))
# The access role of the certificate that each component presents.
_ROLES = {"coordinator": "coordinator", "server": "server", "worker": "worker", "client": "submitter"}
_MEMBERS = ("coordinator", "server", "worker")
_SERVES, _CALLS = "server auth", "client auth"


def keys(objects: Sequence[Object]) -> Iterator[str]:
    """Each pod mounts the secret of its own role, a worker also that of trainers, and its process uses the files."""
    for workload in workloads(objects):
        role = _ROLES[workload.labels["app.kubernetes.io/component"]]
        secrets = {volume["name"]: volume["secret"] for volume in workload.pod.get("volumes", []) if "secret" in volume}
        mounted_at = {role: FOLDER} | ({_TRAINER: _TRAINER_FOLDER} if role == "worker" else {})
        if [*secrets.values()] != [{"secretName": f"{each}-tls", "defaultMode": 0o440} for each in mounted_at]:
            yield f"{workload} mounts the secrets {secrets}"
        if workload.pod["securityContext"].get("fsGroup") != workload.pod["securityContext"]["runAsGroup"]:
            yield f"{workload}: its user cannot read its key"
        for container in workload.containers:
            mounts = [mount for mount in container["volumeMounts"] if mount["name"] in secrets]
            expected = [(folder, True) for folder in mounted_at.values()]
            if [(mount["mountPath"], mount.get("readOnly")) for mount in mounts] != expected:
                yield f"{workload}: {container['name']} has its key at {mounts}"
            found = environment(container, objects)
            if tuple(found.get(name) for name in VARIABLES) != _FILES:
                yield f"{workload}: {container['name']} does not use TLS"
            if role == "worker" and _TRAINER_FILES.items() - found.items():
                yield f"{workload}: trainers of {container['name']} present the certificate of their worker"
            if "SHOAL_INSECURE" in found or "--insecure" in container["args"]:
                yield f"{workload}: {container['name']} is insecure"


def plain_ports(objects: Sequence[Object]) -> Iterator[str]:
    """Services say that their ports use TLS, and metrics are scraped over TLS with the certificate of a reader."""
    for service in of_kind(objects, "Service"):
        for port in service["spec"]["ports"]:
            if port.get("appProtocol", "https") != "https":
                yield f"Service {service['metadata']['name']}: port {port['name']} is {port['appProtocol']}"
    for monitor in of_kind(objects, "PodMonitor"):
        name = monitor["metadata"]["name"]
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            files = (("ca", "ca.crt"), ("cert", "tls.crt"))
            expected: Object = {part: {"secret": {"name": "reader-tls", "key": key}} for part, key in files}
            expected |= {"serverName": name, "keySecret": {"name": "reader-tls", "key": "tls.key"}}
            if (endpoint.get("scheme"), endpoint.get("tlsConfig")) != ("https", expected):
                yield f"PodMonitor {name} does not scrape over TLS as a reader"


def certificates(objects: Sequence[Object]) -> Iterator[str]:
    """If cert-manager makes the certificates, each names its role, and the hosts by which others call the role."""
    found = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Certificate")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Issuer")}
    if not found:
        return
    for role in (*_MEMBERS, _TRAINER, "submitter", "reader"):
        spec = found.get(role, {})
        named = (spec.get("secretName"), spec.get("uris"), spec.get("commonName"))
        if named != (f"{role}-tls", None if role == _TRAINER else [f"{ROLE_URI}{role}"], role):
            yield f"Certificate {role} names {named}"
        uses = {_SERVES, _CALLS} if role in _MEMBERS else {_CALLS}
        if set(spec.get("usages", [])) != uses | {"digital signature"}:
            yield f"Certificate {role} is for {spec.get('usages')}"
        hosts = spec.get("dnsNames", [])
        if role not in _MEMBERS and hosts:
            yield f"Certificate {role}: its holder can pose as {hosts}"
        others = {role_name(each) for each in NAMED_ROLES if each != role}
        if any(covers(name, other) for name in hosts for other in others):
            yield f"Certificate {role}: its holder can pose as another role"
        for host in (*called(role, objects), *(_page_hosts(objects) if role == "coordinator" else ())):
            if not any(covers(name, host) for name in hosts):
                yield f"Certificate {role} does not name {host}"
        if issuers.get(spec.get("issuerRef", {}).get("name"), {}).get("ca", {}) != {"secretName": "shoal-ca"}:
            yield f"Certificate {role} is of another CA"


def called(role: str, objects: Sequence[Object]) -> Iterator[str]:
    """Yields the names by which Prometheus and members know the pods of a role, and call them."""
    if role not in _MEMBERS:
        return
    yield role
    if role in NAMED_ROLES:
        yield role_name(AccessRole(role))
    for workload in workloads(objects):
        variables = environment(workload.containers[0], objects)
        if role == "coordinator":
            yield variables["SHOAL_COORDINATOR"].partition(":")[0]
        if workload.name == role != "worker":
            yield f"{role}-0.{variables['SHOAL_SERVICE']}.{variables['SHOAL_POD_NAMESPACE']}.svc"


def covers(name: str, host: str) -> bool:
    """Returns whether a DNS name of a certificate is valid for a host. A wildcard stands for one label."""
    return name == host or (name.startswith("*.") and name[2:] == host.partition(".")[2])


def _page_hosts(objects: Sequence[Object]) -> Iterator[str]:
    for workload in workloads(objects):
        found = environment(workload.containers[0], objects)
        yield from filter(None, found.get("SHOAL_PAGE_HOSTS", "").split(","))


RULES: list[Rule] = [keys, plain_ports, certificates]
