"""Profile `restricted` of Kubernetes' Pod Security Standards, field by field.

It follows https://kubernetes.io/docs/concepts/security/pod-security-standards/. The profiles are cumulative:
`restricted` includes `baseline`. The exceptions for Windows pods are not implemented.
"""

from collections.abc import Iterator
from typing import Any

from support.deployment.manifests import Object, Workload

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def violations(workload: Workload) -> Iterator[str]:
    """Yields the settings of a pod template that the profile forbids."""
    pod = workload.pod
    yield from _pod(workload)
    for container in [*workload.containers, *pod.get("ephemeralContainers", [])]:
        for complaint in _container(container, pod.get("securityContext", {})):
            yield f"container {container['name']}: {complaint}"


def _pod(workload: Workload) -> Iterator[str]:
    pod = workload.pod
    context = pod.get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield f"{field} is set"
    for volume in pod.get("volumes", []):
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"volume {volume['name']} is of a forbidden kind: {sorted(set(volume) - {'name'})}"
    for sysctl in context.get("sysctls", []):
        if sysctl["name"] not in _SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']} is not safe"
    for key, value in workload.pod_metadata.get("annotations", {}).items():
        if key.startswith(_APPARMOR) and not (value == "runtime/default" or value.startswith("localhost/")):
            yield f"annotation {key} is {value}"
    yield from _either(context)


def _container(container: Object, of_pod: Object) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged"):
        yield "privileged is set"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "capabilities.drop lacks ALL"
    if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield f"capabilities.add is {capabilities['add']}"
    if context.get("procMount", "Default") != "Default":
        yield f"procMount is {context['procMount']}"
    if context.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true, here or for the pod"
    profile = context.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type")
    if profile not in {"RuntimeDefault", "Localhost"}:
        yield f"seccompProfile is {profile}, here or for the pod"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield "hostPort is set"
    yield from _hosts(container)
    yield from _either(context)


def _hosts(container: Object) -> Iterator[str]:
    """Yields probes and hooks that would make the kubelet call another host."""
    hooks = container.get("lifecycle", {})
    probes = {name: container.get(name) for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    for name, handler in {**probes, **hooks}.items():
        for kind in ("httpGet", "tcpSocket"):
            if isinstance(handler, dict) and handler.get(kind, {}).get("host"):
                yield f"{name} names a host"


def _either(context: dict[str, Any]) -> Iterator[str]:
    """Yields forbidden settings of a security context, of a pod or of a container."""
    if context.get("runAsNonRoot") is False:
        yield "runAsNonRoot is false"
    if context.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "hostProcess is set"
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        yield "seccompProfile is Unconfined"
    if context.get("appArmorProfile", {}).get("type") not in {None, "RuntimeDefault", "Localhost"}:
        yield "appArmorProfile is Unconfined"
    labels = context.get("seLinuxOptions", {})
    if labels.get("type") not in _SELINUX_TYPES or labels.get("user") or labels.get("role"):
        yield f"seLinuxOptions are {labels}"
