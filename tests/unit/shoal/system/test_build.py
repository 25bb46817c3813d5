"""Description of the running build, and the sources of its commit."""

import json
import subprocess
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal._system import build


class Installed(Distribution):
    """A distribution with this record of where it came from."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, filename: str) -> str | None:
        return json.dumps(self._origin) if self._origin and filename == "direct_url.json" else None

    def locate_file(self, path: Any) -> Any:
        raise NotImplementedError


def test_build_names_versions_and_platform() -> None:
    found = build.current()
    assert found.version == shoal.__version__
    assert found.libraries["numpy"] == np.__version__
    assert list(found.libraries) == sorted(found.libraries)


@pytest.mark.parametrize(
    ("commit", "head"), [("2d70262f1aab", "shoal 1.2.3 (commit 2d70262f1aab)"), (None, "shoal 1.2.3")]
)
def test_it_takes_two_lines(commit: str | None, head: str) -> None:
    shown = build.Build("1.2.3", commit, "CPython 3.11.7", "Linux-x86_64", {"grpcio": "1.85.1", "numpy": "2.3.0"})
    assert str(shown) == f"{head}\nCPython 3.11.7 on Linux-x86_64; grpcio 1.85.1, numpy 2.3.0"


def test_a_wheel_of_an_index_without_a_record_has_no_commit() -> None:
    assert build.commit_of(Installed(None)) is None
    assert build.commit_of(Installed({"url": "file:///wheels/shoal.whl", "archive_info": {}})) is None


def test_commit_comes_from_the_record_of_the_installer() -> None:
    vcs = {"vcs": "git", "commit_id": "2d70262f1aabccddeeff00112233445566778899"}
    assert build.commit_of(Installed({"url": "https://example.invalid/shoal", "vcs_info": vcs})) == "2d70262f1aab"


def test_git_names_the_commit_of_an_editable_install(tmp_path: Path) -> None:
    root = tmp_path / "a folder"
    root.mkdir()
    installed = Installed({"url": root.as_uri(), "dir_info": {"editable": True}})
    assert build.commit_of(installed) is None

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.invalid")
        done = subprocess.run(["git", "-C", root, *identity, *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    assert build.commit_of(installed) is None, "there is no commit yet"
    (root / "file").write_text("1")
    git("add", ".")
    git("commit", "--quiet", "--message", "One")
    git("tag", "--annotate", "v1", "--message", "1")
    assert build.commit_of(installed) == git("rev-parse", "--short=12", "HEAD")
    (root / "file").write_text("2")
    assert build.commit_of(installed) == git("rev-parse", "--short=12", "HEAD") + "-dirty"
    # A folder inside of another project's repository.
    inner = root / "inner"
    inner.mkdir()
    assert build.commit_of(Installed({"url": inner.as_uri(), "dir_info": {"editable": True}})) is None
