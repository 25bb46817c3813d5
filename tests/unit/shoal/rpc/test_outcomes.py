"""Outcomes of calls: those that nobody records are not put together."""

import contextvars
from typing import Any, cast

import grpc
import pytest

from shoal._rpc.callers import set_caller
from shoal._rpc.calls import host_in
from shoal._rpc.outcomes import CallOutcome, observed
from shoal._security import AccessRole, Principal


class Context:
    """A call, as far as its outcome needs it."""

    def __init__(self) -> None:
        self.status: grpc.StatusCode | None = None
        self.asked = 0

    def code(self) -> grpc.StatusCode | None:
        return self.status

    def details(self) -> bytes:
        return b"the reason" if self.status else b""

    def peer(self) -> str:
        self.asked += 1
        return "ipv4:10.0.0.5:9999"

    def abort(self) -> None:
        self.status = grpc.StatusCode.NOT_FOUND
        raise ValueError


def call(handler: Any, *, successes: bool) -> tuple[list[CallOutcome], Context]:
    found: list[CallOutcome] = []
    context = Context()
    observed("a.B/C", handler, found.append, successes=successes)("request", cast(grpc.ServicerContext, context))
    return found, context


def test_calls_that_succeed_are_told_only_if_asked_for() -> None:
    outcomes, context = call(lambda request, context: request, successes=False)
    assert (outcomes, context.asked) == ([], 0)
    outcomes, _ = call(lambda request, context: request, successes=True)
    assert outcomes == [CallOutcome("a.B/C", None, "10.0.0.5", "OK", "request")]


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.5:9999", "10.0.0.5"),
        ("ipv6:%5B2001:db8::1%5D:9999", "2001:db8::1"),
        ("ipv6:[::1]:9999", "::1"),
        ("unix:/run/a", "unix:/run/a"),
        ("", ""),
    ],
)
def test_a_host_has_the_form_of_the_page(peer: str, host: str) -> None:
    """The records of one host can then be found by one text."""
    assert host_in(peer) == host


def test_calls_that_fail_are_always_told() -> None:
    found: list[CallOutcome] = []
    context = Context()
    handler = observed("a.B/C", lambda request, context: context.abort(), found.append, successes=False)
    with pytest.raises(ValueError):
        handler("request", cast(grpc.ServicerContext, context))
    assert found == [CallOutcome("a.B/C", None, "10.0.0.5", "NOT_FOUND", "request", "the reason")]


def test_a_call_with_streams_is_told_at_its_end() -> None:
    found: list[CallOutcome] = []
    context = Context()

    def stream(requests: Any, context: Context) -> Any:
        yield from requests
        context.status = grpc.StatusCode.PERMISSION_DENIED

    handler = observed("a.B/C", stream, found.append, successes=False, arity="stream_stream")
    replies = handler(iter([1, 2]), cast(grpc.ServicerContext, context))
    assert (next(replies), found) == (1, [])
    assert list(replies) == [2]
    assert found == [CallOutcome("a.B/C", None, "10.0.0.5", "PERMISSION_DENIED", None, "the reason")]


def test_a_call_that_is_answered_later_is_told_with_its_caller() -> None:
    """A pull waits without a thread. Another one ends it, which has no caller."""
    found: list[CallOutcome] = []
    later: list[Any] = []
    ann = Principal("ann", AccessRole.TRAINER)
    context = Context()

    class Handler:
        experimental_non_blocking = True

        def __call__(self, request: Any, context: Any, send: Any) -> None:
            later.append(send)

    sent: list[Any] = []
    handler = observed("a.B/C", Handler(), found.append, successes=False, arity="unary_stream")
    assert handler.experimental_non_blocking  # type: ignore[attr-defined]
    calling = contextvars.copy_context()
    calling.run(set_caller, ann)
    calling.run(handler, "request", context, sent.append)
    later[0]("a message")
    assert found == []
    context.status = grpc.StatusCode.UNAUTHENTICATED
    later[0](None)
    assert found == [CallOutcome("a.B/C", ann, "10.0.0.5", "UNAUTHENTICATED", "request", "the reason")]
    assert sent == ["a message", None]
