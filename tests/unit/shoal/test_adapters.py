"""The adapters to frameworks, where their framework is missing."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "package", "extra"),
    [
        ("torch", "torch", "torch"),
        ("jax", "jax", "jax"),
        ("keras", "keras", "keras"),
        ("transformers", "torch", "transformers"),
    ],
)
def test_a_framework_that_is_missing_is_named_with_its_extra(adapter: str, package: str, extra: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None\nimport shoal\nimport shoal.{adapter}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"shoal.{adapter} needs {package}, which cannot be imported" in last
    assert f"pip install 'shoal[{extra}]'" in last
