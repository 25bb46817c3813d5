"""Clusters of real processes on loopback, as tests want them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shoal

ROOT = Path(__file__).parents[2]
PROGRAMS = [ROOT / "tests" / "support", ROOT / "examples"]
# Fast enough for tests to see deaths; slow enough for a machine that is busy with other tests.
QUICK = {"coordinator": ["--lease", "3", "--heartbeat", "0.2"]}


def local_cluster(
    servers: int, workers: int, flags: Mapping[str, Sequence[str]] = QUICK, **options: Any
) -> shoal.LocalCluster:
    return shoal.LocalCluster(servers=servers, workers=workers, path=PROGRAMS, flags=flags, **options)
