"""The thread that sends to a backup what would make another thread wait."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from shoal_server.replication.late_sender import LateSender
from shoal_server.shards import Payload
from support.waiting import wait_until

PAYLOAD: Payload = {0: np.ones(3, np.float32)}


class Link:
    """A connection whose backup reads when the test says so."""

    def __init__(self) -> None:
        self.reads, self.reading = threading.Event(), threading.Event()
        self.gradients = self.inputs = 0
        self.failure: Exception | None = None
        self.failures: list[Exception] = []
        self.sent: list[int] = []
        self.late = LateSender(self.send_gradient, self.send_inputs, self.failures.append)

    def send_gradient(self, payload: Payload) -> int:
        self.reading.set()
        assert self.reads.wait(20)
        if self.failure:
            raise self.failure
        self.gradients += 1
        return self.gradients

    def send_inputs(self) -> None:
        self.inputs += 1


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    link.late.start()
    yield link
    link.reads.set()
    link.late.close()


def test_gradients_are_sent_in_order_and_the_callers_are_told(link: Link) -> None:
    for _ in range(3):
        link.late.add(PAYLOAD, link.sent.append)
    assert not link.sent
    link.reads.set()
    wait_until(lambda: link.sent == [1, 2, 3])
    assert not link.late.busy


def test_inputs_are_sent(link: Link) -> None:
    link.late.flush()
    wait_until(lambda: link.inputs)


def test_a_withdrawn_gradient_is_not_sent(link: Link) -> None:
    first = link.late.add(PAYLOAD, link.sent.append)
    assert link.reading.wait(20)
    second = link.late.add(PAYLOAD, link.sent.append)
    second()
    second()
    first()  # it is being sent
    link.reads.set()
    wait_until(lambda: link.sent == [1])
    assert link.gradients == 1


def test_gradients_that_wait_are_refused_when_the_connection_closes(link: Link) -> None:
    for _ in range(3):
        link.late.add(PAYLOAD, link.sent.append)
    assert link.reading.wait(20)
    link.late.close()
    assert link.sent == [0, 0]
    link.late.add(PAYLOAD, link.sent.append)
    assert link.sent == [0, 0, 0]
    link.reads.set()
    wait_until(lambda: link.sent == [0, 0, 0, 1])


def test_an_unexpected_error_is_reported_and_strands_no_push(link: Link) -> None:
    link.failure = MemoryError()
    link.reads.set()
    link.late.add(PAYLOAD, link.sent.append)
    wait_until(lambda: link.sent == [0])
    assert link.failures == [link.failure]
