"""Generator of a PrometheusRule from the rules, for clusters with the Prometheus operator. Run it after a change.

python deploy/prometheus/prometheus_rule.py
"""

from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parent / "kubernetes" / "components" / "monitoring" / "prometheusrule.yaml"

_HEAD = """\
# Made from deploy/prometheus/rules by deploy/prometheus/prometheus_rule.py. Run it again after a change.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: shoal
  labels:
    app.kubernetes.io/name: shoal
    app.kubernetes.io/part-of: shoal
spec:
  groups:
"""


def prometheus_rule() -> str:
    """Returns the PrometheusRule as YAML. It has the groups of all rule files, unchanged."""
    groups = []
    for path in sorted((HERE / "rules").glob("*.yml"), reverse=True):  # recording rules first
        _, _, rules = path.read_text().partition("groups:\n")
        groups += [f"  {line}".rstrip() + "\n" for line in rules.splitlines()]
    return _HEAD + "".join(groups)


if __name__ == "__main__":
    TARGET.write_text(prometheus_rule())
