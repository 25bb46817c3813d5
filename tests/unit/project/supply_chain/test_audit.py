"""Audit of the locked packages: what it reports about answers of the database, and about their absence."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "tools" / "supply_chain"))

import audit  # noqa: E402 - tools are no package

SOUND = {"name": "rich", "version": "15.0.0", "vulns": []}
SKIPPED = {"name": "numpy", "skip_reason": "not found"}
VULNERABLE = {"name": "jinja2", "version": "3.1.2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1.3"]}]}


def test_a_set_without_vulnerabilities() -> None:
    assert audit.verdict([SOUND]) == (0, ["no known vulnerabilities in 1 packages"])


def test_a_vulnerable_package_is_named_with_the_version_that_mends_it() -> None:
    status, lines = audit.verdict([SOUND, VULNERABLE, SKIPPED])
    assert status == 1
    assert lines[0] == "jinja2 3.1.2 has PYSEC-1; fixed in: 3.1.3"


def test_a_package_that_the_database_does_not_answer_for_is_no_success() -> None:
    status, lines = audit.verdict([SOUND, SKIPPED])
    assert status == 2
    assert "needs a network" in lines[0]
    assert "1 packages were not audited; the first one is numpy: not found" in lines[1]
