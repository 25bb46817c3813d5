"""Error catalogue: it is complete, and its table maps errors to codes and codes to errors."""

import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from shoal import _rpc, errors


def all_errors(kind: type[errors.ShoalError] = errors.ShoalError) -> Iterator[type[errors.ShoalError]]:
    for child in kind.__subclasses__():
        if child.__module__.startswith("shoal"):
            yield child
        yield from all_errors(child)


@pytest.mark.parametrize("kind", list(all_errors()), ids=lambda kind: kind.__name__)
class TestEachError:
    def test_has_a_code_a_status_and_a_docstring_of_its_own(self, kind: type[errors.ShoalError]) -> None:
        assert errors.ShoalError.catalogue[kind.code] is kind
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind.code)
        assert grpc.StatusCode[kind.status] is _rpc.status_of(kind("x"))
        assert kind.__doc__
        assert kind.__name__ in errors.__all__

    def test_comes_back_as_itself(self, kind: type[errors.ShoalError]) -> None:
        sent = kind("what, where and what to do", shard=3, name="é")
        failure = Failure(_rpc.status_of(sent), sent.message, _rpc.error_metadata(sent))
        received = _rpc.error_from(failure, "host:1")
        assert type(received) is kind
        assert received.message == sent.message
        assert received.details == {"shard": "3", "name": "é"}


def test_codes_are_not_shared() -> None:
    with pytest.raises(TypeError, match="STALE_GENERATION is taken by StaleGeneration"):

        class Impostor(errors.ShoalError, code="STALE_GENERATION", status="ABORTED"):
            pass


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_any_status_of_grpc_becomes_an_error_with_the_address(status: grpc.StatusCode) -> None:
    received = _rpc.error_from(Failure(status, "bare", ()), "host:1")
    assert isinstance(received, errors.ShoalError)
    assert "host:1" in received.message
    assert "bare" in received.message


def test_a_code_of_a_newer_version_is_still_an_error() -> None:
    detail = errors.InternalError("from the future")
    type(detail).code, code = "NOT_YET", type(detail).code
    try:
        metadata = _rpc.error_metadata(detail)
    finally:
        type(detail).code = code
    received = _rpc.error_from(Failure(grpc.StatusCode.ABORTED, "x", metadata), "host:1")
    assert type(received) is errors.InternalError
    assert received.message == "from the future"


@pytest.mark.parametrize(
    ("details", "plain"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:5: Failed to connect to remote "
            "host: Connection refused",
            "Connection refused",
        ),
        ("Socket closed", "Socket closed"),
    ],
)
def test_a_failed_connection_gives_its_reason_without_the_words_of_grpc(details: str, plain: str) -> None:
    received = _rpc.error_from(Failure(grpc.StatusCode.UNAVAILABLE, details, ()), "host:1")
    assert received.message == f"call to host:1 failed with UNAVAILABLE: {plain}"


class TestRetrying:
    def run(
        self, outcomes: list[str | errors.ShoalError], for_s: float = 10.0
    ) -> tuple[str | errors.ShoalError, list[float]]:
        now = [0.0]
        slept: list[float] = []
        result: str | errors.ShoalError

        def call() -> str:
            outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            now[0] += seconds

        try:
            result = _rpc.retrying(
                call, what="it", address="host:1", for_s=for_s, clock=lambda: now[0], sleep=sleep, jitter=lambda: 0.0
            )
        except errors.ShoalError as error:
            result = error
        return result, slept

    def test_backs_off_and_gets_through(self) -> None:
        gone = errors.Unreachable("gone")
        assert self.run([gone, gone, gone, "there"]) == ("there", [0.05, 0.1, 0.2])

    def test_error_after_the_time_limit_names_address_and_limit(self) -> None:
        result, slept = self.run([errors.Unreachable("gone")], for_s=30)
        assert isinstance(result, errors.Unreachable)
        assert "host:1 did not answer within 30 s" in result.message
        assert max(slept) == 2.0
        assert 25 < sum(slept) <= 30

    def test_one_attempt_has_no_time_limit_to_name(self) -> None:
        result, slept = self.run([errors.Unreachable("gone")], for_s=0)
        assert isinstance(result, errors.Unreachable)
        assert result.message.startswith("it at host:1 did not answer (gone); check")
        assert slept == []

    @pytest.mark.parametrize("first_s", [0.0, 5.0], ids=["refused", "silent"])
    def test_tells_within_a_second_that_it_waits_and_only_once(self, first_s: float) -> None:
        now, told = [0.0], list[tuple[float, str]]()

        def call() -> None:
            now[0] += first_s
            raise errors.Unreachable("Connection refused")

        def sleep(seconds: float) -> None:
            now[0] += seconds

        def tell(text: str) -> None:
            told.append((now[0], text))

        with pytest.raises(errors.Unreachable):
            _rpc.retrying(
                call, what="it", address="host:1", for_s=30, clock=lambda: now[0], sleep=sleep, on_silence=tell
            )
        ((at_s, text),) = told
        assert at_s <= first_s + 1.0
        assert text == "it at host:1 does not answer (Connection refused); trying again for up to 30 s"

    def test_tells_that_its_target_answers_again(self) -> None:
        now, told = [0.0], list[str]()

        def call() -> str:
            if now[0] < 5:
                raise errors.Unreachable("it restarts")
            return "there"

        def sleep(seconds: float) -> None:
            now[0] += seconds

        _rpc.retrying(
            call, what="it", address="host:1", for_s=30, clock=lambda: now[0], sleep=sleep, on_silence=told.append
        )
        assert told[1:] == ["it at host:1 answers again"]

    def test_does_not_tell_of_a_short_silence(self) -> None:
        outcomes: list[str | None] = [None, None, "there"]

        def call() -> str:
            if outcome := outcomes.pop(0):
                return outcome
            raise errors.Unreachable("it restarts")

        told: list[str] = []
        answer = _rpc.retrying(
            call, what="it", address="host:1", for_s=30, clock=lambda: 0.0, sleep=lambda _: None, on_silence=told.append
        )
        assert (answer, told) == ("there", [])

    def test_does_not_retry_permanent_errors(self) -> None:
        wrong = errors.BadRequest("no")
        assert self.run([wrong]) == (wrong, [])


class Failure(grpc.RpcError):
    """A failed call as a stub raises it."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, bytes], ...]) -> None:
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._metadata
