"""Simulation of JobSet and Kubeflow Trainer: the Jobs and claims that they create from a JobSet or a TrainJob.

It follows their documented rules for names, labels and patches, as far as Shoal's manifests use them.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from support.deployment.manifests import KUBERNETES, Object, environment, named, of_kind, read, rendered

FOLDER = KUBERNETES / "jobs"
NAMESPACE = "shoal-jobs"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"

_COMPONENT = "app.kubernetes.io/component"
_REFERENCE = re.compile(r"\$\((\w+)\)")
_LABEL = re.compile(r"metadata\.labels\['(.*)'\]")
# Variables that only other variables and the commands of the containers use.
_HELPERS = {"JOBSET", "JOB", "INDEX", "SUBMIT"}


@dataclass(frozen=True)
class Pod:
    """A pod of an Indexed Job.

    Attributes:
        host: its host name, which stays the same when the pod is replaced.
        subdomain: the headless service under which its host name is known. Empty if it has no DNS name.
        component: Shoal's label for it: coordinator, server, worker or client.
        container: its container, whose references to labels are replaced by their values.
    """

    host: str
    subdomain: str
    component: str
    container: Object

    @property
    def dns_name(self) -> str:
        return f"{self.host}.{self.subdomain}" if self.subdomain else ""

    @property
    def checkpoints(self) -> str:
        """The folder of the claim `checkpoints` that it mounts."""
        [mount] = [each for each in self.container["volumeMounts"] if each["name"] == "checkpoints"] or [{}]
        return _REFERENCE.sub(lambda name: self.variables[name[1]], mount.get("subPathExpr", ""))

    @property
    def variables(self) -> Mapping[str, str]:
        return environment(self.container, [])


def manifests(kind: str) -> list[Object]:
    """Returns a user's objects: a JobSet, or a TrainJob with its runtime."""
    files = {"JobSet": ["jobset.yaml"], "TrainJob": ["training-runtime.yaml", "train-job.yaml"]}[kind]
    return [found for name in files for found in read((FOLDER / name).read_text())]


def job_set(objects: Sequence[Object]) -> Object:
    """Returns the JobSet among some objects, or the one that Trainer makes of their TrainJob and its runtime."""
    if found := of_kind(objects, "JobSet"):
        return copy.deepcopy(found[0])
    [train_job] = of_kind(objects, "TrainJob")
    reference = train_job["spec"]["runtimeRef"]
    runtime = named(objects, reference["kind"], reference["name"])["spec"]
    spec = copy.deepcopy(runtime["template"]["spec"])
    for patch in train_job["spec"].get("runtimePatches", []):
        for each in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
            pod = _pod(_replicated_job(spec, each["name"]))
            for container in _pod(each)["containers"]:
                [changed] = [one for one in pod["containers"] if one["name"] == container["name"]]
                _merge(changed["env"], container["env"])
    trainer = train_job["spec"].get("trainer", {})
    for job in spec["replicatedJobs"]:
        if job["template"].get("metadata", {}).get("labels", {}).get(ANCESTOR) == "trainer":
            count = trainer.get("numNodes", runtime["mlPolicy"]["numNodes"])
            job["template"]["spec"].update(parallelism=count, completions=count)
            for container in _pod(job)["containers"]:
                _merge(container["env"], trainer.get("env", []))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": train_job["metadata"]["name"]},
        "spec": spec,
    }


def jobs(found: Object) -> list[Object]:
    """Returns the Jobs and the claims that JobSet creates for a JobSet."""
    name, spec = found["metadata"]["name"], found["spec"]
    network = spec.get("network", {})
    subdomain = network.get("subdomain", name) if network.get("enableDNSHostnames", True) else ""
    templates = [each for policy in spec.get("volumeClaimPolicies", []) for each in policy["templates"]]
    created = []
    for replicated in spec["replicatedJobs"]:
        for index in range(replicated.get("replicas", 1)):
            job = copy.deepcopy(replicated["template"])
            own = f"{name}-{replicated['name']}-{index}"
            job |= {"apiVersion": "batch/v1", "kind": "Job"}
            job["metadata"] = {**job.get("metadata", {}), "name": own, "namespace": NAMESPACE}
            job["spec"].setdefault("completionMode", "Indexed")
            pods = job["spec"]["template"]
            pods["metadata"]["labels"] |= {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                "jobset.sigs.k8s.io/job-index": str(index),
            }
            if subdomain:
                pods["spec"]["subdomain"] = subdomain
            mounted = {mount["name"] for each in pods["spec"]["containers"] for mount in each["volumeMounts"]}
            pods["spec"]["volumes"] += [
                {"name": each, "persistentVolumeClaim": {"claimName": f"{each}-{name}"}}
                for each in (template["metadata"]["name"] for template in templates)
                if each in mounted
            ]
            created.append(job)
    return [*created, *(_claim(each, name) for each in templates)]


def pods(found: Object) -> Iterator[Pod]:
    """Yields the pods of all Jobs of a JobSet. The Job controller sets their host names and two labels."""
    for job in of_kind(jobs(found), "Job"):
        template = job["spec"]["template"]
        for index in range(job["spec"].get("completions", 1)):
            own = job["metadata"]["name"]
            labels = {
                **template["metadata"]["labels"],
                "batch.kubernetes.io/job-name": own,
                "batch.kubernetes.io/job-completion-index": str(index),
            }
            [container] = copy.deepcopy(template["spec"]["containers"])
            for variable in container["env"]:
                path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                if label := _LABEL.fullmatch(path):
                    variable["value"] = labels[label[1]]
                    del variable["valueFrom"]
            yield Pod(f"{own}-{index}", template["spec"].get("subdomain", ""), labels[_COMPONENT], container)


def by_roles(found: Object) -> list[Object]:
    """Returns the Jobs and claims of a JobSet for `manifest_rules`, with the objects of their namespace.

    Each Job has the name of its component and the variables of its first pod. The arguments of a client are those that
    its shell passes to `shoal`.
    """
    objects = jobs(found)
    first: dict[str, Pod] = {}
    for pod in pods(found):
        first.setdefault(pod.component, pod)
    for job in of_kind(objects, "Job"):
        component = job["spec"]["template"]["metadata"]["labels"][_COMPONENT]
        pod = first[component]
        container = copy.deepcopy(pod.container)
        if component == "client":
            container["args"] = submission(pod)
        resolved = pod.variables
        container["env"] = [
            {"name": each["name"], "value": resolved[each["name"]]}
            for each in container["env"]
            if each["name"] not in _HELPERS
        ]
        job["metadata"]["name"] = component
        job["spec"]["template"]["spec"]["containers"] = [container]
    return [*rendered("jobs"), *objects]


def submission(pod: Pod) -> list[str]:
    """Returns the arguments of `shoal submit` in the script of a client."""
    [_, _, script] = pod.container["command"]
    [line] = re.findall(r"^ *exec shoal (submit .*)$", script, re.MULTILINE)
    variables = pod.variables
    words = line.replace('"', "").split()
    replaced = [variables[word[1:]].split() if word.startswith("$") else [word] for word in words]
    return [word for some in replaced for word in some]


def _replicated_job(spec: Object, name: str) -> Object:
    [found] = [each for each in spec["replicatedJobs"] if each["name"] == name]
    return dict(found)


def _pod(replicated_job: Object) -> Object:
    return dict(replicated_job["template"]["spec"]["template"]["spec"])


def _merge(variables: list[Object], added: Sequence[Object]) -> None:
    """Replaces or appends variables by their names."""
    for each in added:
        places = [place for place, old in enumerate(variables) if old["name"] == each["name"]]
        variables[slice(places[0], places[0] + 1) if places else slice(len(variables), None)] = [dict(each)]


def _claim(template: Object, name: str) -> Object:
    metadata = {"name": f"{template['metadata']['name']}-{name}", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": template["spec"]}
