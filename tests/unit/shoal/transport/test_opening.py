"""A lane that is being opened to a server which says nothing, as one that was stopped, ends when it is not needed."""

import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from shoal import errors
from shoal._transport.lane_transport import WELCOME_TIMEOUT_S, LaneFactory
from shoal._transport.selector import Selector
from shoal._transport.transport import Target
from shoal.v1 import parameter_server_pb2 as pb
from support.waiting import wait_until


class Silent:
    """A server whose kernel accepts connections, and which reads nothing."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        host, port = self.listener.getsockname()
        self.offer = pb.AttachReply(address=f"{host}:{port}", token=b"token")

    def attach(self) -> pb.AttachReply:
        return self.offer


def test_another_thread_ends_it_without_a_wait() -> None:
    silent: Any = Silent()
    layout: Any = None
    target = Target(silent.offer.address, layout, silent)
    selector, raised = Selector("tcp"), list[errors.ShoalError]()

    def open_lane() -> None:
        with pytest.raises(errors.ShoalError) as caught:
            selector.open(target, 1)
        raised.append(caught.value)

    with silent.listener:
        thread = threading.Thread(target=open_lane)
        begin = time.monotonic()
        thread.start()
        wait_until(lambda: target.opening.busy, what="the handshake")
        target.opening.close()
        thread.join()
        assert time.monotonic() - begin < WELCOME_TIMEOUT_S / 2
        assert raised
        with pytest.raises(errors.ShoalError):  # and so does the next attempt
            LaneFactory().connect(replace(target, offer=silent.offer), pb.LaneHello())
        assert time.monotonic() - begin < WELCOME_TIMEOUT_S / 2
