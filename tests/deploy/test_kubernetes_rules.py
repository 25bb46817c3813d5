"""Rules for manifests: each rule finds a manifest that breaks it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from support.deployment import manifest_lifecycle as lifecycle
from support.deployment import manifest_network as network
from support.deployment import manifest_rules as rules
from support.deployment.manifest_checks import OVERLAYS, RULES, SCHEMAS, rendered, schema_errors
from support.deployment.manifests import KUBERNETES, Object, Workload, named, quantity, render, selects, workloads
from support.deployment.pod_security import violations

ROOT = KUBERNETES.parents[1]


@pytest.fixture
def production() -> list[Object]:
    """Returns a copy, which tests break, of the overlay that has objects of all kinds."""
    return copy.deepcopy(rendered("overlays/production"))


# Each takes production's objects and breaks them, so that the rule says what stands beside it.
Change = Callable[[list[Object]], object]


def pod(objects: list[Object], name: str = "server") -> Object:
    [found] = [each.pod for each in workloads(objects) if each.name == name]
    return found


def container(objects: list[Object], name: str = "server") -> Object:
    first: Object = pod(objects, name)["containers"][0]
    return first


def variable(objects: list[Object], name: str, value: str, of: str = "server") -> None:
    env = container(objects, of)["env"]
    env[:] = [each for each in env if each["name"] != name] + [{"name": name, "value": value}]


def spec(objects: list[Object], kind: str, name: str = "server") -> Object:
    found: Object = named(objects, kind, name)["spec"]
    return found


def metadata(objects: list[Object], kind: str, name: str = "server") -> Object:
    found: Object = named(objects, kind, name)["metadata"]
    return found


def drop(objects: list[Object], kind: str, name: str = "server") -> None:
    objects.remove(named(objects, kind, name))


BROKEN: list[tuple[rules.Rule, Change, str]] = [
    (rules.restricted, lambda o: pod(o).update(hostNetwork=True), "StatefulSet server: hostNetwork"),
    (rules.restricted, lambda o: metadata(o, "Namespace", "shoal")["labels"].clear(), "does not enforce"),
    (rules.locked_down, lambda o: pod(o)["securityContext"].update(runAsUser=1000), "image's user"),
    (rules.locked_down, lambda o: pod(o).pop("automountServiceAccountToken"), "token of its account"),
    (rules.locked_down, lambda o: pod(o).pop("enableServiceLinks"), "variables of other services"),
    (rules.locked_down, lambda o: container(o)["securityContext"].pop("readOnlyRootFilesystem"), "can be written"),
    (
        rules.locked_down,
        lambda o: named(o, "ServiceAccount", "server").pop("automountServiceAccountToken"),
        "gives its token",
    ),
    (rules.accounts, lambda o: pod(o).pop("serviceAccountName"), "not one of its own"),
    (rules.accounts, lambda o: drop(o, "ServiceAccount"), "not one of its own"),
    (rules.pinned_images, lambda o: container(o).update(image="host:5000/shoal"), "not pinned"),
    (rules.pinned_images, lambda o: container(o).update(image="shoal:latest"), "not pinned"),
    (rules.resources, lambda o: container(o).pop("resources"), "lacks a request or limit of cpu"),
    (rules.resources, lambda o: container(o)["resources"]["limits"].pop("memory"), "lacks a request or limit of mem"),
    (rules.resources, lambda o: container(o)["resources"]["requests"].update(cpu="9"), "requests more cpu"),
    (
        rules.resources,
        lambda o: [
            container(o)["resources"][kind].update({"a.b/c": n}) for kind, n in (("requests", 1), ("limits", 2))
        ],
        "requests other than its limit of a.b/c",
    ),
    (rules.memory, lambda o: pod(o)["volumes"].append({"name": "x", "emptyDir": {}}), "no sizeLimit"),
    (
        rules.memory,
        lambda o: pod(o)["volumes"].append({"name": "x", "emptyDir": {"medium": "Memory", "sizeLimit": "15.6Gi"}}),
        "its memory's limits",
    ),
    (rules.memory, lambda o: container(o)["resources"]["requests"].update(memory="64Mi"), "its memory's requests"),
    (rules.volumes, lambda o: container(o)["volumeMounts"].append({"name": "x", "mountPath": "/x"}), "x is not there"),
    (rules.volumes, lambda o: pod(o)["volumes"].append({"name": "x", "emptyDir": {}}), "x is not used"),
    (rules.volumes, lambda o: container(o)["volumeMounts"].pop(), "no /tmp"),
    (rules.volumes, lambda o: drop(o, "PersistentVolumeClaim", "checkpoints"), "no claim checkpoints"),
    (rules.volumes, lambda o: pod(o)["volumes"].pop(0), "is used by ['coordinator']"),
    (rules.volumes, lambda o: pod(o, "worker")["volumes"][0]["configMap"].pop("optional"), "no map programs"),
    (rules.selectors, lambda o: spec(o, "StatefulSet")["selector"]["matchLabels"].update(a="b"), "its own pods"),
    (rules.selectors, lambda o: spec(o, "Service")["selector"].update(a="b"), "Service server selects pods of []"),
    (rules.selectors, lambda o: spec(o, "PodDisruptionBudget").update(selector={}), "PodDisruptionBudget server"),
    (rules.selectors, lambda o: spec(o, "PodMonitor", "shoal").update(selector={"matchLabels": {"a": "b"}}), "PodMon"),
    (
        rules.selectors,
        lambda o: pod(o)["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(a="b"),
        "a topology spread selects no pods",
    ),
    (
        rules.selectors,
        lambda o: pod(o)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0][
            "labelSelector"
        ]["matchLabels"].update(a="b"),
        "podAntiAffinity selects no pods",
    ),
    (rules.identities, lambda o: drop(o, "Service"), "not there, or not headless"),
    (rules.identities, lambda o: spec(o, "Service").pop("clusterIP"), "not there, or not headless"),
    (rules.identities, lambda o: spec(o, "Service").pop("publishNotReadyAddresses"), "only while they are ready"),
    (rules.identities, lambda o: spec(o, "StatefulSet", "coordinator").update(replicas=2), "there has to be one"),
    (rules.ports, lambda o: container(o)["ports"].pop(), "StatefulSet server lists the ports"),
    (rules.ports, lambda o: spec(o, "Service")["ports"][0].update(targetPort="metrics"), "Service server"),
    (rules.ports, lambda o: spec(o, "PodMonitor", "shoal")["podMetricsEndpoints"][0].update(port="grpc"), "PodMon"),
    (rules.budgets, lambda o: drop(o, "PodDisruptionBudget"), "server has no PodDisruptionBudget"),
    (rules.budgets, lambda o: spec(o, "PodDisruptionBudget").update(maxUnavailable=0), "forever"),
    (rules.budgets, lambda o: spec(o, "PodDisruptionBudget").pop("unhealthyPodEvictionPolicy"), "do not serve"),
    (rules.autoscaling, lambda o: spec(o, "Deployment", "worker").update(replicas=3), "replicas, and an autoscaler"),
    (rules.autoscaling, lambda o: spec(o, "HorizontalPodAutoscaler", "worker").update(maxReplicas=0), "no sense"),
    (rules.one_namespace, lambda o: metadata(o, "Service").update(namespace="default"), "in the namespace default"),
    (rules.one_namespace, lambda o: metadata(o, "Service").pop("namespace"), "in the namespace None"),
    (rules.monitoring, lambda o: spec(o, "PodMonitor", "shoal")["podMetricsEndpoints"][0].update(ports=1), "ports"),
    (
        rules.monitoring,
        lambda o: spec(o, "PodMonitor", "shoal")["podMetricsEndpoints"][0]["relabelings"][0].pop("targetLabel"),
        "'targetLabel' is a required property",
    ),
    (
        rules.monitoring,
        lambda o: spec(o, "PrometheusRule", "shoal")["groups"][0]["rules"].append({"expr": "up"}),
        "is not valid under any of the given schemas",
    ),
    (rules.monitoring, lambda o: spec(o, "PrometheusRule", "shoal").update(group=[]), "'group' was unexpected"),
    (rules.monitoring, lambda o: spec(o, "PodMonitor", "shoal").pop("selector"), "'selector' is a required property"),
    (
        rules.monitoring,
        lambda o: spec(o, "PrometheusRule", "shoal")["groups"][0]["rules"][0].update({"for": "soon"}),
        "'soon' does not match",
    ),
    (
        lifecycle.command_lines,
        lambda o: variable(o, "SHOAL_LANES_PORT", "7071"),
        "SHOAL_LANES_PORT is no variable of sh",
    ),
    (
        lifecycle.command_lines,
        lambda o: variable(o, "SHOAL_DEVICE", "cpu"),
        "SHOAL_DEVICE is no variable of shoal server",
    ),
    (lifecycle.command_lines, lambda o: variable(o, "SHOAL_RPC_THREADS", "many"), "valid integer"),
    (lifecycle.command_lines, lambda o: container(o)["args"].append("--fast"), "No such option"),
    (
        lifecycle.command_lines,
        lambda o: next(each for each in o if each["kind"] == "ConfigMap")["data"].update(SHOAL_COLOUR="red"),
        "SHOAL_COLOUR is no variable of any role",
    ),
    (lifecycle.addresses, lambda o: variable(o, "SHOAL_LISTEN", "127.0.0.1:7070"), "SHOAL_LISTEN is 127.0.0.1:7070"),
    (lifecycle.addresses, lambda o: variable(o, "SHOAL_LANE_PORT", "0"), "SHOAL_LANE_PORT is 0"),
    (lifecycle.addresses, lambda o: variable(o, "SHOAL_COORDINATOR", "coordinator:7070"), "at coordinator:7070"),
    (lifecycle.addresses, lambda o: variable(o, "SHOAL_SERVICE", "servers"), "SHOAL_SERVICE is servers"),
    (
        lifecycle.page_names,
        lambda o: variable(o, "SHOAL_PAGE_HOSTS", "coordinator", "coordinator"),
        "does not answer to coordinator-0.coordinator.shoal.svc",
    ),
    (
        lifecycle.page_names,
        lambda o: variable(o, "SHOAL_PAGE_HOSTS", "evil.example", "coordinator"),
        "answers to evil.example",
    ),
    (lifecycle.mounted_folders, lambda o: variable(o, "SHOAL_CHECKPOINTS", "/data"), "SHOAL_CHECKPOINTS is /data"),
    (lifecycle.probes, lambda o: container(o)["livenessProbe"]["grpc"].update(port=7071), "livenessProbe does not ask"),
    (lifecycle.probes, lambda o: container(o)["startupProbe"].update(failureThreshold=3), "gives up after 6 s"),
    (lifecycle.endings, lambda o: variable(o, "SHOAL_GRACE_PERIOD", "100"), "killed before its 105 s"),
    (lifecycle.endings, lambda o: container(o, "coordinator").pop("lifecycle"), "while servers still need it"),
]


class TestTheRulesThemselves:
    @pytest.mark.parametrize(
        ("rule", "change", "complaint"), BROKEN, ids=[f"{rule.__name__}-{text}" for rule, _, text in BROKEN]
    )
    def test_notice(
        self,
        production: list[Object],
        rule: rules.Rule,
        change: Callable[..., Any],
        complaint: str,
    ) -> None:
        change(production)
        assert any(complaint in found for found in rule(production)), list(rule(production))

    def test_none_goes_without_a_proof(self) -> None:
        assert {rule for rule, _, _ in BROKEN} == set(RULES)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda o: drop(o, "NetworkPolicy", "nothing"), "guest can reach client at TCP/9999"),
            (lambda o: drop(o, "NetworkPolicy", "names"), "worker cannot reach names at UDP/53"),
            (lambda o: drop(o, "NetworkPolicy", "metrics"), "prometheus cannot reach server at TCP/7090"),
            (lambda o: drop(o, "NetworkPolicy", "worker"), "worker cannot reach coordinator at TCP/7070"),
            (lambda o: spec(o, "NetworkPolicy", "server")["ingress"].append({}), "stranger can reach server at TCP/70"),
            (
                lambda o: spec(o, "NetworkPolicy", "server")["ingress"][1]["ports"].pop(),
                "cannot reach server at TCP/7071",
            ),
            (lambda o: spec(o, "NetworkPolicy", "client").update(egress=[{}]), "client can reach internet at TCP/443"),
            (
                lambda o: spec(o, "NetworkPolicy", "metrics")["ingress"][0]["from"][0].pop("podSelector"),
                "grafana can reach server at TCP/7090",
            ),
            (
                lambda o: spec(o, "NetworkPolicy", "metrics")["ingress"][0]["from"][0].update(namespaceSelector={}),
                "impostor can reach server at TCP/7090",
            ),
            (
                lambda o: spec(o, "NetworkPolicy", "names")["egress"][0]["to"][0].pop("podSelector"),
                "worker can reach neighbour at UDP/53",
            ),
        ],
    )
    def test_notice_policies(self, production: list[Object], change: Callable[..., Any], complaint: str) -> None:
        change(production)
        found = list(network.complaints(production, OVERLAYS["overlays/production"]))
        assert any(complaint in each for each in found), found

    def test_variables_without_a_flag_are_read_somewhere(self) -> None:
        sources = [path for room in ("client", "server", "worker") for path in (ROOT / room).rglob("*.py")]
        text = "".join(path.read_text() for path in sources)
        assert {name for name in lifecycle.READ_ELSEWHERE if f'"{name}"' in text} == lifecycle.READ_ELSEWHERE

    @pytest.mark.parametrize(
        ("kind", "change"),
        [
            ("StatefulSet", partial(dict.update, replica=2)),
            ("StatefulSet", partial(dict.update, replicas="two")),
            ("StatefulSet", lambda spec: spec.pop("selector")),
            ("Service", lambda spec: spec["ports"][0].update(port="grpc")),
        ],
    )
    def test_the_schema_notices(self, production: list[Object], kind: str, change: Callable[..., Any]) -> None:
        change(spec(production, kind))
        [error] = schema_errors(production, SCHEMAS)
        assert error.startswith(f"{kind} server: ")


SAFE = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
    "capabilities": {"drop": ["ALL"]},
}
FORBIDDEN_IN_PODS = [
    ({"hostNetwork": True}, "hostNetwork"),
    ({"hostPID": True}, "hostPID"),
    ({"hostIPC": True}, "hostIPC"),
    ({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}, "volume v"),
    ({"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]}, "volume v"),
    ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, "sysctl"),
    ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
    ({"securityContext": {"runAsNonRoot": False}}, "runAsNonRoot"),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "seccompProfile"),
    ({"securityContext": {"appArmorProfile": {"type": "Unconfined"}}}, "appArmorProfile"),
    ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "seLinuxOptions"),
    ({"securityContext": {"windowsOptions": {"hostProcess": True}}}, "hostProcess"),
]
FORBIDDEN_IN_CONTAINERS = [
    ({"privileged": True}, "privileged"),
    ({"allowPrivilegeEscalation": True}, "allowPrivilegeEscalation"),
    ({"allowPrivilegeEscalation": None}, "allowPrivilegeEscalation"),
    ({"capabilities": {}}, "lacks ALL"),
    ({"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}, "capabilities.add"),
    ({"procMount": "Unmasked"}, "procMount"),
    ({"runAsNonRoot": None}, "runAsNonRoot is not true"),
    ({"runAsNonRoot": False}, "runAsNonRoot"),
    ({"runAsUser": 0}, "runAsUser"),
    ({"seccompProfile": {}}, "seccompProfile is None"),
    ({"seccompProfile": {"type": "Unconfined"}}, "seccompProfile is Unconfined"),
    ({"appArmorProfile": {"type": "Unconfined"}}, "appArmorProfile"),
    ({"seLinuxOptions": {"user": "system_u"}}, "seLinuxOptions"),
    ({"windowsOptions": {"hostProcess": True}}, "hostProcess"),
]


class TestPodSecurity:
    """The profile, field by field, for containers of each of the three kinds."""

    def workload(self, *, annotations: Object | None = None, **pod: Any) -> Workload:
        containers = {"containers": [{"name": "c", "securityContext": SAFE}]}
        return Workload("Job", "j", {}, {"annotations": annotations or {}}, {**containers, **pod})

    def test_what_is_safe_passes(self) -> None:
        assert list(violations(self.workload())) == []

    def test_what_the_pod_says_holds_for_its_containers(self) -> None:
        own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}}
        of_pod = {"runAsNonRoot": True, "seccompProfile": {"type": "Localhost"}}
        found = self.workload(securityContext=of_pod, containers=[{"name": "c", "securityContext": own}])
        assert list(violations(found)) == []

    @pytest.mark.parametrize(("change", "complaint"), FORBIDDEN_IN_PODS)
    def test_of_a_pod(self, change: dict[str, Any], complaint: str) -> None:
        assert any(complaint in found for found in violations(self.workload(**change)))

    @pytest.mark.parametrize("kind", ["containers", "initContainers", "ephemeralContainers"])
    @pytest.mark.parametrize(("change", "complaint"), FORBIDDEN_IN_CONTAINERS)
    def test_of_a_container(self, kind: str, change: dict[str, Any], complaint: str) -> None:
        context = {key: value for key, value in {**SAFE, **change}.items() if value is not None}
        pod: dict[str, Any] = {kind: [{"name": "x", "securityContext": context}]}
        found = self.workload(**pod)
        assert any(complaint in each and "container x" in each for each in violations(found))

    @pytest.mark.parametrize(
        "change",
        [
            {"ports": [{"containerPort": 1, "hostPort": 1}]},
            {"livenessProbe": {"httpGet": {"host": "elsewhere", "port": 1}}},
            {"lifecycle": {"preStop": {"tcpSocket": {"host": "elsewhere", "port": 1}}}},
        ],
    )
    def test_of_what_a_container_opens_and_calls(
        self, change: Mapping[str, Sequence[Mapping[str, int]] | Mapping[str, dict[str, Any]]]
    ) -> None:
        found = self.workload(containers=[{"name": "c", "securityContext": SAFE, **change}])
        assert len(list(violations(found))) == 1

    def test_of_annotations(self) -> None:
        key = "container.apparmor.security.beta.kubernetes.io/c"
        assert len(list(violations(self.workload(annotations={key: "unconfined"})))) == 1
        assert list(violations(self.workload(annotations={key: "runtime/default"}))) == []


class TestReading:
    @pytest.mark.parametrize(
        ("text", "value"), [("500m", 0.5), ("2", 2), (4, 4), ("1Ki", 1024), ("1.5Gi", 1.5 * 2**30)]
    )
    def test_quantities(self, text: int | str, value: float) -> None:
        assert quantity(text) == value

    @pytest.mark.parametrize(
        ("expression", "taken"),
        [
            ({"key": "a", "operator": "In", "values": ["1", "2"]}, True),
            ({"key": "a", "operator": "In", "values": ["2"]}, False),
            ({"key": "a", "operator": "NotIn", "values": ["2"]}, True),
            ({"key": "b", "operator": "NotIn", "values": ["2"]}, True),
            ({"key": "a", "operator": "Exists"}, True),
            ({"key": "b", "operator": "Exists"}, False),
            ({"key": "b", "operator": "DoesNotExist"}, True),
        ],
    )
    def test_selectors(self, expression: Mapping[str, str | list[str]], taken: bool) -> None:
        assert selects({"matchExpressions": [expression]}, {"a": "1"}) is taken

    def test_an_empty_selector_takes_all_and_none_takes_nothing(self) -> None:
        assert selects({}, {"a": "1"})
        assert not selects(None, {"a": "1"})

    def test_without_kubectl_it_is_skipped_but_for_ci(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        for variable in ("CI", "SHOAL_E2E"):
            monkeypatch.delenv(variable, raising=False)
        with pytest.raises(pytest.skip.Exception, match="there is no kubectl here"):
            render(KUBERNETES / "base")
        monkeypatch.setenv("CI", "true")
        with pytest.raises(pytest.fail.Exception, match="there is no kubectl here"):
            render(KUBERNETES / "base")
