"""Rules for the manifests of JobSet and Kubeflow Trainer, and the check against the schemas of these projects.

The schemas are those of the package kubeflow-trainer-api, which Trainer publishes; they include JobSet's. The package
has no lists of allowed values, so `VALUES` has those of the fields that the manifests use.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema
from kubeflow_trainer_api import models

from support.deployment import manifest_rules, manifest_tls
from support.deployment.job_sets import ANCESTOR, Pod, by_roles, job_set, jobs, pods, submission
from support.deployment.manifests import Object, of_kind

Rule = Callable[[Sequence[Object]], Iterator[str]]

VALUES = {
    "operator": {"All", "Any", "In", "NotIn"},
    "whenDeleted": {"Delete", "Retain"},
    "restartPolicy": {"OnFailure", "Never"},
}
_MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
_VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
}
# Types for which the package has classes that JSON Schema cannot describe.
_UNIONS = {
    "IoK8sApimachineryPkgUtilIntstrIntOrString": ["integer", "string"],
    "IoK8sApimachineryPkgApiResourceQuantity": ["number", "string"],
}
_MEMBERS = {"coordinator", "server", "worker"}
_LONGEST = 63  # characters of a label of DNS, and so of a pod's host name
_SUFFIX = len("-abcde")  # of a pod's name
_NO_LIMIT = 2**31 - 1
_POD_RULES = (
    *(manifest_rules.security, manifest_rules.resources, manifest_rules.volumes, manifest_rules.ports),
    *(manifest_rules.command_lines, manifest_rules.probes, manifest_rules.endings, manifest_tls.keys),
)


def schema_errors(objects: Sequence[Object], version: str) -> list[str]:
    """Returns the errors of objects, and of the Jobs that are made of them.

    Args:
        objects: JobSets, TrainJobs and their runtimes.
        version: that of Kubernetes' schema, for the Jobs.
    """
    errors = []
    for found in objects:
        kind, name = found["kind"], found["metadata"]["name"]
        if found["apiVersion"] != _VERSIONS[kind]:
            errors.append(f"{kind} {name}: the version {found['apiVersion']} is not {_VERSIONS[kind]}")
        for error in jsonschema.Draft202012Validator(_schema(kind)).iter_errors(found):
            errors.append(f"{kind} {name}: {_deepest(error)}")
    return errors or manifest_rules.schema_errors(jobs(job_set(objects)), version)


def values(objects: Sequence[Object]) -> Iterator[str]:
    """Fields with a list of allowed values have one of them."""
    for found in objects:
        for name, value in _fields(found["spec"]):
            if name in VALUES and value not in VALUES[name]:
                yield f"{found['kind']}: {name} is {value}"


def patches(objects: Sequence[Object]) -> Iterator[str]:
    """Trainer accepts the runtime, and the TrainJob changes what is there."""
    for runtime in of_kind(objects, "ClusterTrainingRuntime"):
        there = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        names = {each["name"]: _container_names(each) for each in there}
        trainers = [each for each in there if _labels(each).get(ANCESTOR) == "trainer"]
        if [(each.get("replicas", 1), _container_names(each)) for each in trainers] != [(1, ["node"])]:
            yield f"numNodes changes {[each['name'] for each in trainers]}, and not one job with one container `node`"
        for train_job in of_kind(objects, "TrainJob"):
            for patch in train_job["spec"].get("runtimePatches", []):
                for each in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                    missing = {*_container_names(each)} - {*names.get(each["name"], [])}
                    if missing or each["name"] not in names:
                        yield f"a patch changes {each['name']} {sorted(missing)}, which is not there"
                    elif "node" in _container_names(each):
                        yield "Trainer refuses variables for `node` in a patch"


def names(objects: Sequence[Object]) -> Iterator[str]:
    """All pods have DNS names that fit, know their own, and find the coordinator by its own."""
    found = [*pods(job_set(objects))]
    coordinators = {f"{pod.dns_name}:7070" for pod in found if pod.component == "coordinator"}
    if len(coordinators) != 1:
        yield f"there are {len(coordinators)} coordinators"
    for pod in found:
        if not pod.dns_name:
            yield f"{pod.host} has no DNS name"
        if len(pod.host) + _SUFFIX > _LONGEST:
            yield f"the name {pod.host} is too long"
        told = pod.variables
        own = f"{told.get('SHOAL_POD_NAME')}.{told.get('SHOAL_SERVICE')}"
        if pod.component in _MEMBERS and own != pod.dns_name:
            yield f"{pod.dns_name} takes itself for {own}"
        # The coordinator's own address is for commands in its container.
        expected = {"localhost:7070"} if pod.component == "coordinator" else coordinators
        if told["SHOAL_COORDINATOR"] not in expected:
            yield f"{pod.host} looks for the coordinator at {told['SHOAL_COORDINATOR']}"


def ends(objects: Sequence[Object]) -> Iterator[str]:
    """The JobSet ends with the pod that submits. Members come back, and a failed job is not tried again."""
    found = job_set(objects)
    components = {each["name"]: _pod_labels(each)["app.kubernetes.io/component"] for each in _replicated(found)}
    targets = found["spec"].get("successPolicy", {}).get("targetReplicatedJobs", list(components))
    if [components.get(each) for each in targets] != ["client"]:
        yield f"the JobSet ends when {targets} have ended"
    for each in _replicated(found):
        name, spec = each["name"], each["template"]["spec"]
        if components[name] in _MEMBERS and spec.get("backoffLimit") != _NO_LIMIT:
            yield f"{name}: the JobSet fails after {spec.get('backoffLimit', 6)} lost pods"
        if components[name] in {"coordinator", "server"} and spec.get("podReplacementPolicy") != "Failed":
            yield f"{name}: two pods can have one name"
        rules = spec.get("podFailurePolicy", {}).get("rules", [])
        fails = [rule["onExitCodes"]["values"] for rule in rules if rule["action"] == "FailJob"]
        if components[name] == "client" and fails != [[2, 7]]:
            yield f"{name}: the JobSet fails with the exit codes {fails}"
        if components[name] in _MEMBERS and "exit 143" not in " ".join(_containers(each)[0].get("command", [])):
            yield f"{name}: a pod that is asked to stop counts as completed"


def stores(objects: Sequence[Object]) -> Iterator[str]:
    """Each cluster has a store and a folder of checkpoints of its own. The store is deleted with it."""
    found = job_set(objects)
    own = {
        template["metadata"]["name"]: policy["retentionPolicy"]["whenDeleted"]
        for policy in found["spec"].get("volumeClaimPolicies", [])
        for template in policy["templates"]
    }
    if own != {"store": "Delete"}:
        yield f"the cluster has the volumes {own}"
    for pod in pods(found):
        if pod.component in {"coordinator", "server"} and pod.checkpoints != found["metadata"]["name"]:
            yield f"{pod.host} shares the checkpoints in the folder {pod.checkpoints!r} with other clusters"


def submissions(objects: Sequence[Object]) -> Iterator[str]:
    """The job can be submitted again, its name is that of the cluster, and there are enough workers for it."""
    found = job_set(objects)
    everyone = [*pods(found)]
    [client] = [pod for pod in everyone if pod.component == "client"]
    arguments = submission(client)
    if arguments[-5:] != ["--name", found["metadata"]["name"], "--from", "auto", "--follow"]:
        yield f"the job is submitted with {arguments}"
    [asked] = [int(each.partition("=")[2]) for each in arguments if each.startswith("--workers=")] or [1]
    if asked > (there := sum(pod.component == "worker" for pod in everyone)):
        yield f"the job waits for {asked} workers, and there are {there}"


def pod_rules(objects: Sequence[Object]) -> Iterator[str]:
    """The pods keep the rules of all our manifests: the profile `restricted`, resources, volumes, ports, secrets."""
    roles = by_roles(job_set(objects))
    for rule in _POD_RULES:
        yield from rule(roles)


RULES: list[Rule] = [values, patches, names, ends, stores, submissions, pod_rules]


def complaints(objects: Sequence[Object]) -> list[str]:
    """Returns the complaints of the rules. Those after the patches need objects that Trainer accepts."""
    early = [complaint for rule in RULES[:2] for complaint in rule(objects)]
    return early or [complaint for rule in RULES[2:] for complaint in rule(objects)]


def same_pods(one: Pod, other: Pod) -> bool:
    """Returns whether two pods differ only in the name of their container and in what a user sets."""
    first, second = ({**pod.container, "name": "", "env": _shared(pod)} for pod in (one, other))
    return first == second


def _shared(pod: Pod) -> list[Object]:
    """Returns the variables of a pod without the names of its engine's objects."""
    own = {"JOBSET", "JOB", "INDEX", "SUBMIT"}
    return [each for each in pod.container["env"] if each["name"] not in own]


@cache
def _schema(kind: str) -> Object:
    found: Object = _MODELS[kind].model_json_schema(by_alias=True)
    found["$defs"] |= {name: {"type": types} for name, types in _UNIONS.items() if name in found["$defs"]}
    for each in (found, *found["$defs"].values()):
        if "properties" in each:
            each["additionalProperties"] = False
    return found


def _deepest(error: jsonschema.ValidationError) -> str:
    """Returns the message of the field that is wrong. The fields around it are alternatives to null."""
    while error.context:
        error = max(error.context, key=lambda each: len(each.absolute_path))
    return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"


def _fields(found: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(found, list):
        for each in found:
            yield from _fields(each)
    elif isinstance(found, dict):
        for name, value in found.items():
            yield name, value
            yield from _fields(value)


def _replicated(found: Object) -> list[Object]:
    return list(found["spec"]["replicatedJobs"])


def _labels(replicated_job: Object) -> Object:
    return dict(replicated_job["template"].get("metadata", {}).get("labels", {}))


def _pod_labels(replicated_job: Object) -> Object:
    return dict(replicated_job["template"]["spec"]["template"]["metadata"]["labels"])


def _containers(replicated_job: Object) -> list[Object]:
    return list(replicated_job["template"]["spec"]["template"]["spec"]["containers"])


def _container_names(replicated_job: Object) -> list[str]:
    return [each["name"] for each in _containers(replicated_job)]
