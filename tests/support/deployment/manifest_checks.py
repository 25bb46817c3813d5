"""Checks of the manifests, and the list of the manifests that each check applies to."""

from collections.abc import Sequence
from functools import cache

import kubernetes_validate

from support.deployment import manifest_lifecycle as lifecycle
from support.deployment import manifest_network as network
from support.deployment import manifest_rules as rules
from support.deployment.custom_resources import SCHEMAS as CUSTOM
from support.deployment.manifests import KUBERNETES, Object, render

SCHEMAS = "1.36.0"  # strict: no field that this version does not know
OLDEST = "1.30.0"  # that docs/how-to/kubernetes.md names: preStop's sleep is of 1.30

# With who reaches whom.
OVERLAYS = {
    "base": network.NEEDED,
    "overlays/local": network.NEEDED,
    "overlays/production": network.NEEDED | network.SCRAPES,
    "overlays/gpu": network.NEEDED,
}
RULES: list[rules.Rule] = [
    rules.restricted,
    rules.locked_down,
    rules.accounts,
    rules.pinned_images,
    rules.resources,
    rules.memory,
    rules.volumes,
    rules.selectors,
    rules.identities,
    rules.ports,
    rules.budgets,
    rules.autoscaling,
    rules.one_namespace,
    rules.monitoring,
    lifecycle.command_lines,
    lifecycle.addresses,
    lifecycle.page_names,
    lifecycle.mounted_folders,
    lifecycle.probes,
    lifecycle.endings,
]


@cache
def rendered(overlay: str) -> list[Object]:
    """Returns the objects of an overlay, which must not be changed."""
    return render(KUBERNETES / overlay)


def complaints(objects: Sequence[Object]) -> list[str]:
    """Returns the complaints of all rules about some objects."""
    return [complaint for rule in RULES for complaint in rule(objects)]


def schema_errors(objects: Sequence[Object], version: str) -> list[str]:
    """Returns the errors by Kubernetes' own schema of this version. `rules.monitoring` checks custom resources."""
    errors = []
    for found in objects:
        if found["kind"] not in CUSTOM:
            try:
                assert kubernetes_validate.validate(found, version, strict=True) == version.rpartition(".")[0]
            except kubernetes_validate.ValidationError as error:
                errors.append(f"{found['kind']} {found['metadata']['name']}: {error.message}")
    return errors
