"""The backup's end of the connection of a part, which may end before the group is split."""

from unittest.mock import MagicMock

import pytest

from shoal import errors
from shoal.v1 import replica_pb2
from shoal_server.replication.parked_link import ParkedLink


@pytest.fixture
def parked() -> ParkedLink:
    return ParkedLink(MagicMock(), replica_pb2.ReplicaHello(job="a"), MagicMock(peer="p:1"), MagicMock())


def test_a_second_lane_that_arrives_after_the_end_is_refused(parked: ParkedLink) -> None:
    """Nothing would close it, so the primary would believe that both lanes of the part are open."""
    parked.stop()
    with pytest.raises(errors.Unreachable, match="has ended"):
        parked.answer_on(MagicMock(peer="p:2"))
    assert parked.give(MagicMock()) is None


def test_a_wait_that_begins_after_the_end_ends_at_once(parked: ParkedLink) -> None:
    parked.stop()
    with pytest.raises(errors.Unreachable, match="before the group was split"):
        parked.wait()
