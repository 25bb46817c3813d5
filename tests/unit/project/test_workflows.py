"""CI workflow: it runs the developers' commands on every supported Python, with actions pinned to commits."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
WORKFLOW = yaml.safe_load(TEXT)


def test_it_runs_the_suite_on_every_python_that_the_project_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: Python :: 3\.\d+$", line)]
    job = WORKFLOW["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == named
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]


def test_it_enforces_the_coverage_floor_and_the_subjects_of_commits() -> None:
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert "make coverage" in commands
    assert 'python3 tools/commits/subject.py --range "$BASE..HEAD"' in commands


def test_its_actions_are_pinned_to_a_commit() -> None:
    used = re.findall(r"uses: (.*)", TEXT)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


def test_it_may_only_read() -> None:
    assert WORKFLOW["permissions"] == {}
    assert {tuple(job["permissions"].items()) for job in WORKFLOW["jobs"].values()} == {(("contents", "read"),)}
