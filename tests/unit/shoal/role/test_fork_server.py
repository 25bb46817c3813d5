"""Fork server: what a forked process gets, how its end is seen, and what it does not inherit."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal._role.fork_server import ForkedProcess, ForkServer
from support.waiting import wait_until

# "end N" ends with the status N; "show" prints what it is and waits for the end of its standard input.
SERVER = """
import json, os, signal, socket, sys
from shoal._role import fork_server

def load(role):
    if role == "broken":
        raise ImportError("no such role")
    os.environ["LOADED"] = os.environ.get("LOADED", "") + role + " "

if wanted := fork_server.serve(socket.socket(fileno=int(sys.argv[1])), load):
    match wanted:
        case ["end", status]:
            sys.exit(int(status))
        case ["show", *rest]:
            files = [it for it in range(3, 64) if os.path.exists(f"/proc/self/fd/{it}")]
            shown = {"rest": rest, "files": files, "loaded": os.environ["LOADED"]}
            shown |= {"leader": os.getsid(0) == os.getpid(), "name": open("/proc/self/comm").read().strip()}
            shown |= {"interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler}
            print(json.dumps(shown), flush=True)
            print("said", file=sys.stderr, flush=True)
            sys.stdin.read()
        case _:
            raise SystemExit("unknown")
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer(os.environ, show_log=False, command=[sys.executable, "-c", SERVER])
    yield server
    server.close()


def ended(process: ForkedProcess) -> int:
    status = process.wait(20.0)
    process.close()
    process.stdout.close()
    return status


def test_a_fork_has_its_own_session_name_streams_and_signals_and_no_other_file(
    forks: ForkServer, tmp_path: Path
) -> None:
    other = forks.start("other", ["show"], None)
    with (tmp_path / "log").open("w+b") as log:
        process = forks.start("server-7", ["show", "--flag", "value"], log)
        shown = json.loads(process.stdout.readline())
        assert shown.pop("loaded").split()[0] == "show"
        assert shown == {
            "rest": ["--flag", "value"],
            "files": [],
            "leader": True,
            "name": "shoal:server-7",
            "interrupts": True,
        }
        assert process.poll() is None
        process.stdin.close()
        assert ended(process) == 0
        assert (tmp_path / "log").read_text() == "said\n"
    assert other.poll() is None, "each has a pipe of its own"
    other.stdin.close()
    assert ended(other) == 0


@pytest.mark.parametrize("status", [0, 3])
def test_exit_status_is_seen_once_it_has_ended(forks: ForkServer, status: int) -> None:
    process = forks.start("role", ["end", str(status)], None)
    wait_until(lambda: process.poll() is not None, what="the end of the process")
    assert ended(process) == process.poll() == status
    process.send_signal(signal.SIGKILL)  # has no effect any more


def test_signals_reach_a_fork(forks: ForkServer) -> None:
    process = forks.start("role", ["show"], None)
    assert process.stdout.readline()
    assert process.pid
    with pytest.raises(TimeoutError, match=rf"process {process.pid} runs after 0.01 s"):
        process.wait(0.01)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == -signal.SIGTERM


def test_a_role_that_cannot_be_loaded_fails_in_its_own_process(forks: ForkServer, tmp_path: Path) -> None:
    forks.load("broken")
    with (tmp_path / "log").open("w+b") as log:
        assert ended(forks.start("role", ["broken"], log)) == 1
        assert (tmp_path / "log").read_text() == "unknown\n"
    assert ended(forks.start("role", ["end", "0"], None)) == 0, "the fork server goes on"


# Each test of threads starts one in a fork server of its own.
THREAD = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"


def test_a_role_is_not_forked_beside_a_thread(tmp_path: Path) -> None:
    """A debugger's or a tracer's `sitecustomize` may have started it. The process loads its code itself instead."""
    server = ForkServer(os.environ, show_log=False, command=[sys.executable, "-c", THREAD + SERVER])
    with (tmp_path / "log").open("w+b") as log:
        process = server.start("role", ["version"], log)
        assert b"shoal" in process.stdout.read()
        assert ended(process) == 0, (tmp_path / "log").read_text()
    server.close()


def test_what_is_not_made_yet_ends_with_its_fork_server() -> None:
    server = ForkServer(os.environ, show_log=False, command=[sys.executable, "-c", "import time; time.sleep(60)"])
    process = server.start("role", ["end", "0"], None)
    assert not process.wait_started(0.01)
    assert (process.poll(), process.pid) == (None, 0)
    server.kill()
    assert ended(process) == -signal.SIGKILL
    server.close()


def test_a_fork_server_that_does_not_start_says_why() -> None:
    server = ForkServer(os.environ, show_log=False, command=[sys.executable, "-c", "raise SystemExit('no memory')"])
    try:
        assert ended(server.start("role", ["end", "0"], None)) == -signal.SIGKILL
        wait_until(lambda: not server.running, what="the end of the fork server")
        assert server.tail() == "no memory"
    finally:
        server.close()
