"""Code sample of the README, run as a reader runs it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"

pytestmark = pytest.mark.cluster


def test_the_sample_prints_the_weights_that_its_comment_says(tmp_path: Path) -> None:
    sample = re.search(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert sample, "the README has no sample"
    (tmp_path / "line.py").write_text(sample[1])
    run = subprocess.run(
        [sys.executable, "line.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 0, run.stderr
    promised = re.search(r"# (\[.*\])", sample[1])
    assert promised
    assert run.stdout.splitlines()[-1] == promised[1]
