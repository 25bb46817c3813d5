"""Version of Shoal: it is defined in one place, and every other mention agrees with it."""

import sys
from datetime import date
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tools" / "release"))

import version  # noqa: E402 - tools are no package


def test_every_mention_agrees_with_pyproject() -> None:
    assert version.version(ROOT) == shoal.__version__
    found = version.mentions(ROOT)
    assert {where.partition(":")[0].partition("/")[0] for where, _ in found} >= {"Dockerfile", "deploy", "docs"}
    assert [(where, other) for where, other in found if other != shoal.__version__] == []


def test_setting_it_changes_every_mention_and_heads_the_changelog(tmp_path: Path) -> None:
    for folder in ("deploy/compose", "docs/decisions"):
        (tmp_path / folder).mkdir(parents=True)
    files = {
        "pyproject.toml": '[project]\nname = "shoal"\nversion = "0.1.0"\n[tool.x]\nversion = "0.1.0"\n',
        "CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n",
        "Dockerfile": "# docker build --tag shoal:0.1.0-gpu .\nARG VERSION=0.1.0\nARG BASE=python:0.1.0\n",
        "README.md": "docker run shoal:0.1.0\n",
        "deploy/compose/.env.example": "SHOAL_IMAGE=shoal:0.1.0\nOTHER=prom:0.1.0\n",
        "docs/decisions/0001.md": "shoal:0.1.0\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    version.set_version(tmp_path, "0.2.0rc1", date(2027, 1, 2))
    told = {name: (tmp_path / name).read_text() for name in files}
    assert told["pyproject.toml"].endswith('version = "0.2.0rc1"\n[tool.x]\nversion = "0.1.0"\n')
    assert "## [Unreleased]\n\n## [0.2.0rc1] - 2027-01-02\n\n### Added\n" in told["CHANGELOG.md"]
    assert (
        told["Dockerfile"] == "# docker build --tag shoal:0.2.0rc1-gpu .\nARG VERSION=0.2.0rc1\nARG BASE=python:0.1.0\n"
    )
    assert told["README.md"] == "docker run shoal:0.2.0rc1\n"
    assert told["deploy/compose/.env.example"] == "SHOAL_IMAGE=shoal:0.2.0rc1\nOTHER=prom:0.1.0\n"
    assert told["docs/decisions/0001.md"] == "shoal:0.1.0\n"
    with pytest.raises(SystemExit, match="already"):
        version.set_version(tmp_path, "0.2.0rc1", date(2027, 1, 2))
    with pytest.raises(SystemExit, match="is not a version"):
        version.set_version(tmp_path, "1.0", date(2027, 1, 2))
