"""The end of a channel."""

import threading
from typing import cast

import grpc

from shoal._rpc import close_channel


class Channel:
    """A channel whose close waits for an event."""

    def __init__(self) -> None:
        self.may_close, self.closed = threading.Event(), threading.Event()

    def close(self) -> None:
        self.may_close.wait()
        self.closed.set()


def test_close_waits_for_the_channel() -> None:
    channel = Channel()
    channel.may_close.set()
    close_channel(cast(grpc.Channel, channel))
    assert channel.closed.is_set()


def test_a_channel_that_lost_the_end_of_a_call_delays_the_close_only_for_a_while() -> None:
    channel = Channel()
    close_channel(cast(grpc.Channel, channel), within_s=0.01)
    assert not channel.closed.is_set()
    channel.may_close.set()  # ends the thread
    assert channel.closed.wait(10)
