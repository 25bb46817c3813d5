"""The error catalogue is complete, and its one table works both ways."""

import re

import grpc
import pytest

from shoal import _rpc, errors


def all_errors(kind=errors.ShoalError):
    for child in kind.__subclasses__():
        if child.__module__.startswith("shoal"):
            yield child
        yield from all_errors(child)


@pytest.mark.parametrize("kind", list(all_errors()), ids=lambda kind: kind.__name__)
class TestEachError:
    def test_has_a_code_a_status_and_a_docstring_of_its_own(self, kind):
        assert errors.ShoalError.catalogue[kind.code] is kind
        assert re.fullmatch(r"[A-Z]+(_[A-Z]+)*", kind.code)
        assert grpc.StatusCode[kind.status] is _rpc.status_of(kind("x"))
        assert kind.__doc__
        assert kind.__name__ in errors.__all__

    def test_comes_back_as_itself(self, kind):
        sent = kind("what, where and what to do", shard=3, name="é")
        failure = Failure(_rpc.status_of(sent), sent.message, _rpc.error_metadata(sent))
        received = _rpc.error_from(failure, "host:1")
        assert type(received) is kind
        assert received.message == sent.message
        assert received.details == {"shard": "3", "name": "é"}


def test_codes_are_not_shared():
    with pytest.raises(TypeError, match="STALE_GENERATION is taken by StaleGeneration"):

        class Impostor(errors.ShoalError, code="STALE_GENERATION", status="ABORTED"):
            pass


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_status_that_grpc_makes_itself_becomes_an_error_that_names_the_address(status):
    received = _rpc.error_from(Failure(status, "bare", ()), "host:1")
    assert isinstance(received, errors.ShoalError)
    assert "host:1" in received.message
    assert "bare" in received.message


def test_a_code_of_a_newer_version_is_still_an_error():
    detail = errors.InternalError("from the future")
    type(detail).code, code = "NOT_YET", type(detail).code
    try:
        metadata = _rpc.error_metadata(detail)
    finally:
        type(detail).code = code
    received = _rpc.error_from(Failure(grpc.StatusCode.ABORTED, "x", metadata), "host:1")
    assert type(received) is errors.InternalError
    assert received.message == "from the future"


class TestRetrying:
    def run(self, outcomes, for_s=10.0):
        now, slept = [0.0], []

        def call():
            outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        def sleep(seconds):
            slept.append(seconds)
            now[0] += seconds

        try:
            result = _rpc.retrying(
                call, what="it", address="host:1", for_s=for_s, clock=lambda: now[0], sleep=sleep, jitter=lambda: 0.0
            )
        except errors.ShoalError as error:
            result = error
        return result, slept

    def test_backs_off_and_gets_through(self):
        gone = errors.Unreachable("gone")
        assert self.run([gone, gone, gone, "there"]) == ("there", [0.05, 0.1, 0.2])

    def test_gives_up_after_the_stated_time_and_says_where_and_how_long(self):
        result, slept = self.run([errors.Unreachable("gone")], for_s=30)
        assert isinstance(result, errors.Unreachable)
        assert "host:1 did not answer within 30 s" in result.message
        assert max(slept) == 2.0
        assert 25 < sum(slept) <= 30

    def test_does_not_repeat_what_is_wrong_in_itself(self):
        wrong = errors.BadRequest("no")
        assert self.run([wrong]) == (wrong, [])


class Failure(grpc.RpcError):
    """A failed call as a stub raises it."""

    def __init__(self, code, details, metadata):
        self._code, self._details, self._metadata = code, details, metadata

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._metadata
