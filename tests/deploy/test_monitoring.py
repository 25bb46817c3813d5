"""Alerts, dashboard and monitoring docs: they use only metrics that roles export, and the rules work as described."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import promql_parser
import pytest
import yaml

from support.deployment.compose_stack import compose_file
from support.deployment.needed_programs import need
from support.deployment.promql import grouped_by, selectors, strangers
from support.role_metrics import TARGET_LABELS, Scraped, roles

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools" / "docs"))

import metric_pages  # noqa: E402 - the generator is no package

PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
RUNBOOKS = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
MONITORING = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
# The labels of targets with their values; None: any.
TARGETS = dict.fromkeys(TARGET_LABELS) | {"component": {"coordinator", "server", "worker"}}
# Variables that Grafana replaces by a range.
GRAFANA_RANGE = re.compile(r"\$__(?:rate_interval|range)\b")
UNITS = ("_seconds", "_bytes", "_versions", "_ratio", "_info")


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules" / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def cases_of(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "tests" / name).read_text())["tests"]
    return cases


RECORDED = {rule["record"]: rule["expr"] for rule in rules("recording.yml")}
ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
DASHBOARD = json.loads((GRAFANA / "dashboards" / "shoal.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{f"rule {name}": expr for name, expr in RECORDED.items()},
    **{f"alert {name}": rule["expr"] for name, rule in ALERTS.items()},
    **{f"panel {panel['title']}, {target['refId']}": target["expr"] for panel in PANELS for target in panel["targets"]},
}


@pytest.fixture(scope="module")
def scraped() -> Iterator[dict[str, Scraped]]:
    with roles() as pages:
        yield pages


@pytest.fixture(scope="module")
def labels(scraped: dict[str, Scraped]) -> dict[str, dict[str, set[str]]]:
    """Returns for each name that can be queried the values of each label, without the labels of the target."""
    return {"up": {}} | {name: dict(found) for page in scraped.values() for name, found in page.labels.items()}


def unmeasured(expression: str, labels: dict[str, dict[str, set[str]]]) -> Iterator[str]:
    """Yields what an expression queries but no role exports."""
    for selector in selectors(expression):
        if selector.name not in labels and selector.name not in RECORDED:
            yield f"there is no {selector.name}"
            continue
        known = TARGETS | labels.get(selector.name, {})
        for label, operator, value in selector.matchers:
            if label not in known:
                yield f"{selector.name} has no label {label}"
            elif (values := known[label]) is not None:
                for strange in sorted(strangers(operator, value, values)):
                    yield f"{selector.name} never has the {label} {strange}"


def as_in_the_container(folder: Path, more: str = "") -> Path:
    """Returns the configuration, with further lines, beside the rules and the files for TLS that promtool looks for."""
    config = folder / "prometheus.yml"
    config.write_text((PROMETHEUS / "prometheus.yml").read_text() + more)
    (folder / "rules").symlink_to(PROMETHEUS / "rules")
    (folder / "tls").mkdir()
    for name in ("ca", "cert", "key"):
        (folder / "tls" / f"{name}.pem").touch()
    return config


def promtool(*arguments: str | Path, text: str = "") -> str:
    """Runs promtool, which must succeed. Returns its output."""
    tool = need("promtool", source="Debian has it in the package prometheus")
    done = subprocess.run(
        [tool, *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestMetrics:
    @pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
    def test_promtool_has_nothing_to_say(self, scraped: dict[str, Scraped], role: str) -> None:
        assert promtool("check", "metrics", text=scraped[role].text) == ""

    @pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
    def test_are_named_as_prometheus_asks(self, scraped: dict[str, Scraped], role: str) -> None:
        ours = {
            name: kind for name, kind in scraped[role].types.items() if not name.startswith(("process_", "python_"))
        }
        assert len(ours) >= 15
        for name, kind in ours.items():
            assert name.startswith(f"shoal_{role}_")
            assert not re.search(r"(milli|micro|_ms|_us|_mb|_kb|minutes|percent|_created|_gauge|_count$|_sum$)", name)
            assert name.endswith("_total") == (kind == "counter")
            assert kind != "histogram" or name.endswith(UNITS)

    def test_have_no_label_of_the_targets(self, labels: dict[str, dict[str, set[str]]]) -> None:
        for name, found in labels.items():
            assert not TARGET_LABELS & found.keys(), name

    def test_are_all_in_the_reference_and_no_others(self, scraped: dict[str, Scraped]) -> None:
        page = metric_pages.pages()["reference/metrics/index.md"]
        documented: dict[str, tuple[str, set[str]]] = {}
        row = r"^\| `(shoal_\w+)` \| (\w+) \|([^|]*)\| \S.* \|$"
        for name, kind, of in re.findall(row, page, re.MULTILINE):
            documented[name] = kind, set(re.findall(r"`(\w+)`", of))
        # An info is a gauge to the format that is scraped.
        measured = {
            name: {"gauge", "info"} if name.endswith("_info") else {kind}
            for page in scraped.values()
            for name, kind in page.types.items()
            if name.startswith("shoal_")
        }
        assert documented.keys() == measured.keys()
        for name, (kind, _) in documented.items():
            assert kind in measured[name], name
        for role in scraped.values():
            for name, found in role.labels.items():
                family = re.sub(r"_(bucket|sum|count)$", "", name)
                assert found.keys() - {"le"} <= documented.get(family, ("", set(found)))[1], name


def test_an_expression_is_read_as_it_is_meant() -> None:
    expression = (
        'sum by (le, kind) (rate(shoal_a_bucket{role="x",state=~"a|b"}[5m])) / on(instance) level:b:rate5m'
        " > 2 and up == 1 unless scalar(process_c) offset 1h"
    )
    found = selectors(expression)
    assert [selector.name for selector in found] == ["shoal_a_bucket", "level:b:rate5m", "up", "process_c"]
    assert found[0].matchers == (("role", "=", "x"), ("state", "=~", "a|b"))
    assert grouped_by(expression) == {"le", "kind", "instance"}


@pytest.mark.parametrize(
    ("matcher", "said"),
    [
        ('state="placing"', "never has the state placing"),
        ('state!="placing"', "never has the state placing"),
        ('state=~"pending|starting|placing"', "never has the state placing"),
        ('state!~"placing|pending"', "never has the state placing"),
        ('state=~"pending|placi.*"', "never has the state placi.*"),
        ('state=~"(plac|start)ing"', None),
        ('state=~"(plac|sett)ing"', "never has the state (plac|sett)ing"),
        ('component=~"server|clerk"', "never has the component clerk"),
        ('phase="pending"', "has no label phase"),
        ('state=~"pend.*|placed"', None),
        ('state!="pending",component="server",instance=~"server-.*",job!="other"', None),
    ],
)
def test_what_is_never_measured_is_found(matcher: str, said: str | None) -> None:
    labels = {"shoal_jobs": {"state": {"pending", "starting", "placed"}}}
    found = list(unmeasured(f"sum(shoal_jobs{{{matcher}}}) > 0", labels))
    assert found == ([f"shoal_jobs {said}"] if said else [])


def test_a_state_that_was_renamed_is_found_in_every_alert_that_waits_for_it(
    labels: dict[str, dict[str, set[str]]],
) -> None:
    name = "shoal_coordinator_jobs"
    states = labels[name]["state"] - {"placing"} | {"placed"}
    renamed = {**labels, name: {**labels[name], "state": states}}
    asking = {what for what, expression in EXPRESSIONS.items() if "placing" in expression}
    assert asking
    assert {what for what, expression in EXPRESSIONS.items() if list(unmeasured(expression, renamed))} == asking


@pytest.mark.parametrize("what", EXPRESSIONS)
class TestExpressions:
    def test_are_promql(self, what: str) -> None:
        """Also checks the names of functions, and the types of their arguments."""
        promql_parser.parse(GRAFANA_RANGE.sub("5m", EXPRESSIONS[what]))

    def test_ask_for_what_is_measured(self, what: str, labels: dict[str, dict[str, set[str]]]) -> None:
        assert selectors(EXPRESSIONS[what])
        assert list(unmeasured(EXPRESSIONS[what], labels)) == []

    def test_group_by_labels_that_there_are(self, what: str, labels: dict[str, dict[str, set[str]]]) -> None:
        everything = [labels.get(selector.name, {}) for selector in selectors(EXPRESSIONS[what])]
        known = {label for found in everything for label in found} | TARGET_LABELS
        assert grouped_by(EXPRESSIONS[what]) <= known


class TestRules:
    def test_pass_promtools_tests(self) -> None:
        promtool("test", "rules", *sorted((PROMETHEUS / "tests").glob("*.yml")))

    @pytest.mark.parametrize("alert", ALERTS)
    def test_durations_of_an_alert_are_durations(self, alert: str) -> None:
        for name in {"for", "keep_firing_for"} & ALERTS[alert].keys():
            promql_parser.parse_duration(ALERTS[alert][name])

    def test_pass_promtools_check(self, tmp_path: Path) -> None:
        promtool("check", "rules", *sorted((PROMETHEUS / "rules").glob("*.yml")))
        promtool("check", "config", as_in_the_container(tmp_path))

    def test_the_docs_lines_for_an_alertmanager_are_a_configuration(self, tmp_path: Path) -> None:
        [lines] = re.findall(r"```yaml\n(alerting:.*?)```", MONITORING, re.DOTALL)
        promtool("check", "config", as_in_the_container(tmp_path, lines))

    @pytest.mark.parametrize("alert", ALERTS)
    def test_an_alert_is_tested_firing_and_not_firing(self, alert: str) -> None:
        cases = [
            case for test in cases_of("alerts.yml") for case in test["alert_rule_test"] if case["alertname"] == alert
        ]
        assert {bool(case["exp_alerts"]) for case in cases} == {True, False}

    @pytest.mark.parametrize("alert", ALERTS)
    def test_an_alert_says_what_it_is_and_what_to_do(self, alert: str) -> None:
        rule = ALERTS[alert]
        assert rule["labels"].keys() == {"severity"}
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/alerts.md#{alert.lower()}"
        _, _, section = RUNBOOKS.partition(f"\n## {alert}\n")
        section = section.partition("\n## ")[0]
        assert re.search(r"^- \w", section, re.MULTILINE), "its runbook says nothing to do"

    def test_there_is_no_runbook_of_an_alert_that_is_gone(self) -> None:
        assert set(re.findall(r"^## (Shoal\w+)$", RUNBOOKS, re.MULTILINE)) == ALERTS.keys()

    @pytest.mark.parametrize("rule", RECORDED)
    def test_a_recorded_value_is_tested_and_used(self, rule: str) -> None:
        assert rule in {case["expr"] for test in cases_of("recording.yml") for case in test["promql_expr_test"]}
        users = [expression for what, expression in EXPRESSIONS.items() if what != f"rule {rule}"]
        assert any(selector.name == rule for expression in users for selector in selectors(expression))

    def test_the_prometheus_rule_is_made_of_them(self) -> None:
        module = script(PROMETHEUS / "prometheus_rule.py")
        assert module.TARGET.read_text() == module.prometheus_rule(), "run deploy/prometheus/prometheus_rule.py"
        rule = yaml.safe_load(module.prometheus_rule())
        assert rule["kind"] == "PrometheusRule"
        made = [each for group in rule["spec"]["groups"] for each in group["rules"]]
        assert made == [*rules("recording.yml"), *rules("alerts.yml")]


class TestDashboard:
    def test_is_what_the_script_makes(self) -> None:
        module = script(GRAFANA / "dashboard.py")
        assert module.TARGET.read_text() == module.text(), "run deploy/grafana/dashboard.py"

    def test_asks_what_has_to_be_known(self) -> None:
        rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
        asked = ["Is it training?", "How fast?", "Who is the straggler?", "How stale?", "Is anything lost?"]
        assert rows[: len(asked)] == asked

    def test_shows_every_metric_but_those_that_say_less_than_others(self, scraped: dict[str, Scraped]) -> None:
        shown = {selector.name for expression in EXPRESSIONS.values() for selector in selectors(expression)}
        shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
        # A training script, which is a rank or a pipeline, is no target of deploy/prometheus.
        pages = [page for role, page in scraped.items() if role not in {"rank", "pipeline"}]
        measured = {name for page in pages for name in page.types if name.startswith("shoal_")}
        assert measured - shown == {
            "shoal_coordinator_effects_total",
            "shoal_coordinator_events_total",
            "shoal_coordinator_rejected_requests_total",
            "shoal_coordinator_store_records_total",
            "shoal_coordinator_job_watchers",
            "shoal_server_pulls_total",
            "shoal_server_threads",
            "shoal_worker_device_info",
        }

    def test_its_panels_do_not_overlap_and_have_ids_of_their_own(self) -> None:
        panels = DASHBOARD["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
            assert not cells & taken, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells

    def test_its_source_is_the_variable_and_is_provisioned(self) -> None:
        sources = {target["datasource"]["uid"] for panel in PANELS for target in panel["targets"]}
        assert sources == {"${datasource}"}
        [variable] = DASHBOARD["templating"]["list"]
        given = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
        assert variable["type"] == "datasource"
        assert variable["current"]["value"] == given["datasources"][0]["uid"]
        provided = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "shoal.yml").read_text())
        assert provided["providers"][0]["type"] == "file"


class TestScraping:
    @pytest.mark.parametrize(
        ("service", "labels"),
        [
            ("coordinator", {"component": "coordinator", "instance": "coordinator"}),
            ("server-1", {"component": "server", "instance": "server-1"}),
            ("worker", {"component": "worker"}),  # of many: each keeps its address
        ],
    )
    def test_services_of_compose_are_told_apart(self, service: str, labels: dict[str, str]) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        jobs = {name: job for job in config["scrape_configs"] for name in job["dns_sd_configs"][0]["names"]}
        job = jobs[service]
        [names] = job["dns_sd_configs"]
        assert (names["type"], names["port"]) == ("A", 7090)
        given = {}
        same, *relabels = job["relabel_configs"]
        assert same == {"target_label": "job", "replacement": "shoal"}
        for relabel in relabels:
            assert relabel["source_labels"] == ["__meta_dns_name"]
            if match := re.fullmatch(relabel["regex"], service):  # as Prometheus does: anchored at both ends
                given[relabel["target_label"]] = match.expand(relabel["replacement"].replace("$", "\\"))
        assert given == labels

    def test_each_role_of_compose_is_scraped_over_tls_with_a_readers_certificate(self) -> None:
        config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
        file = compose_file()
        [folder] = [mount for mount in file["services"]["prometheus"]["volumes"] if mount.startswith("tls-reader:")]
        assert folder == "tls-reader:/etc/prometheus/tls:ro"
        certified = {tuple(host.split("=")) for host in file["services"]["certs"]["command"]}
        scraped = set()
        for job in config["scrape_configs"]:
            assert job["scheme"] == "https"
            tls = dict(job["tls_config"])
            scraped.add((job["job_name"], tls.pop("server_name")))
            assert tls == {f"{name}_file": f"tls/{name}.pem" for name in ("ca", "cert", "key")}
        assert {role for role, _ in scraped} == {"coordinator", "server", "worker"}
        assert scraped <= certified
