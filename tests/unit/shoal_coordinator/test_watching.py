"""The handler of Watch: it ends the calls of callers whose tokens have ended, also if they do not read."""

import itertools
from collections.abc import Iterator
from typing import Any, cast

import pytest

from shoal._rpc.callers import set_caller
from shoal._security import AccessRole, Principal
from shoal.events import LogLine
from shoal.v1 import job_pb2
from shoal_coordinator.api.watching import WatchHandler

ANN, BOB = (Principal(name, AccessRole.READER, f"token-of-{name}") for name in ("ann", "bob"))


class Coordinator:
    """Has more events than anybody reads."""

    def watch(self, *_: object, **__: object) -> Iterator[LogLine]:
        return (LogLine(number, 0.0, "w", "x") for number in itertools.count(1))


class Context:
    """A call that notes whether it was cancelled."""

    cancelled = False

    def is_active(self) -> bool:
        return not self.cancelled

    def cancel(self) -> None:
        self.cancelled = True


@pytest.fixture
def handler() -> Iterator[WatchHandler]:
    handler = WatchHandler(cast(Any, Coordinator()), 4, lambda caller: caller == ANN)
    yield handler
    handler.experimental_thread_pool.shutdown()


def test_a_call_whose_client_does_not_read_is_cancelled_when_its_token_has_ended(handler: WatchHandler) -> None:
    contexts = {}
    calls = []
    for caller in (ANN, BOB, None):
        set_caller(caller)
        contexts[caller] = Context()
        calls.append(iter(handler(job_pb2.WatchRequest(job="a"), cast(Any, contexts[caller]))))
        next(calls[-1])
    set_caller(None)
    handler.end_refused()
    assert not contexts[ANN].cancelled, "a client that reads has a second to learn the reason"
    for _ in range(2):
        handler.end_refused()
    assert [context.cancelled for context in contexts.values()] == [True, False, False]
    for call in calls:
        cast(Any, call).close()
    assert handler.open == 0
