"""A lane that another thread closes while one of its calls waits."""

import socket
from unittest.mock import MagicMock

import pytest

from shoal import errors
from shoal._transport import PARAMETER_SERVER, Frame
from shoal._transport.lane import Lane
from shoal_server.serving import LaneHandler


def test_a_lane_that_is_closed_while_its_reply_waits_ends_the_call() -> None:
    near, far = socket.socketpair()
    with near, far:
        lane, client = Lane(near, "client", PARAMETER_SERVER), Lane(far, "server", PARAMETER_SERVER)
        reply = MagicMock(waits=True, on_end=lambda _wake: lane.close())
        handler = LaneHandler(lane, MagicMock(push=MagicMock(return_value=reply)))
        client.send(Frame.PUSH, [b""], end=True)
        with pytest.raises(errors.Unreachable, match="disconnected while its push was waiting"):
            handler.serve()
        handler.close()
    reply.withdraw.assert_called_once_with()
