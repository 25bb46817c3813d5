"""Coordinators with two registered workers; the module that uses them says which store their `rig` has."""

import pytest

from shoal.v1 import coordinator_pb2 as members
from support.clusters.coordinator_rig import Rig


@pytest.fixture
def group(rig: Rig) -> Rig:
    for name in ("w0", "w1"):
        rig.register(members.WORKER, name, device="cpu")
    return rig
