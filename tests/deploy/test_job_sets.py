"""Manifests for JobSet and Kubeflow Trainer: valid, safe, and their roles find each other. No cluster runs here.

`job_sets` computes the Jobs and pods that the two projects make of the manifests. `job_set_rules` has the rules.
"""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.deployment import manifest_network as network
from support.deployment.job_set_rules import RULES, complaints, same_pods, schema_errors
from support.deployment.job_sets import FOLDER, NAMESPACE, Pod, job_set, manifests, pods, submission
from support.deployment.manifest_rules import NEWEST, OLDEST
from support.deployment.manifest_rules import schema_errors as kubernetes_errors
from support.deployment.manifests import KUBERNETES, Object, named, of_kind, rendered

KINDS = ("JobSet", "TrainJob")
Change = Callable[[list[Object]], object]

ROOT = KUBERNETES.parents[1]
TEXT = (ROOT / "docs" / "how-to" / "kubeflow.md").read_text()


def replicated(objects: list[Object], name: str) -> Any:
    """Returns a replicated job of a JobSet or a runtime, to be changed."""
    spec = objects[0]["spec"]
    spec = spec if "replicatedJobs" in spec else spec["template"]["spec"]
    [found] = [each for each in spec["replicatedJobs"] if each["name"] == name]
    return found


def pod_spec(objects: list[Object], name: str = "servers") -> Any:
    return replicated(objects, name)["template"]["spec"]["template"]["spec"]


def container(objects: list[Object], name: str = "servers") -> Any:
    return pod_spec(objects, name)["containers"][0]


def variable(objects: list[Object], name: str, value: str, of: str = "servers") -> None:
    env = container(objects, of)["env"]
    env[:] = [each for each in env if each["name"] != name] + [{"name": name, "value": value}]


def client(objects: list[Object]) -> Pod:
    [found] = [pod for pod in pods(job_set(objects)) if pod.component == "client"]
    return found


def patched(objects: list[Object]) -> Any:
    """Returns the replicated job that the patch of the TrainJob changes."""
    [patch] = objects[1]["spec"]["runtimePatches"]
    [found] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return found


class TestManifests:
    @pytest.mark.parametrize("version", [OLDEST, NEWEST])
    @pytest.mark.parametrize("kind", KINDS)
    def test_are_valid(self, kind: str, version: str) -> None:
        assert schema_errors(manifests(kind), version) == []

    @pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
    @pytest.mark.parametrize("kind", KINDS)
    def test_keep_the_rules(self, kind: str, rule: Any) -> None:
        assert list(rule(manifests(kind))) == []

    def test_are_one_of_each_kind(self) -> None:
        kinds = [each["kind"] for kind in KINDS for each in manifests(kind)]
        assert sorted(kinds) == ["ClusterTrainingRuntime", "JobSet", "TrainJob"]

    def test_make_the_same_pods(self) -> None:
        one, other = ([*pods(job_set(manifests(kind)))] for kind in KINDS)
        assert len(one) == len(other) == 6
        assert [pod.host for pod, twin in zip(one, other, strict=True) if not same_pods(pod, twin)] == []

    @pytest.mark.parametrize(
        ("kind", "workers"), [("JobSet", "digits-workers-0-{}.digits"), ("TrainJob", "digits-node-0-{}.digits")]
    )
    def test_give_the_documented_names(self, kind: str, workers: str) -> None:
        assert {pod.dns_name for pod in pods(job_set(manifests(kind)))} == {
            "digits-coordinator-0-0.digits",
            "digits-servers-0-0.digits",
            "digits-servers-0-1.digits",
            workers.format(0),
            workers.format(1),
            "digits-submit-0-0.digits",
        }

    def test_two_clusters_of_a_namespace_share_only_the_claim(self) -> None:
        first, second = manifests("JobSet"), manifests("JobSet")
        second[0]["metadata"]["name"] = "other"
        assert complaints(second) == []
        names, others = ({pod.dns_name for pod in pods(job_set(each))} for each in (first, second))
        assert not names & others
        mounted = [{pod.checkpoints for pod in pods(job_set(each))} for each in (first, second)]
        assert mounted == [{"", "digits"}, {"", "other"}]

    def test_a_train_job_sets_the_workers_and_what_they_do(self) -> None:
        objects = manifests("TrainJob")
        objects[1]["spec"]["trainer"] = {"numNodes": 5, "env": [{"name": "SHOAL_DEVICE", "value": "cuda:0"}]}
        assert schema_errors(objects, NEWEST) == complaints(objects) == []
        workers = [pod for pod in pods(job_set(objects)) if pod.component == "worker"]
        assert [pod.variables["SHOAL_DEVICE"] for pod in workers] == ["cuda:0"] * 5
        assert submission(client(objects)) == submission(client(manifests("JobSet")))

    def test_a_client_can_have_a_token_from_a_secret(self) -> None:
        """With the lines of the page."""
        [block] = re.findall(r"```yaml\n(env:\n.*?)```", TEXT, re.DOTALL)
        added, objects = yaml.safe_load(block), manifests("JobSet")
        found = container(objects, "submit")
        [source] = added["volumes"]
        pod_spec(objects, "submit")["volumes"].append(source)
        found["volumeMounts"] += added["volumeMounts"]
        found["env"] += added["env"]
        assert schema_errors(objects, NEWEST) == []
        file = client(objects).variables["SHOAL_TOKEN_FILE"]
        [mount] = added["volumeMounts"]
        assert (mount["name"], mount["readOnly"]) == (source["name"], True)
        assert Path(file).parent == Path(mount["mountPath"])


# What goes wrong, the manifests, a change to them that causes it, and the complaint.
BROKEN: list[tuple[str, str, Change, str]] = [
    ("nobody finds the coordinator", "JobSet", lambda o: replicated(o, "coordinator").update(name="boss"), "looks for"),
    (
        "names are in another domain",
        "JobSet",
        lambda o: o[0]["spec"].update(network={"subdomain": "shoal"}),
        "digits-servers-0-0.shoal takes itself for digits-servers-0-0.digits",
    ),
    (
        "pods have no names",
        "JobSet",
        lambda o: o[0]["spec"].update(network={"enableDNSHostnames": False}),
        "digits-servers-0-0 has no DNS name",
    ),
    (
        "a replacement has another name",
        "JobSet",
        lambda o: variable(o, "SHOAL_POD_NAME", "server"),
        "digits-servers-0-1.digits takes itself for server.digits",
    ),
    ("a name is too long", "JobSet", lambda o: o[0]["metadata"].update(name="x" * 42), "is too long"),
    (
        "two coordinators form two clusters",
        "JobSet",
        lambda o: replicated(o, "coordinator")["template"]["spec"].update(completions=2, parallelism=2),
        "there are 2 coordinators",
    ),
    (
        "two pods of one name run",
        "JobSet",
        lambda o: replicated(o, "coordinator")["template"]["spec"].pop("podReplacementPolicy"),
        "coordinator: two pods can have one name",
    ),
    (
        "the JobSet never ends",
        "TrainJob",
        lambda o: o[0]["spec"]["template"]["spec"].pop("successPolicy"),
        "the JobSet ends when ['coordinator', 'servers', 'node', 'submit'] have ended",
    ),
    (
        "lost pods fail the JobSet",
        "JobSet",
        lambda o: replicated(o, "workers")["template"]["spec"].update(backoffLimit=6),
        "workers: the JobSet fails after 6 lost pods",
    ),
    (
        "a drained node takes a server away for good",
        "JobSet",
        lambda o: container(o).pop("command"),
        "servers: a pod that is asked to stop counts as completed",
    ),
    (
        "a failed job is tried again",
        "JobSet",
        lambda o: replicated(o, "submit")["template"]["spec"].pop("podFailurePolicy"),
        "submit: the JobSet fails with the exit codes []",
    ),
    (
        "two clusters remove each other's checkpoints",
        "JobSet",
        lambda o: container(o)["volumeMounts"][1].pop("subPathExpr"),
        "shares the checkpoints",
    ),
    (
        "an old store makes the job one that has ended",
        "JobSet",
        lambda o: o[0]["spec"]["volumeClaimPolicies"][0]["retentionPolicy"].update(whenDeleted="Retain"),
        "the cluster has the volumes {'store': 'Retain'}",
    ),
    (
        "JobSet refuses a value",
        "JobSet",
        lambda o: o[0]["spec"]["successPolicy"].update(operator="Each"),
        "operator is Each",
    ),
    (
        "the job waits for workers",
        "TrainJob",
        lambda o: o[1]["spec"]["trainer"].update(numNodes=1),
        "the job waits for 2 workers, and there are 1",
    ),
    ("nothing is submitted", "TrainJob", lambda o: o[1]["spec"].pop("runtimePatches"), "Missing parameter: program"),
    (
        "Trainer refuses the runtime",
        "TrainJob",
        lambda o: container(o, "node").update(name="worker"),
        "not one job with one container `node`",
    ),
    (
        "numNodes has no effect",
        "TrainJob",
        lambda o: replicated(o, "node")["template"].pop("metadata"),
        "numNodes changes []",
    ),
    (
        "Trainer refuses a patch of a job that is not there",
        "TrainJob",
        lambda o: patched(o).update(name="client"),
        "a patch changes client ['submit'], which is not there",
    ),
    (
        "a server holds the key of the coordinator",
        "JobSet",
        lambda o: pod_spec(o)["volumes"][0]["secret"].update(secretName="coordinator-tls"),
        "mounts the secrets",
    ),
    (
        "the namespace refuses a pod",
        "TrainJob",
        lambda o: container(o, "node")["securityContext"].update(privileged=True),
        "has the securityContext",
    ),
    (
        "a pod waits for a claim that nobody makes",
        "JobSet",
        lambda o: o[0]["spec"].pop("volumeClaimPolicies"),
        "volume store is not there",
    ),
    (
        "a misspelled variable has no effect",
        "JobSet",
        lambda o: variable(o, "SHOAL_RETRY", "9"),
        "does not read SHOAL_RETRY",
    ),
    (
        "an option of the submission is wrong",
        "JobSet",
        lambda o: variable(o, "SUBMIT", "digits:Digits --worker=2", "submit"),
        "No such option",
    ),
]


@pytest.mark.parametrize(
    ("kind", "change", "complaint"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_the_rules_find(kind: str, change: Change, complaint: str) -> None:
    objects = manifests(kind)
    change(objects)
    found = complaints(objects)
    assert any(complaint in each for each in found), found


@pytest.mark.parametrize(
    ("kind", "change", "error"),
    [
        ("JobSet", lambda o: o[0]["spec"].update(replicatedJob=[]), "JobSet digits: spec: "),
        ("JobSet", lambda o: o[0]["spec"]["successPolicy"].pop("operator"), "'operator' is a required property"),
        ("JobSet", lambda o: o[0].update(apiVersion="jobset.x-k8s.io/v1"), "the version jobset.x-k8s.io/v1 is not"),
        ("JobSet", lambda o: container(o).update(probe={}), "'probe' was unexpected"),
        ("TrainJob", lambda o: o[0]["spec"].update(mlPolicy={"nodes": 2}), "'nodes' was unexpected"),
        ("TrainJob", lambda o: o[1]["spec"]["trainer"].update(numNodes="two"), "trainer.numNodes: 'two'"),
        ("TrainJob", lambda o: o[1]["spec"].update(podTemplateOverrides=[]), "'podTemplateOverrides' was unexpected"),
        ("TrainJob", lambda o: patched(o).update(replicas=2), "'replicas' was unexpected"),
    ],
)
def test_the_schemas_refuse(kind: str, change: Change, error: str) -> None:
    objects = manifests(kind)
    change(objects)
    found = schema_errors(objects, NEWEST)
    assert any(error in each for each in found), found


def test_the_oldest_kubernetes_refuses_a_newer_field_in_a_pod() -> None:
    objects = manifests("TrainJob")
    pod_spec(objects, "node").update(hostnameOverride="node")
    assert schema_errors(objects, NEWEST) == []
    [error] = schema_errors(objects, OLDEST)
    assert error.startswith("Job digits-node-0: ")


class TestNamespace:
    def test_is_valid_and_restricted(self) -> None:
        objects = rendered("jobs")
        assert kubernetes_errors(objects, OLDEST) == kubernetes_errors(objects, NEWEST) == []
        labels = named(objects, "Namespace", NAMESPACE)["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"

    @pytest.mark.parametrize("kind", KINDS)
    def test_lets_through_what_is_needed_and_no_more(self, kind: str) -> None:
        assert list(network.complaints(rendered("jobs"), network.NEEDED)) == []
        members = {peer.name: peer.labels for peer in network.MEMBERS}
        for job in job_set(manifests(kind))["spec"]["replicatedJobs"]:
            labels = job["template"]["spec"]["template"]["metadata"]["labels"]
            assert labels == members[labels["app.kubernetes.io/component"]]


class TestScripts:
    """The shell commands of the containers, with a program in place of `shoal`."""

    def test_a_member_that_is_asked_to_stop_ends_as_failed(self, tmp_path: Path) -> None:
        shoal = 'trap "echo stopped; exit 0" TERM; echo "$@"; while :; do sleep 0.1; done'
        with self.running("coordinator", shoal, tmp_path) as process:
            assert process.stdout
            assert process.stdout.readline() == "coordinator\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stopped\n"
            assert process.wait(30) == 143

    @pytest.mark.parametrize("code", [0, 1, 3])
    def test_a_member_that_ends_by_itself_keeps_its_exit_code(self, code: int, tmp_path: Path) -> None:
        with self.running("servers", f"exit {code}", tmp_path) as process:
            assert process.wait(30) == code

    @pytest.mark.parametrize(
        ("waited", "submitted", "code"),
        [(4, 0, 0), (4, 1, 1), (4, 2, 2), (4, 3, 3), (4, 5, 5), (0, 9, 0), (1, 9, 1), (3, 9, 3)],
    )
    def test_the_client_waits_for_the_job_or_submits_it(
        self, waited: int, submitted: int, code: int, tmp_path: Path
    ) -> None:
        shoal = f'echo "$@"; [ "$1" = submit ] && exit {submitted}; exit {waited}'
        options = "digits:Digits --optimizer=adam:group=*|lr=1"
        environment = {"JOBSET": "digits", "SUBMIT": options}
        with self.running("submit", shoal, tmp_path, environment) as process:
            assert process.stdout
            lines = process.stdout.read().splitlines()
            submission = [f"submit {options} --name digits --from auto --follow"]
            assert lines == ["wait digits", *(submission if waited == 4 else [])]
            assert process.wait(30) == code

    def running(
        self, name: str, shoal: str, folder: Path, environment: dict[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Starts the command of a container with a script as the program `shoal`."""
        program = folder / "shoal"
        program.write_text(f"#!/bin/sh\n{shoal}\n")
        program.chmod(0o755)
        found = container(manifests("JobSet"), name)
        path = f"{folder}:{os.environ['PATH']}"
        variables = {"PATH": path, **(environment or {})}
        command = [each.replace("/tmp/", f"{folder}/") for each in (*found["command"], *found.get("args", []))]
        return subprocess.Popen(command, env=variables, cwd=folder, stdout=subprocess.PIPE, text=True)


class TestDocs:
    """What docs/how-to/kubeflow.md says, as far as a program can read it."""

    def test_its_secrets_are_those_that_the_pods_mount(self) -> None:
        [roles] = re.findall(r"^for role in (.*); do kubectl -n shoal-jobs create secret", TEXT, re.MULTILINE)
        mounted = {
            volume["secret"]["secretName"]
            for each in manifests("JobSet")[0]["spec"]["replicatedJobs"]
            for volume in each["template"]["spec"]["template"]["spec"]["volumes"]
            if "secret" in volume
        }
        assert {f"{role}-tls" for role in roles.split()} == mounted

    def test_files_and_objects_that_it_names_are_there(self) -> None:
        paths = re.findall(r"(?:apply -[kf] |from-file=)([^\s=-][^\s=]*)(?=\s)", TEXT)
        assert paths
        assert [path for path in paths if not (ROOT / path).exists()] == []
        jobs = {f"job/{pod.host[:-2]}" for kind in KINDS for pod in pods(job_set(manifests(kind)))}
        told = set(re.findall(r"job/[a-z0-9-]+", TEXT))
        assert told
        assert told <= jobs

    def test_the_names_of_its_jobs_are_in_the_comments_of_the_manifests(self) -> None:
        for name in ("jobset.yaml", "train-job.yaml"):
            assert "logs --follow job/digits-submit-0" in (FOLDER / name).read_text()

    def test_the_claim_of_the_store_is_the_one_that_it_names(self) -> None:
        [policy] = of_kind(manifests("JobSet"), "JobSet")[0]["spec"]["volumeClaimPolicies"]
        [template] = policy["templates"]
        assert f"pvc/{template['metadata']['name']}-digits" in TEXT
