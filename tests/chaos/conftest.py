"""Fixtures of the fault scenarios."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal._transport.segment import SHM
from support.faults.killable_roles import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Yields a nursery whose processes leave no segment."""
    with tempfile.TemporaryDirectory(dir=SHM) as folder, Nursery(Path(folder)) as nursery:
        yield nursery
        assert not nursery.segments()
