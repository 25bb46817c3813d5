"""Life of a role's process, with a role that does nothing: what /healthz reports, and how the process ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from unittest import mock

import prometheus_client
import pytest
import structlog
from typer.testing import CliRunner

from shoal import errors
from shoal._cli.app import app
from shoal._role.lifecycle import DrainState, StopSignals, run_role
from shoal._security import open_authorizer
from support.waiting import wait_until


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """What a role changes of its process is as it was."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    structlog.reset_defaults()
    prometheus_client.enable_created_metrics()  # type: ignore[no-untyped-call]  # not annotated there
    gc.unfreeze()


def fetch(address: str, path: str = "/healthz") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


class Nothing:
    address = "here:1"
    authorizer = open_authorizer()
    stopped = False

    def stop(self) -> None:
        self.stopped = True


def test_tracebacks_on_the_console_show_no_local_variables() -> None:
    """structlog's own choice shows them where rich is installed, as typer installs it."""
    code = """
import structlog
from shoal._role.logs import configure_logging
configure_logging("console", "info", role="server")
def present(token):
    raise ValueError("it failed")
try:
    present("secret-" + "token")
except ValueError:
    structlog.get_logger().exception("a call failed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "ValueError: it failed" in done.stderr
    assert "secret-token" not in done.stderr


def test_the_console_acts_on_no_text_in_a_log_line() -> None:
    """Reasons of jobs and messages of exceptions come from other processes."""
    code = """
import structlog
from shoal._role.logs import configure_logging
configure_logging("console", "info", role="coordinator")
hostile = "\\x1b]0;owned\\x07\\x1b[2J\\x9b2J\\u202eend"
class Odd:
    __repr__ = lambda _: hostile
log = structlog.get_logger()
log.info("job cancelled", reason=hostile, names=[hostile], odd=Odd())
log.info(hostile)
try:
    raise ValueError(hostile)
except ValueError:
    log.exception("a program failed")
"""
    environ = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=60, env=environ
    )
    assert done.stderr.count("]0;owned") >= 5
    assert "ValueError: ]0;owned[2J2Jend" in done.stderr
    assert not set(done.stderr) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_values_of_a_log_line_keep_their_types_on_the_console() -> None:
    """A dict is shown as a dict, not as a text in quotes, and the texts in it have no control characters."""
    code = """
import structlog
from shoal._role.logs import configure_logging
configure_logging("console", "info", role="coordinator")
bell = "a\x07b"
counts = {"of jobs": 2, bell: [bell, (1, None)]}
structlog.get_logger().info("values", counts=counts, names=["c d", bell], ratio=0.5, ready=True, none=None)
"""
    environ = os.environ | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True, timeout=60, env=environ
    )
    shown = done.stderr
    assert "counts={'of jobs': 2, 'ab': ['ab', (1, None)]}" in shown
    assert "names=['c d', 'ab']" in shown
    assert "ratio=0.5" in shown
    assert "ready=True" in shown
    assert "none=None" in shown
    assert "\\x07" not in shown


def test_health_follows_a_roles_life() -> None:
    role, seen, addresses, metrics, helpers = Nothing(), {}, [], [], []

    def start(registry: prometheus_client.CollectorRegistry, address: str) -> Nothing:
        prometheus_client.Counter("shoal_test_calls_total", "Calls.", registry=registry).inc()
        seen["start"] = fetch(address)

        def use() -> None:
            wait_until(lambda: fetch(address)[0] == 200, what="its being ready")
            metrics.append(fetch(address, "/metrics")[1])
            os.kill(os.getpid(), signal.SIGTERM)

        helpers.append(threading.Thread(target=use))
        helpers[0].start()
        addresses.append(address)
        return role

    def leave(running: Nothing, _enough: threading.Event) -> None:
        assert not running.stopped
        seen["leave"] = fetch(addresses[0])

    run_role("worker", start, metrics_listen="127.0.0.1:0", leave=leave)
    helpers[0].join()
    assert role.stopped
    assert (seen["start"], seen["leave"]) == ((503, "starting\n"), (503, "stopping\n"))
    assert "shoal_test_calls_total 1.0" in metrics[0]
    assert "shoal_worker_insecure 0.0" in metrics[0]
    assert "_created" not in metrics[0], "they are gauges to Prometheus, and promtool warns of their names"
    with pytest.raises(urllib.error.URLError):
        fetch(addresses[0])


def test_a_role_that_drains_by_an_order_is_not_ready_and_ends_when_it_is_drained() -> None:
    role, addresses, states = Nothing(), [], [DrainState.SERVING]
    seen: list[tuple[int, str]] = []
    helpers: list[threading.Thread] = []

    def start(_registry: prometheus_client.CollectorRegistry, address: str) -> Nothing:
        def use() -> None:
            wait_until(lambda: fetch(address)[0] == 200, what="its being ready")
            states.append(DrainState.DRAINING)
            wait_until(lambda: fetch(address) == (503, "draining\n"), what="its draining")
            states.append(DrainState.DRAINED)

        addresses.append(address)
        helpers.append(threading.Thread(target=use))
        helpers[0].start()
        return role

    def leave(_running: Nothing, stop_now: threading.Event) -> None:
        assert not stop_now.is_set()
        seen.append(fetch(addresses[0]))

    run_role("worker", start, metrics_listen="127.0.0.1:0", leave=leave, drain_state=lambda _: states[-1])
    helpers[0].join()
    assert role.stopped
    assert seen == [(503, "stopping\n")]


def test_a_signal_that_another_thread_takes_ends_it() -> None:
    main, noticed, helpers = threading.get_ident(), [], []
    role = Nothing()

    def waits() -> bool:
        stack = [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]  # noqa: SLF001 - documented so
        return stack[:3] == ["wait", "wait", "_await_end"]  # in a condition, in an event

    def take() -> None:
        wait_until(waits, what="its waiting for a signal")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        try:
            wait_until(lambda: role.stopped, timeout_s=10, what="its end")
            noticed.append(True)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def start(registry: prometheus_client.CollectorRegistry, address: str) -> Nothing:
        helpers.append(threading.Thread(target=take))
        helpers[0].start()
        return role

    signal.signal(signal.SIGTERM, lambda *_: None)
    run_role("worker", start, metrics_listen="127.0.0.1:0")
    helpers[0].join()
    assert noticed == [True]


class Guarded(threading.Event):
    """An event with a lock that `set` takes, as `wait` holds one for a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def set(self) -> None:
        with self.lock:
            super().set()


def test_signal_during_a_wait_is_received() -> None:
    signals = StopSignals()
    signals.stop, signals.stop_now = stop, stop_now = Guarded(), Guarded()
    with stop.lock:
        signal.raise_signal(signal.SIGTERM)
    assert stop.wait(10)
    assert not stop_now.is_set()
    with stop_now.lock:
        signal.raise_signal(signal.SIGTERM)
    assert stop_now.wait(10)


def test_pages_are_found_where_the_role_is(capfd: pytest.CaptureFixture[str]) -> None:
    def start(_registry: prometheus_client.CollectorRegistry, address: str) -> Nothing:
        raise errors.StoreFailed(f"pages at {address}")

    with pytest.raises(SystemExit) as ended:
        run_role("server", start, metrics_listen="0.0.0.0:0", advertise="server-0.server")
    assert ended.value.code == 1
    assert "pages at server-0.server:" in capfd.readouterr().err


@pytest.mark.parametrize("role", ["coordinator", "server"])
def test_an_insecure_role_says_so(role: str, capfd: pytest.CaptureFixture[str]) -> None:
    with mock.patch("shoal._role.lifecycle.run_role") as run:
        result = CliRunner().invoke(app, [role, "--insecure", "--listen", "0.0.0.0:0"])
    assert result.exit_code == 0, result.output
    assert run.call_args.kwargs["insecure"]
    assert "started with --insecure" in result.stderr


def test_a_metric_shows_that_a_role_is_insecure() -> None:
    seen = []

    def start(registry: prometheus_client.CollectorRegistry, _address: str) -> Nothing:
        seen.append(registry.get_sample_value("shoal_server_insecure"))
        raise errors.StoreFailed("that is enough")

    with pytest.raises(SystemExit):
        run_role("server", start, metrics_listen="127.0.0.1:0", insecure=True)
    assert seen == [1.0]


def test_a_wrong_option_is_wrong_usage() -> None:
    def start(_registry: prometheus_client.CollectorRegistry, _address: str) -> Nothing:
        raise AssertionError

    with pytest.raises(SystemExit) as ended:
        run_role("server", start, metrics_listen="localhost")
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("error", "code"), [(errors.PortInUse, 3), (errors.Unreachable, 3), (errors.BadRequest, 2), (errors.StoreLocked, 1)]
)
def test_role_that_cannot_start_ends_with_the_exit_code_of_the_error(error: type[errors.ShoalError], code: int) -> None:
    def start(_registry: prometheus_client.CollectorRegistry, _address: str) -> Nothing:
        raise error("not today")

    with pytest.raises(SystemExit) as ended:
        run_role("server", start, metrics_listen="127.0.0.1:0")
    assert ended.value.code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_role_that_waits_during_its_start(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses, helpers = [], []

    def start(_registry: prometheus_client.CollectorRegistry, address: str) -> Nothing:
        addresses.append(address)
        helpers.append(threading.Timer(0.1, os.kill, (os.getpid(), number)))
        helpers[0].start()
        threading.Event().wait()
        raise AssertionError

    run_role("server", start, metrics_listen="127.0.0.1:0")
    helpers[0].join()
    assert "stopped before it was ready" in capfd.readouterr().err
    assert gc.isenabled()
    with pytest.raises(urllib.error.URLError):
        fetch(addresses[0])


def test_role_ends_when_its_supervisor_is_gone_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    lifeline, parent = os.pipe()
    read = os.read
    monkeypatch.setattr("shoal._role.lifecycle.os.read", lambda _, count: read(lifeline, count))

    def start(_registry: prometheus_client.CollectorRegistry, _address: str) -> Nothing:
        os.close(parent)
        threading.Event().wait()
        raise AssertionError

    run_role("server", start, metrics_listen="127.0.0.1:0", supervised=True)
    os.close(lifeline)
