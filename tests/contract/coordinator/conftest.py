"""Fixture of a coordinator with two registered workers. Each test module defines the `rig` with the coordinator."""

import pytest

from shoal.v1 import coordinator_pb2 as members
from support.clusters.coordinator_rig import Rig


@pytest.fixture
def group(rig: Rig) -> Rig:
    for name in ("w0", "w1"):
        rig.register(members.WORKER, name, device="cpu")
    return rig
