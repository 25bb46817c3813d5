"""Kubernetes manifests: they are valid and safe, and they agree with the options of the roles.

No cluster runs here. kubectl renders the manifests. The tests validate them against Kubernetes' own schemas and the
rules of `manifest_rules`. `test_kubernetes_rules` tests that these rules find mistakes.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from shoal._role.identity import check_zone
from shoal._security.certificates import make_certificates
from shoal._tracing import environment as tracing
from support.deployment import manifest_network as network
from support.deployment import manifest_tls
from support.deployment.manifest_network import OVERLAYS
from support.deployment.manifest_rules import NEWEST, OLDEST, RULES, complaints, schema_errors
from support.deployment.manifests import (
    KUBERNETES,
    Object,
    Rule,
    environment,
    named,
    of_kind,
    quantity,
    read,
    render,
    render_with,
    rendered,
    workloads,
)
from support.deployment.needed_programs import need

DOCS = KUBERNETES.parents[1] / "docs"


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """Returns the objects of production with GPUs and a bucket, which must not be changed."""
    return render_with(tmp_path_factory.mktemp("manifests"), "production", ["gpu", "object-store"])


@pytest.fixture
def sample() -> list[Object]:
    return read((KUBERNETES / "samples" / "digits.yaml").read_text())


class TestOverlays:
    @pytest.mark.parametrize("version", [OLDEST, NEWEST])
    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_is_valid(self, overlay: str, version: str) -> None:
        assert schema_errors(rendered(overlay), version) == []

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_keeps_the_rules(self, overlay: str, rule: Rule) -> None:
        assert list(rule(rendered(overlay))) == []

    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_lets_through_what_is_needed_and_no_more(self, overlay: str) -> None:
        assert list(network.complaints(rendered(overlay), OVERLAYS[overlay])) == []

    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_has_all_members(self, overlay: str) -> None:
        found = {(each.kind, each.name) for each in workloads(rendered(overlay))}
        assert found == {("StatefulSet", "coordinator"), ("StatefulSet", "server"), ("Deployment", "worker")}

    def test_each_folder_of_overlays_is_tested(self) -> None:
        assert {f"overlays/{each.name}" for each in (KUBERNETES / "overlays").iterdir()} == OVERLAYS.keys() - {"base"}


class TestWhatOverlaysSay:
    def test_gpus_go_to_workers_alone(self) -> None:
        asking = {
            each.name: each.pod["containers"][0]
            for each in workloads(rendered("overlays/gpu"))
            if "nvidia.com/gpu" in each.pod["containers"][0]["resources"]["limits"]
        }
        worker = asking.pop("worker")
        assert not asking
        assert worker["image"].endswith("-gpu")
        assert environment(worker, rendered("overlays/gpu"))["SHOAL_DEVICE"] == "cuda:0"

    def test_one_node_shares_a_volume_of_its_own(self) -> None:
        claim = named(rendered("overlays/local"), "PersistentVolumeClaim", "checkpoints")
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]

    def test_several_nodes_share_a_volume(self) -> None:
        claim = named(rendered("overlays/production"), "PersistentVolumeClaim", "checkpoints")
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert claim["spec"]["storageClassName"]

    def test_local_asks_for_no_more_than_a_laptop_has(self) -> None:
        asked = {"cpu": 0.0, "memory": 0.0}
        for each in workloads(rendered("overlays/local")):
            for kind in asked:
                asked[kind] += each.spec["replicas"] * quantity(
                    each.pod["containers"][0]["resources"]["requests"][kind]
                )
        assert asked["cpu"] <= 1
        assert asked["memory"] <= quantity("3Gi")

    def test_only_the_autoscaler_sets_the_number_of_workers(self) -> None:
        scaler = named(rendered("overlays/production"), "HorizontalPodAutoscaler", "worker")
        target = scaler["spec"]["scaleTargetRef"]
        assert "replicas" not in named(rendered("overlays/production"), target["kind"], target["name"])["spec"]

    @pytest.mark.parametrize("overlay", OVERLAYS)
    def test_the_zone_of_a_server_is_its_node(self, overlay: str) -> None:
        zones = {
            each.name: environment(each.pod["containers"][0], rendered(overlay)).get("SHOAL_ZONE", "")
            for each in workloads(rendered(overlay))
        }
        assert zones == {"coordinator": "", "server": "ip-10-0-0-4.compute.internal", "worker": ""}
        check_zone("server-0", zones["server"])

    def test_the_settings_of_all_roles_are_one_map(self) -> None:
        """So the coordinator and the servers always use the same checkpoint storage."""
        maps = {
            source["configMapRef"]["name"]
            for each in workloads(rendered("base"))
            for source in each.pod["containers"][0]["envFrom"]
        }
        assert len(maps) == 1
        assert re.fullmatch(r"shoal-[a-z0-9]{10}", maps.pop())  # a change of it is a change of the pods


class TestComponents:
    def test_go_together(self, composed: list[Object]) -> None:
        assert schema_errors(composed, NEWEST) == []
        assert complaints(composed) == []
        assert list(network.complaints(composed, network.NEEDED | network.SCRAPES | network.STORES)) == []

    def test_a_bucket_takes_the_place_of_the_volume(self, composed: list[Object]) -> None:
        for name in ("coordinator", "server"):
            pod = named(composed, "StatefulSet", name)["spec"]["template"]["spec"]
            assert environment(pod["containers"][0], composed)["SHOAL_CHECKPOINTS"].startswith("s3://")
            assert "checkpoints" not in {volume["name"] for volume in pod["volumes"]}

    def test_production_names_both_images_again(self, composed: list[Object]) -> None:
        images = {each.name: each.pod["containers"][0]["image"] for each in workloads(composed)}
        assert len({image.rpartition("/")[0] for image in images.values()}) == 1
        assert images["worker"] == f"{images['server']}-gpu"


class TestDocs:
    """Examples of `docs/how-to/kubernetes.md` and related pages, as far as a program can read them."""

    TEXT = (DOCS / "how-to" / "kubernetes.md").read_text()

    def test_the_adapters_rule_gives_the_metric_that_the_autoscaler_reads(self) -> None:
        [rule] = [yaml.safe_load(block)["externalRules"][0] for block in self.blocks("externalRules")]
        [metric] = named(rendered("overlays/production"), "HorizontalPodAutoscaler", "worker")["spec"]["metrics"]
        assert rule["seriesQuery"].partition("{")[0] == metric["external"]["metric"]["name"]

    def test_the_settings_that_it_names_are_those_that_there_are(self) -> None:
        base = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())
        [there] = base["configMapGenerator"]
        settings = {each.partition("=")[0] for each in there["literals"]}
        blocks = self.blocks("configMapGenerator")
        assert len(blocks) == 2
        for block in blocks:
            [generator] = yaml.safe_load(block)["configMapGenerator"]
            assert (generator["name"], generator["behavior"]) == (there["name"], "merge")
            assert {each.partition("=")[0] for each in generator["literals"]} <= settings

    def test_its_table_has_the_settings_with_their_objects_and_defaults(self) -> None:
        rows = re.findall(r"^\| `(\w+)` \| (\w+ `\w+`) \| (.*) \|$", self.TEXT, re.MULTILINE)
        told = {(place, name): default for name, place, default in rows}
        [shared] = of_kind(rendered("base"), "ConfigMap")
        there = {("ConfigMap `shoal`", name): f"`{value}`" for name, value in shared["data"].items()}
        for each in workloads(rendered("base")):
            for variable in each.pod["containers"][0]["env"]:
                place = (f"{each.kind} `{each.name}`", variable["name"])
                there[place] = f"`{variable['value']}`" if "value" in variable else told.get(place, "")
        there = {
            (place, name): value for (place, name), value in there.items() if not re.match("SHOAL_(POD|SERVICE)", name)
        }
        hosts = ("StatefulSet `coordinator`", "SHOAL_PAGE_HOSTS")
        assert told.pop(hosts) == "the names of the coordinator's service"
        assert there.pop(hosts).startswith("`coordinator,")
        assert told == there

    def test_its_patches_change_production_and_keep_the_rules(self, tmp_path: Path) -> None:
        [lines] = self.blocks("patches")
        objects = self.rendered_with(yaml.safe_load(lines), tmp_path, overlay="production")
        assert schema_errors(objects, OLDEST) == schema_errors(objects, NEWEST) == []
        assert complaints(objects) == []
        pods = {each.name: each.pod for each in workloads(objects)}
        [server], [coordinator] = pods["server"]["containers"], pods["coordinator"]["containers"]
        assert environment(server, objects)["SHOAL_GRACE_PERIOD"] == "180"
        assert server["resources"]["requests"] == {"cpu": "4", "memory": "64Gi"}
        assert server["resources"]["limits"] == {"cpu": "8", "memory": "64Gi"}
        assert coordinator["lifecycle"]["preStop"]["sleep"]["seconds"] == 190
        assert {pods[name]["terminationGracePeriodSeconds"] for name in ("server", "coordinator")} == {210}
        assert named(objects, "HorizontalPodAutoscaler", "worker")["spec"]["maxReplicas"] == 32
        claim = named(objects, "PersistentVolumeClaim", "checkpoints")
        assert claim["spec"]["resources"]["requests"]["storage"] == "2Ti"

    def test_with_its_lines_for_ipv6_nobody_listens_at_ipv4(self, tmp_path: Path) -> None:
        [lines] = [block for block in self.blocks("configMapGenerator") if "[::]" in block]
        objects = self.rendered_with(yaml.safe_load(lines), tmp_path)
        for workload in workloads(objects):
            found = environment(workload.pod["containers"][0], objects)
            assert {found[name].rpartition(":")[0] for name in found if name.endswith("_LISTEN")} == {"[::]"}

    def test_with_its_lines_for_traces_all_reach_the_collector_and_nobody_else(self, tmp_path: Path) -> None:
        text = (DOCS / "how-to" / "tracing.md").read_text()
        [lines] = self.blocks("configMapGenerator", text)
        [policy] = self.blocks("apiVersion", text)
        (tmp_path / "traces.yaml").write_text(policy)
        objects = self.rendered_with(yaml.safe_load(lines), tmp_path)
        assert schema_errors(objects, OLDEST) == schema_errors(objects, NEWEST) == []
        assert complaints(objects) == []
        assert list(network.complaints(objects, network.NEEDED | network.TRACES)) == []
        for workload in workloads(objects):
            told = environment(workload.pod["containers"][0], objects)
            assert tracing.enabling_variable(told)
            assert told["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.observability:4317"

    @pytest.mark.parametrize("components", [[], ["object-store", "gpu"]])
    def test_an_overlay_outside_the_checkout_says_the_image_and_the_class(
        self, components: list[str], tmp_path: Path
    ) -> None:
        [lines] = self.blocks("apiVersion: kustomize")
        mine = yaml.safe_load(lines.replace("../shoal/", f"{os.path.relpath(DOCS.parent, tmp_path)}/"))
        parts = os.path.relpath(KUBERNETES / "components", tmp_path)
        mine["components"] = [f"{parts}/{name}" for name in components]
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(mine))
        objects = render(tmp_path)
        images = {container["image"] for each in workloads(objects) for container in each.containers}
        assert {image.partition(":")[0] for image in images} == {"YOUR-REGISTRY/shoal"}
        claims = of_kind(objects, "PersistentVolumeClaim")
        assert [claim["spec"]["storageClassName"] for claim in claims] == ([] if components else ["YOUR-CLASS"])
        assert complaints(objects) == []

    def test_the_sample_can_be_given_an_image(self) -> None:
        [line] = re.findall(r"^kubectl (set image .*) \| kubectl apply -f -$", self.TEXT, re.MULTILINE)
        kubectl = need("kubectl", source="it changes manifests; Kubernetes' site has it", failing=("SHOAL_E2E", "CI"))
        shown = subprocess.run([kubectl, *line.split()], cwd=DOCS.parent, capture_output=True, text=True, check=True)
        [job] = workloads(read(shown.stdout))
        assert [each["image"].partition(":")[0] for each in job.containers] == ["YOUR-REGISTRY/shoal"]

    def test_its_backup_is_of_the_claims_that_there_are(self) -> None:
        text = (DOCS / "how-to" / "backup.md").read_text()
        snapshots, claim = (read(block) for block in self.blocks("apiVersion", text))
        coordinator = named(rendered("base"), "StatefulSet", "coordinator")
        [template] = coordinator["spec"]["volumeClaimTemplates"]
        store = f"{template['metadata']['name']}-coordinator-0"
        copied = {each["spec"]["source"]["persistentVolumeClaimName"]: each["metadata"]["name"] for each in snapshots}
        assert list(copied) == ["checkpoints", store]
        assert named(rendered("base"), "PersistentVolumeClaim", "checkpoints")
        [again] = claim
        assert schema_errors(claim, OLDEST) == schema_errors(claim, NEWEST) == []
        assert (again["metadata"]["name"], again["spec"].pop("dataSource")["name"]) == (store, copied[store])
        assert again["spec"] == template["spec"]

    def test_an_upgrade_ends_and_starts_all_parts_in_their_order(self) -> None:
        [section] = re.findall(r"## A new version\n(.*?)\n## ", self.TEXT, re.DOTALL)
        before, apply, after = re.split(r"^kubectl (apply -k \S+)$", section, maxsplit=1, flags=re.MULTILINE)
        scaled = r"scale (\w+)/(\w+) --replicas=(\d+)"
        ended = re.findall(scaled, before)
        assert ended == [
            ("statefulset", "server", "0"),
            ("deployment", "worker", "0"),
            ("statefulset", "coordinator", "0"),
        ]
        assert re.findall(r"component=(\w+)", before) == [name for _, name, _ in ended], "each is waited for"
        assert re.findall(rf"{scaled}|status \w+/(\w+)", after) == [
            ("deployment", "worker", "0", ""),
            ("", "", "", "coordinator"),
            ("", "", "", "server"),
            ("deployment", "worker", "1", ""),
        ]
        there = {(each.kind.lower(), each.name) for each in workloads(rendered(apply.rpartition("kubernetes/")[2]))}
        assert there == {(kind, name) for kind, name, _ in ended}

    def test_folders_and_files_that_it_names_are_there(self) -> None:
        root = KUBERNETES.parents[1]
        paths = re.findall(r"(?:apply -[kf] |from-file=)([^\s=-][^\s=]*)(?=\s)", self.TEXT)
        assert paths
        assert [path for path in paths if not (root / path).exists()] == []

    def test_its_certificates_name_their_roles_and_the_hosts_that_are_called(self, tmp_path: Path) -> None:
        [line] = re.findall(r"shoal:\S+ certs init certs (.*?)\nfor", self.TEXT, re.DOTALL)
        hosts = [word for word in shlex.split(line.replace("\\\n", " ")) if word != "--host"]
        make_certificates(tmp_path, hosts)
        for role in ("coordinator", "server", "worker"):
            made = x509.load_pem_x509_certificate((tmp_path / f"{role}.pem").read_bytes())
            names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            given = names.get_values_for_type(x509.DNSName)
            called = manifest_tls.called(role, rendered("overlays/local"))
            assert [host for host in called if not any(manifest_tls.covers(name, host) for name in given)] == []

    def test_its_secrets_are_those_that_the_pods_and_prometheus_mount(self) -> None:
        [roles] = re.findall(r"^for role in (.*); do kubectl -n shoal create secret", self.TEXT, re.MULTILINE)
        made = {f"{role}-tls" for role in roles.split()}
        table = set(re.findall(r"^\| `(\S+-tls)` \|", self.TEXT, re.MULTILINE))
        issued = {each["spec"]["secretName"] for each in of_kind(rendered("overlays/production"), "Certificate")}
        assert made == table == issued - {"shoal-ca"}

    def test_its_policies_allow_the_certificates_that_there_are_and_no_admins(self) -> None:
        [block] = self.blocks("apiVersion: policy")
        policies = [each["spec"] for each in yaml.safe_load_all(block) if each["kind"] == "CertificateRequestPolicy"]
        allowed = {policy["selector"]["issuerRef"]["name"]: policy["allowed"] for policy in policies}
        for certificate in of_kind(rendered("overlays/production"), "Certificate"):
            asked = certificate["spec"]
            policy = allowed[asked["issuerRef"]["name"]]
            assert policy["commonName"]["value"] in ("*", asked["commonName"])
            assert asked.get("isCA", False) == policy.get("isCA", False)
            assert {*asked.get("usages", ())} <= {*policy["usages"]}
            for names in ("dnsNames", "ipAddresses", "uris"):
                values = policy.get(names, {}).get("values", [])
                assert values == ["*"] or {*asked.get(names, ())} <= {*values}
        assert "spiffe://shoal/admin" not in allowed["shoal"]["uris"]["values"]

    def test_its_table_of_overlays_has_all_of_them(self) -> None:
        [section] = re.findall(r"^(# .*?)\n## ", self.TEXT, re.DOTALL)
        assert {
            f"overlays/{name}" for name in re.findall(r"^\| `(\w+)` ", section, re.MULTILINE)
        } == OVERLAYS.keys() - {"base"}

    def blocks(self, beginning: str, text: str = TEXT) -> list[str]:
        return [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith(beginning)]

    def rendered_with(self, lines: Object, folder: Path, overlay: str = "local") -> list[Object]:
        """Returns an overlay with lines of a user's own overlay."""
        base = os.path.relpath(KUBERNETES / "overlays" / overlay, folder)
        lines = {**lines, "namespace": "shoal", "resources": [base, *lines.get("resources", [])]}
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(lines))
        return render(folder)


class TestSample:
    def test_is_valid(self, sample: list[Object]) -> None:
        assert schema_errors(sample, NEWEST) == schema_errors(sample, OLDEST) == []

    def test_keeps_the_rules(self, sample: list[Object]) -> None:
        assert complaints([*rendered("base"), *sample]) == []

    def test_may_reach_what_it_calls(self, sample: list[Object]) -> None:
        [client] = [peer for peer in network.MEMBERS if peer.name == "client"]
        [job] = workloads(sample)
        assert job.labels == client.labels
