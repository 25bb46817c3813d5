"""Traces over real servers and a real coordinator: one trace a step, and no failure of tracing disturbs training."""

import gc
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

import shoal
from shoal import _tracing, consistency, errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._rpc.membership import MembershipClient
from shoal._training.overlap import Pipeline
from shoal.partitioners import FixedShards
from shoal.v1 import coordinator_pb2, header_pb2, job_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_server.process import Server, ServerConfig
from shoal_worker.messages import Instructions
from shoal_worker.trainer import DaemonMessages, train
from support.clusters.coordinator_rig import Rig
from support.clusters.shard_servers import ShardServers
from support.traces import collector, recorded, roots, tree
from support.waiting import wait_until

TESTS = Path(__file__).parents[1]
DOCS = (Path(__file__).parents[2] / "docs" / "how-to" / "tracing.md").read_text()
ELEMENTS = 300_000  # enough for memory to be shared
VARIABLES = {"w": Variable((ELEMENTS,), partitioner=FixedShards(2))}
GRADIENT = {"w": np.ones(ELEMENTS, np.float32)}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def traced(servers: ShardServers, name: str = "a", **options: Any) -> Pipeline:
    return Pipeline(servers.worker(name), traces=_tracing.Traces("step", worker=name), **options)


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
def test_a_step_on_two_servers_is_one_trace(transport: str) -> None:
    with (
        recorded() as recording,
        ShardServers(VARIABLES, servers=2, transport=transport) as servers,
        traced(servers, overlap=False) as pipeline,
    ):
        pipeline.pull()
        pipeline.push(GRADIENT)
    spans = recording.spans
    (step,) = roots(spans, "step")
    assert {span.trace for span in spans} == {step.trace}
    assert tree(spans, step) == {
        "pull": 1,
        "pull/Pull": 2,
        "pull/Pull/wait": 2,
        "push": 1,
        "push/Push": 2,
        "push/Push/assemble": 2,
        "push/Commit": 2,
        "push/Commit/apply": 2,
    }
    assert step.attributes == {
        "shoal.worker": "a",
        "shoal.step": 0,
        "shoal.outcome": "accepted",
        "shoal.staleness": 0,
    }
    served = [span.attributes for span in spans if span.name in ("Pull", "Push", "Commit")]
    assert all(it == {"shoal.job": "job", "shoal.worker": "a", "shoal.step": 0} for it in served)


def test_with_overlap_a_pull_and_a_push_belong_to_the_step_that_they_are_for() -> None:
    steps = 4
    with (
        recorded() as recording,
        ShardServers(VARIABLES, mode=consistency.BoundedStaleness(2)) as servers,
        traced(servers, overlap=True) as pipeline,
    ):
        for _ in range(steps):
            pipeline.pull()
            pipeline.settle()
            pipeline.push(GRADIENT)
        pipeline.settle()
    spans = recording.spans
    *taken, left = roots(spans, "step")
    assert [step.attributes["shoal.step"] for step in taken] == [*range(steps)]
    assert left.attributes["shoal.outcome"] == "left", "fetched ahead, for a step that was never taken"
    for step in taken:
        number = step.attributes["shoal.step"]
        within = [span for span in spans if span.trace == step.trace]
        counts = Counter(span.name for span in within)
        assert counts["pull"] == counts["push"] == counts["Pull"] == counts["Push"] == 1
        # The pull is asked for with the stamp of the step before.
        served = {span.name: span.attributes["shoal.step"] for span in within if span.name in ("Pull", "Push")}
        assert served == {"Pull": max(0, number - 1), "Push": number}
        assert all(step.start <= span.start for span in within)
        assert step.end >= max(span.end for span in within if span.name != "settle")


def test_gradients_that_come_one_by_one_are_pushed_in_their_step() -> None:
    with recorded() as recording, ShardServers(VARIABLES) as servers, traced(servers, overlap=False) as pipeline:
        pipeline.pull()
        pipeline.push(iter(GRADIENT.items()))
    spans = recording.spans
    (step,) = roots(spans, "step")
    assert tree(spans, step)["push/Push/apply"] == 1


def test_a_refused_push_says_why_and_its_step_ends_with_the_skip() -> None:
    with recorded() as recording, ShardServers(VARIABLES) as servers, traced(servers, overlap=False) as pipeline:
        pipeline.pull()
        with pytest.raises(errors.NonFiniteGradient):
            pipeline.push({"w": np.full(ELEMENTS, np.nan, np.float32)})
        pipeline.skip()
    spans = recording.spans
    (step,) = roots(spans, "step")
    assert step.attributes["shoal.outcome"] == "skipped"
    assert tree(spans, step)["skip/Push"] == 1
    failed = {span.name: span for span in spans if span.failed}
    assert failed.keys() == {"push", "Push", "assemble"}
    assert all(span.failed.startswith("NON_FINITE_GRADIENT: ") for span in failed.values())
    assert failed["push"].attributes["error.type"] == "NON_FINITE_GRADIENT"


def test_a_pull_that_has_to_wait_shows_it() -> None:
    with (
        recorded() as recording,
        ShardServers(VARIABLES, mode=consistency.Synchronous()) as servers,
        servers.worker("b") as other,
        traced(servers, overlap=False) as pipeline,
    ):
        pipeline.pull()
        pipeline.push(GRADIENT)
        waiting = threading.Thread(target=pipeline.pull)
        waiting.start()
        wait_until(lambda: servers.waiting() == 1, what="the pull")
        before = time.time_ns()
        other.push(GRADIENT)
        waiting.join()
    (wait,) = [span for span in recording.spans if span.name == "wait" and span.end > before]
    assert wait.start < before


@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_step_that_is_not_sampled_has_no_spans(transport: str) -> None:
    with (
        recorded(ParentBased(ALWAYS_OFF)) as recording,
        ShardServers(VARIABLES, servers=2, transport=transport) as servers,
        traced(servers, overlap=False) as pipeline,
    ):
        with pipeline.traces.span(0, "compute"):
            assert _tracing.carrier() == b""
            assert _tracing.metadata() is None
        pipeline.pull()
        pipeline.push(GRADIENT)
        assert servers.versions() == [1, 1]
    assert recording.spans == []


BAD = {
    "nothing": b"",
    "noise": bytes(range(200, 255)),
    "text": b"x" * 55,
    "too long": b"00-" + b"a" * (1 << 20),
    "cut": f"00-{TRACE}-{SPAN}-0".encode(),
    "and more": f"00-{TRACE}-{SPAN}-01-more".encode(),
    "version": f"ff-{TRACE}-{SPAN}-01".encode(),
    "capitals": f"00-{TRACE.upper()}-{SPAN}-01".encode(),
    "no trace": f"00-{'0' * 32}-{SPAN}-01".encode(),
    "no span": f"00-{TRACE}-{'0' * 16}-01".encode(),
    "not sampled": f"00-{TRACE}-{SPAN}-00".encode(),
}
GOOD = f"00-{TRACE}-{SPAN}-01".encode()


def test_contexts_that_make_no_sense_are_ignored() -> None:
    with recorded() as recording, ShardServers(VARIABLES) as servers, servers.lane() as lane:

        def requests(context: bytes) -> pb.PullRequest:
            stamp = header_pb2.Stamp(job="job", generation=1, trace=context)
            return pb.PullRequest(stamp=stamp, shards=[0, 1], headers_only=True)

        for context in BAD.values():
            assert list(servers.stubs[0].Pull(requests(context)))
            assert lane.pull(requests(context))
        assert recording.spans == []
        lane.pull(requests(GOOD))
        list(servers.stubs[0].Pull(requests(GOOD)))
    spans = recording.spans
    assert [span.name for span in spans if f"{span.parent:016x}" == SPAN] == ["Pull", "Pull"]
    assert {f"{span.trace:032x}" for span in spans} == {TRACE}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.stop()


def test_contexts_in_metadata_that_make_no_sense_are_ignored(rig: Rig) -> None:
    with recorded() as recording:
        for context in (context.decode() for context in BAD.values() if context.isascii() and len(context) < 100):
            rig.client.jobs.List(job_pb2.ListRequest(), metadata=(("traceparent", context),))
        assert recording.spans == []
        rig.client.jobs.List(job_pb2.ListRequest(), metadata=(("traceparent", GOOD.decode()),))
        (listed,) = recording.spans
    assert (listed.name, f"{listed.trace:032x}", f"{listed.parent:016x}") == ("List", TRACE, SPAN)


def test_heartbeats_begin_no_trace(rig: Rig) -> None:
    with recorded() as recording:
        rig.beat("s0")
        rig.member_status()
        assert recording.spans == []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Runs a coordinator and a server in this process. Yields the coordinator's address."""
    with ExitStack() as roles:
        config = CoordinatorConfig(listen="127.0.0.1:0", checkpoints=str(tmp_path))
        coordinator = start_coordinator(config, CollectorRegistry())
        roles.callback(coordinator.stop)
        server = Server(ServerConfig("server-0", coordinator.address, checkpoints=str(tmp_path)), CollectorRegistry())
        roles.callback(server.stop)
        yield coordinator.address


def check_work(address: str, job: str) -> None:
    """Does what a worker does: waits for the job, and trains it."""
    way = CoordinatorClient(address)
    replies: list[coordinator_pb2.HeartbeatReply] = []
    registration = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="worker-0")
    with closing(way), MembershipClient(way, registration, on_reply=replies.append) as membership:
        membership.start()
        wait_until(lambda: replies and replies[-1].job == job, what="the assignment")
        part = membership.incarnation, replies[-1].assignment
        paths, allowed = (str(TESTS),), (".",)
        told = Instructions(address, job, "worker-0", *part, "cpu", 0.0, paths, allowed, retry_for_s=5.0, reports_fd=-1)
        assert not train(told, lambda _: None, DaemonMessages()).error


def test_training_a_job_is_one_trace_a_step_through_every_role(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    with recorded() as recording, shoal.Client(cluster) as client:
        job = client.submit(shoal.Job("support.programs.traced:Traced", name="j", batch_size=4, overlap=False))
        check_work(cluster, "j")
        assert job.checkpoint(20).number == 1
    spans = recording.spans
    ours = {span.name for span in spans if span.name.islower()}  # others are named after calls and effects
    assert ours <= {*re.findall(r"\w+", DOCS)}
    steps = roots(spans, "step")
    first, second = steps[:2]
    assert tree(spans, first) == {
        "wait": 1,
        "wait/barrier": 1,
        "wait/barrier/Pull": 1,
        "wait/barrier/Pull/wait": 1,
        "wait/Lease": 1,
        "wait/Lease/Lease": 1,
        "pull": 1,
        "pull/Pull": 1,
        "pull/Pull/wait": 1,
        "read": 1,
        "compute": 1,
        "push": 1,
        "push/Push": 1,
        "push/Push/assemble": 1,
        "push/Push/apply": 1,
    }
    assert {"shoal.job": "j", "shoal.worker": "worker-0", "shoal.rank": 0, "shoal.step": 0}.items() <= (
        first.attributes.items()
    )
    assert second.attributes["shoal.step"] == 1
    (compute,) = [span for span in spans if span.name == "compute" and span.trace == first.trace]
    assert compute.attributes == {"shoal.samples": 4}
    (submit,) = roots(spans, "submit")
    assert tree(spans, submit) == {"Submit": 1, "Submit/Submit": 1}
    (enter,) = roots(spans, "enter")
    assert tree(spans, enter)["Join/Join"] >= 1
    assert tree(spans, enter)["Pull"] == 1, "of the values that are overwritten with the program's own"
    (created,) = roots(spans, "CreateShards")
    assert tree(spans, created) == {"CreateShards": 1, "CreateShards/CreateShards": 1}
    (checkpoint,) = [span for span in roots(spans, "checkpoint") if span.attributes.get("shoal.checkpoint") == "j/1"]
    below = tree(spans, checkpoint)
    assert {
        "TakeCut/HoldCommits/HoldCommits",
        "TakeCut/Save/Save",
        "CommitCheckpoint/CollectFiles/CollectFiles",
    } <= below.keys()


def test_a_session_and_a_readers_pull_are_traced(cluster: str) -> None:
    with recorded() as recording, shoal.Client(cluster) as client:
        with client.session("s", variables={"w": np.zeros(3, np.float32)}) as session:
            session.pull()
            session.push({"w": np.ones(3, np.float32)})
            session.pull()
        client.pull("s")
        # A server may still be ending its own when the client has all that it asked for.
        wait_until(lambda: sum(span.name == "Pull" for span in recording.spans) == 4, what="the pulls' spans")
    spans = recording.spans
    first, second = roots(spans, "step")
    assert tree(spans, first) == {
        "pull": 1,
        "pull/Pull": 1,
        "pull/Pull/wait": 1,
        "push": 1,
        "push/Push": 1,
        "push/Push/assemble": 1,
        "push/Push/apply": 1,
    }
    assert second.attributes["shoal.outcome"] == "left"
    (enter,) = roots(spans, "enter")
    assert {"Submit/Submit", "Register/Register", "Describe/Describe", "Join/Join"} <= tree(spans, enter).keys()
    assert tree(spans, roots(spans, "report")[0]) == {"Report": 1, "Report/Report": 1}
    (pull,) = roots(spans, "pull")
    assert tree(spans, pull) == {
        **{"GetPlacement": 1, "GetPlacement/GetPlacement": 1, "GetTicket": 1, "GetTicket/GetTicket": 1},
        **{"Pull": 1, "Pull/wait": 1},
    }


# What the environment asks for.


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Removes all tracing settings from the environment. Stops tracing after the test."""
    for name in [*os.environ]:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.delenv("SHOAL_TRACING", raising=False)
    yield monkeypatch
    _tracing.stop()


def test_spans_reach_a_collector_with_the_names_of_the_role(environment: pytest.MonkeyPatch) -> None:
    with collector() as (received, variables):
        for name, value in variables.items():
            environment.setenv(name, value)
        _tracing.start("server", "server-0")
        with _tracing.root("step", job="j"):
            pass
        _tracing.stop()
        assert received.instances == {("shoal-server", "server-0")}
        assert [(span.name, span.attributes) for span in received.spans] == [("step", {"shoal.job": "j"})]
        environment.setenv("OTEL_SERVICE_NAME", "mine")
        environment.setenv("OTEL_TRACES_SAMPLER", "always_off")
        _tracing.start("server", "server-0")
        assert _tracing.root("step") is _tracing.NOTHING
        environment.delenv("OTEL_TRACES_SAMPLER")
        _tracing.stop()
        _tracing.start("server", "server-0")
        _tracing.root("step").end()
        _tracing.stop()
        assert ("mine", "server-0") in received.instances


def test_a_collector_that_hangs_does_not_hold_up_the_end(environment: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
        _tracing.start("worker")
        with ShardServers(VARIABLES) as servers, traced(servers, overlap=False) as pipeline:
            for _ in range(3):
                pipeline.pull()
                pipeline.push(GRADIENT)
            assert servers.versions() == [3, 3]
        start = time.monotonic()
        _tracing.stop(within_s=0.2)
        assert time.monotonic() - start < 3
        (flush,) = [thread for thread in threading.enumerate() if thread.name == "traces end"]
        assert flush.daemon, "or the process would wait for it"
        flush.join()  # it gives up by itself, too; nothing of a test outlives it


def spans_in_memory() -> int:
    return sum(issubclass(type(it), ReadableSpan) for it in gc.get_objects())  # not isinstance: some are dead proxies


def test_spans_without_a_collector_are_bounded(environment: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        environment.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
        environment.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
        _tracing.start("worker")
        before = spans_in_memory()  # of other tests
        for _ in range(1000):
            _tracing.root("step").end()
        assert spans_in_memory() - before <= 2 * 16, "those in the queue, and those that are being sent"
        _tracing.stop(within_s=10)


def test_a_program_that_has_set_up_opentelemetry_gets_the_spans_of_its_clients(environment: pytest.MonkeyPatch) -> None:
    script = """
import shoal
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with shoal.Client("127.0.0.1:1", retry_for_s=0) as client, provider.get_tracer("mine").start_as_current_span("mine"):
    try:
        client.cancel("a")
    except shoal.ShoalError:
        pass
first, second, third = exporter.get_finished_spans()
print(first.name, second.name, third.name, second.parent == third.context)
"""
    assert run(script) == "Cancel cancel mine True"


def test_opentelemetry_is_not_imported_without_tracing(environment: pytest.MonkeyPatch) -> None:
    script = """
import sys, shoal
from shoal import _tracing
with shoal.Client("127.0.0.1:1") as client, _tracing.Traces("step").span(0, "pull"), _tracing.root("pull"):
    assert _tracing.metadata() is None
print(any(name.startswith("opentelemetry") for name in sys.modules))
"""
    assert run(script) == "False"
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environment.setenv("SHOAL_TRACING", "off")
    assert run(script) == "False"


LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
"""


ROLE = "import sys; from shoal._cli import main; sys.argv[1:] = ['coordinator', '--listen', '127.0.0.1:0']; main()"


def test_a_role_that_is_to_trace_and_cannot_says_so_and_does_not_start(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    said = check_refused(f"{LACKING}\n{ROLE}")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT enables tracing" in said
    assert "pip install 'shoal[otel]'" in said


# What the SDK refuses, each with an error of its own, the last one without a word about the variable.
REFUSED = {
    "OTEL_EXPORTER_OTLP_TIMEOUT": "10s",
    "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": "zstd",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "many",
    "OTEL_BSP_MAX_QUEUE_SIZE": "10",
}


@pytest.mark.parametrize(("variable", "value"), REFUSED.items())
def test_invalid_tracing_settings_leave_a_client_untraced_and_end_a_role(
    environment: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    before = {*threading.enumerate()}
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    environment.setenv(variable, value)
    with capture_logs() as logs, shoal.Client("127.0.0.1:1", retry_for_s=0):
        pass
    assert [(line["log_level"], line["event"]) for line in logs] == [("warning", "tracing is off")]
    assert f" {variable}" in logs[0]["reason"]
    assert "secret" not in logs[0]["reason"]
    assert _tracing.root("a") is _tracing.NOTHING
    with pytest.raises(errors.BadRequest, match=rf"OTEL_EXPORTER_OTLP_ENDPOINT enables .* correct .*{variable}.*=off"):
        _tracing.start("server", "server-0")
    assert {*threading.enumerate()} <= before, "nothing is left of an exporter"


def test_role_does_not_start_with_invalid_tracing_settings(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SHOAL_TRACING", "on")
    environment.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "10s")
    said = check_refused(ROLE)
    assert "could not convert string to float: '10s'" in said
    assert "correct OTEL_EXPORTER_OTLP_TIMEOUT, or set SHOAL_TRACING=off" in said


def check_refused(script: str) -> str:
    """Returns the error of a role that does not start."""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    return ran.stderr


def run(script: str) -> str:
    """Returns what a script prints in a process of its own."""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
