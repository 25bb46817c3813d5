"""A Ray cluster on this machine, for the tests of `shoal.ray`."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Of Ray: no reports to its makers, no token in the home of who runs the tests, and no lines that repeat others.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_DEDUP_LOGS": "0"}
# The paths of Ray's sockets may have 107 characters, and a folder of pytest is too long.
TEMPORARY = Path(tempfile.gettempdir()) / f"r{os.getpid()}"


@pytest.fixture(scope="session")
def ray() -> Iterator[Any]:
    """Yields the module, connected to a Ray cluster with room for several of ours."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=8, include_dashboard=False, _temp_dir=str(TEMPORARY), namespace="tests", log_to_driver=False)
    yield ray
    ray.shutdown()
    shutil.rmtree(TEMPORARY)
