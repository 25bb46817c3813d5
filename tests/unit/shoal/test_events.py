"""A stream of events that survives refusals of the coordinator."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal import errors, events
from shoal._rpc import CoordinatorClient
from shoal.status import JobState
from shoal.v1 import job_pb2


class Stream:
    """The answer of one call of Watch: an error, or the end of the job."""

    def __init__(self, refusal: errors.ShoalError | None) -> None:
        self._refusal = refusal

    def __iter__(self) -> Iterator[job_pb2.Event]:
        if self._refusal:
            raise self._refusal
        yield job_pb2.Event(sequence=1, state=job_pb2.StateChange(state=job_pb2.SUCCEEDED))

    def cancel(self) -> None:
        pass


class FakeCoordinator:
    """A coordinator that refuses the first calls of Watch, because too many others watch jobs."""

    address = "127.0.0.1:1"

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.jobs = SimpleNamespace(Watch=self.watch, Get=None)

    def watch(self, _request: Any, **_: Any) -> Stream:
        self.refusals -= 1
        return Stream(errors.Overloaded("64 calls watch jobs") if self.refusals >= 0 else None)

    def call(self, _method: Any, _request: Any) -> job_pb2.GetReply:
        return job_pb2.GetReply(status=job_pb2.JobStatus(state=job_pb2.SUCCEEDED))

    def metadata(self) -> None:
        pass

    def events(self, waited: list[float], **options: Any) -> list[events.Event]:
        client = cast(CoordinatorClient, self)
        return list(events.watch(client, "a", sleep=waited.append, jitter=lambda: 0.0, **options))


def test_who_follows_a_job_waits_while_too_many_others_do() -> None:
    waited: list[float] = []
    [last] = FakeCoordinator(refusals=3).events(waited)
    assert isinstance(last, events.StateChanged)
    assert last.state is JobState.SUCCEEDED
    assert len(waited) == 3
    assert waited == sorted({*waited}), "each wait is longer than the one before"


def test_who_asks_once_is_told_that_too_many_others_watch() -> None:
    with pytest.raises(errors.Overloaded):
        FakeCoordinator(refusals=1).events([], follow=False)
