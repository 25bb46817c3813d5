"""Kubernetes manifests for tests: rendered by kubectl and parsed."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.deployment.needed_programs import need

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"

Object = dict[str, Any]
# Yields the complaints about some objects.
Rule = Callable[[Sequence[Object]], Iterator[str]]

_SUFFIXES = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
# Values of fields that a pod's environment refers to.
_FIELDS = {
    "metadata.name": "pod-0",
    "metadata.namespace": "shoal",
    "spec.nodeName": "ip-10-0-0-4.compute.internal",
    "status.podIP": "10.0.0.7",
    "limits.cpu": "4",
}
# A variable that stands before it in the list; another one is left as it is.
_REFERENCE = re.compile(r"\$\((\w+)\)")


@dataclass(frozen=True)
class Workload:
    """An object that creates pods: a StatefulSet, a Deployment or a Job."""

    kind: str
    name: str
    spec: Object
    pod_metadata: Object
    pod: Object

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.pod_metadata.get("labels", {}))

    @property
    def containers(self) -> list[Object]:
        """All containers of its pods, including the init containers."""
        return [*self.pod.get("initContainers", []), *self.pod["containers"]]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def render(folder: Path) -> list[Object]:
    """Returns the objects of an overlay. Without kubectl it skips the test, or fails it in CI and in `make e2e`."""
    kubectl = need("kubectl", source="it renders the manifests; Kubernetes' site has it", failing=("SHOAL_E2E", "CI"))
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"kustomize warns: {done.stderr}"
    return read(done.stdout)


@cache
def rendered(overlay: str) -> list[Object]:
    """Returns the objects of an overlay, which must not be changed."""
    return render(KUBERNETES / overlay)


def render_with(folder: Path, overlay: str, components: Sequence[str]) -> list[Object]:
    """Renders an overlay with added components.

    Args:
        folder: an empty folder, for a copy of all manifests.
        overlay: name of the overlay.
        components: names of the components.
    """
    copy = shutil.copytree(KUBERNETES, folder / "kubernetes") / "overlays" / overlay
    kustomization = yaml.safe_load((copy / "kustomization.yaml").read_text())
    kustomization.setdefault("components", []).extend(f"../../components/{name}" for name in components)
    (copy / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(copy)


def read(text: str) -> list[Object]:
    """Returns the objects of a YAML stream."""
    return [found for found in yaml.safe_load_all(text) if found]


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def named(objects: Sequence[Object], kind: str, name: str) -> Object:
    """Returns the only object of this kind and name."""
    [found] = [found for found in of_kind(objects, kind) if found["metadata"]["name"] == name]
    return found


def workloads(objects: Sequence[Object]) -> Iterator[Workload]:
    for found in of_kind(objects, "StatefulSet", "Deployment", "Job", "DaemonSet"):
        template = found["spec"]["template"]
        metadata = template.get("metadata", {})
        yield Workload(found["kind"], found["metadata"]["name"], found["spec"], metadata, template["spec"])


def environment(container: Object, objects: Sequence[Object]) -> dict[str, str]:
    """Returns the environment variables of a container's process.

    Raises:
        KeyError: the container names a map that does not exist.
    """
    found: dict[str, str] = {}
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(objects, "ConfigMap")}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]] if "configMapRef" in source else {}
    for variable in container.get("env", []):
        given = variable.get("valueFrom", {})
        field = given.get("fieldRef", {}).get("fieldPath") or given.get("resourceFieldRef", {}).get("resource")
        found[variable["name"]] = _FIELDS[field] if field else _REFERENCE.sub(_value_in(found), variable["value"])
    return found


def _value_in(found: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
    return lambda reference: found.get(reference[1], reference[0])


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Returns whether a label selector selects an object with these labels. An empty selector selects all objects."""
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions), "our manifests use no other operator"
    wanted = {key: [value] for key, value in selector.get("matchLabels", {}).items()}
    wanted |= {each["key"]: each["values"] for each in expressions}
    return all(labels.get(key) in values for key, values in wanted.items())


def quantity(text: str | int | float) -> float:
    """Returns a quantity of Kubernetes as a number: 500m is 0.5, 1Ki is 1024."""
    digits = str(text).rstrip("mkMGiK")
    return float(digits) * _SUFFIXES[str(text)[len(digits) :]]
