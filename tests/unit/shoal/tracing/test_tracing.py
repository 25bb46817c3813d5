"""Settings of tracing from the environment, and the trace of each span. The tests export nothing."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler, SamplingResult
from structlog.testing import capture_logs

from shoal import _tracing, errors
from shoal.v1 import job_pb2
from support.traces import recorded, roots, tree

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@pytest.mark.parametrize(
    ("environment", "asking"),
    [
        ({}, ""),
        (ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:1"}, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_TRACES_EXPORTER": "none", **ENDPOINT}, ""),
        ({"SHOAL_TRACING": "on"}, "SHOAL_TRACING"),
        ({"SHOAL_TRACING": "auto", **ENDPOINT}, "OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"SHOAL_TRACING": "auto"}, ""),
        ({"SHOAL_TRACING": "off", "OTEL_TRACES_EXPORTER": "zipkin", **ENDPOINT}, ""),
        ({"OTEL_SDK_DISABLED": "true", **ENDPOINT}, ""),
        ({"OTEL_SERVICE_NAME": "a", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, ""),
    ],
)
def test_variable_that_enables_traces_is_found(environment: Mapping[str, str], asking: str) -> None:
    assert _tracing.enabling_variable(environment) == asking


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({"SHOAL_TRACING": "yes"}, "'yes'; set it to on, off or auto"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "'zipkin'; set it to otlp"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", **ENDPOINT}, "set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"),
    ],
)
def test_unknown_setting_is_refused(environment: Mapping[str, str], word: str) -> None:
    with pytest.raises(errors.BadRequest, match=word):
        _tracing.enabling_variable(environment)


@pytest.mark.parametrize("wish", ["auto", "on"])
def test_client_runs_untraced_unless_shoal_tracing_is_on(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    monkeypatch.setenv("SHOAL_TRACING", wish)
    with pytest.raises(errors.BadRequest):
        _tracing.start("worker")
    if wish == "on":
        with pytest.raises(errors.BadRequest):
            _tracing.start("client")
    else:
        with capture_logs() as logs:
            _tracing.start("client")
        assert [(line["log_level"], line["event"]) for line in logs] == [("warning", "tracing is off")]
        assert "zipkin" in logs[0]["reason"]
    assert _tracing.root("a") is _tracing.NOTHING


def test_without_tracing_every_span_is_the_same_nothing() -> None:
    spans = [
        _tracing.span("a", b=1),
        _tracing.root("a"),
        _tracing.client_span(job_pb2.LeaseRequest()),
        _tracing.Traces("step").span(0, "pull"),
        _tracing.NOTHING.child("a"),
    ]
    assert all(span is _tracing.NOTHING for span in spans)
    assert _tracing.in_current_context(len) is len
    with _tracing.NOTHING as span:
        span.set_attributes(a=1)


def test_span_outside_a_trace_is_not_recorded_and_root_begins_a_trace() -> None:
    with recorded() as recording:
        assert _tracing.span("apply") is _tracing.NOTHING
        assert _tracing.client_span(job_pb2.LeaseRequest()) is _tracing.NOTHING
        with _tracing.root("submit"), _tracing.client_span(job_pb2.SubmitRequest()), _tracing.root("inner"):
            assert len(_tracing.carrier()) == 55
    (submit,) = roots(recording.spans, "submit")
    assert tree(recording.spans, submit) == {"Submit": 1, "Submit/inner": 1}


def test_spans_of_a_step_nest_on_a_thread_and_not_across_steps() -> None:
    traces = _tracing.Traces("step", job="j")
    with recorded() as recording:
        with traces.span(0, "wait"), traces.span(0, "barrier"), traces.span(1, "pull"):
            pass
        traces.end(0, outcome="skipped")
        traces.close()
    zero, one = roots(recording.spans, "step")
    assert tree(recording.spans, zero) == {"wait": 1, "wait/barrier": 1}
    assert tree(recording.spans, one) == {"pull": 1}
    assert zero.attributes == {"shoal.job": "j", "shoal.step": 0, "shoal.outcome": "skipped"}
    assert one.attributes == {"shoal.job": "j", "shoal.step": 1, "shoal.outcome": "left"}


def test_oldest_steps_end_when_too_many_are_open() -> None:
    traces = _tracing.Traces("step", most=2)
    with recorded() as recording:
        for step in range(5):
            with traces.span(step, "pull"):
                pass
        assert [step.attributes["shoal.step"] for step in roots(recording.spans, "step")] == [0, 1, 2]
        traces.close()


class CountingSampler(Sampler):
    """Samples nothing, and counts the decisions."""

    decisions = 0

    def should_sample(self, *arguments: Any, **options: Any) -> SamplingResult:
        self.decisions += 1
        return ALWAYS_OFF.should_sample(*arguments, **options)

    def get_description(self) -> str:
        return "counting"


def test_sampling_is_decided_once_a_step() -> None:
    traces, sampler = _tracing.Traces("step"), CountingSampler()
    with recorded(sampler) as recording:
        assert traces.span(0, "pull") is _tracing.NOTHING
        assert traces.span(0, "push") is _tracing.NOTHING
        assert sampler.decisions == 1
        traces.end(0, outcome="accepted")
        traces.span(0, "pull")
        assert sampler.decisions == 2, "the ended step is still known"
    assert recording.spans == []


def test_a_call_is_bound_to_the_trace_of_the_thread_that_binds_it() -> None:
    carriers = []
    with recorded(), _tracing.root("pull"):
        bound = _tracing.in_current_context(lambda number: carriers.append((number, _tracing.carrier())))
        thread = threading.Thread(target=bound, args=(1,))
        thread.start()
        thread.join()
        bound(2)
        here = _tracing.carrier()
    assert carriers == [(1, here), (2, here)]


def test_failed_span_records_its_error_and_ends_once() -> None:
    with recorded() as recording:
        with pytest.raises(errors.Fenced), _tracing.root("push"):
            raise errors.Fenced("gone" + "x" * 1000)
        span = _tracing.root("pull")
        span.end(OSError("no route"))
        span.end()
        span.set_attributes(late=True)
    push, pull = recording.spans
    assert push.failed.startswith("FENCED: gone")
    assert len(push.failed) <= 500
    assert pull.failed == "OSError: no route"
    assert pull.attributes == {"error.type": "OSError"}


def test_spans_outlive_tracing() -> None:
    """Threads may be in the middle of one when it stops."""
    traces = _tracing.Traces("step")
    with recorded():
        entered = traces.span(0, "pull")
        entered.__enter__()
    child = entered.child("wait")
    child.end()
    entered.__exit__(None, None, None)
    traces.end(0)
    assert traces.span(1, "pull") is _tracing.NOTHING
