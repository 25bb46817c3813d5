"""A cluster on Ray that the tests of this folder share."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.clusters.local import PROGRAMS, QUICK


@pytest.fixture(scope="session")
def cluster(ray: Any) -> Iterator[Any]:
    """Yields two servers and two workers, for tests that leave it whole."""
    module: Any = pytest.importorskip("shoal.ray")
    with module.cluster(servers=2, workers=2, path=PROGRAMS, flags=QUICK, name="shared") as cluster:
        yield cluster
