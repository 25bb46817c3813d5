"""Schemas of the Prometheus operator's custom resources, limited to the fields that our manifests use.

They follow the operator's API reference (https://prometheus-operator.dev/docs/api-reference/api). Kubernetes' own
schemas do not include these resources.
"""

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h|d)$"}


def _object(properties: Schema, *required: str, **more: object) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        **more,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(kind: str, spec: Schema) -> Schema:
    metadata = _object({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS}, "name")
    identity = {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": {"const": kind}}
    return _object({**identity, "metadata": metadata, "spec": spec}, *identity, "metadata", "spec")


_RELABELING = _object({"sourceLabels": _list(_TEXT), "targetLabel": _TEXT, "replacement": _TEXT}, "targetLabel")
_ENDPOINT = _object(
    {
        "port": _TEXT,
        "path": _TEXT,
        "interval": _DURATION,
        "scrapeTimeout": _DURATION,
        "relabelings": _list(_RELABELING),
    },
    "port",
)
# What a selector selects is another rule's to see.
_MONITOR = _object({"selector": {"type": "object"}, "podMetricsEndpoints": _list(_ENDPOINT)}, "selector")
_RULE = _object(
    {"alert": _TEXT, "record": _TEXT, "expr": _TEXT, "for": _DURATION, "labels": _TEXTS, "annotations": _TEXTS},
    "expr",
    oneOf=[{"required": ["alert"]}, {"required": ["record"]}],
)
_GROUP = _object({"name": _TEXT, "interval": _DURATION, "rules": _list(_RULE)}, "name", "rules")

SCHEMAS: dict[str, Schema] = {
    "PodMonitor": _resource("PodMonitor", _MONITOR),
    "PrometheusRule": _resource("PrometheusRule", _object({"groups": _list(_GROUP)}, "groups")),
}
