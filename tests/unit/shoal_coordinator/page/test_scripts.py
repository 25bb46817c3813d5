"""Computations of the page's scripts, tested without a browser by Node's own test runner."""

import shutil
import subprocess
from pathlib import Path

import pytest

from support.clusters.local import ROOT

NODE = shutil.which("node") or shutil.which("nodejs") or ""
SCRIPTS, TESTS = "server/shoal_coordinator/page/static", "tests/js"


def test_the_pages_scripts(tmp_path: Path) -> None:
    """In a copy: Node takes files for modules where a package.json says so, and the page has no use for one."""
    if not NODE:
        pytest.skip("no Node here: install Debian's nodejs, 18 or later")
    for folder in (SCRIPTS, TESTS):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    tests = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / TESTS).glob("*.test.js"))
    assert len(tests) >= 4
    run = [NODE, "--test", *tests]
    found = subprocess.run(run, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
