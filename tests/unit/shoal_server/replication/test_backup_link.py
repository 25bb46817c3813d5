"""The backup's end of a connection from a primary: its second lane, whenever that arrives."""

import socket
from typing import Any
from unittest.mock import MagicMock

import pytest

from shoal import errors
from shoal.v1 import replica_pb2
from shoal_server.replication.backup_link import BackupLink


@pytest.fixture
def link() -> BackupLink:
    lane = MagicMock(peer="p:1", begin=MagicMock(side_effect=errors.Unreachable("the primary is gone")))
    memory: Any = MagicMock()
    return BackupLink(MagicMock(), lane, replica_pb2.ReplicaHello(job="a"), memory, memory, memory, memory)


def test_a_second_lane_that_arrives_after_the_end_is_refused(link: BackupLink) -> None:
    """Nothing would close it, so its thread would wait until the primary does."""
    with pytest.raises(errors.Unreachable):
        link.run()
    with pytest.raises(errors.Unreachable, match="has ended"):
        link.answer_on(MagicMock(peer="p:2"))


def test_a_second_lane_ends_with_the_first_one(link: BackupLink) -> None:
    here, there = socket.socketpair()
    with here, there:
        await_end = link.answer_on(MagicMock(peer="p:2", fileno=here.fileno, close=there.close))
        with pytest.raises(errors.Unreachable, match="the primary is gone"):
            link.run()
        with pytest.raises(errors.Unreachable, match="p:2 ended the connection"):
            await_end()
