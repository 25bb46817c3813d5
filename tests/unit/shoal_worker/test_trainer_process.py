"""Trainer process: its end is always reported, it ends with all that it started, and it is isolated."""

import os
import pwd
import queue
import select
import signal
import sys
import textwrap
import threading
from collections.abc import Sequence

import psutil
import pytest

from shoal_worker.isolation import TrainerIsolation, TrainerLimits, TrainerUser
from shoal_worker.messages import Instructions, TicketReply, TicketWanted
from shoal_worker.trainer_process import TrainerExit, TrainerProcess

INSTRUCTIONS = Instructions(
    coordinator="127.0.0.1:1",
    job="digits",
    worker="worker-0",
    incarnation=1,
    assignment=1,
    device="cpu",
    device_memory_limit=0,
    paths=(),
    allow_programs=(),
    retry_for_s=1,
    reports_fd=-1,
)


# A process in a session of its own, whose parent ends at once.
ESCAPE = """
    import os, signal, subprocess, sys
    escape = "import os, time; os.fork() and os._exit(0); os.setsid(); print(os.getpid(), flush=True); time.sleep(1000)"
    escaped = subprocess.Popen([sys.executable, "-S", "-c", escape], stdout=subprocess.PIPE)
    print(escaped.stdout.readline().decode().strip(), flush=True)
    escaped.wait()
"""


class Started:
    """A process that runs `code`, or another command, its lines of output, and its end."""

    def __init__(self, code: str = "", isolation: TrainerIsolation | None = None, command: Sequence[str] = ()) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.ends: queue.Queue[TrainerExit] = queue.Queue()
        self.wanted: queue.Queue[TicketWanted] = queue.Queue()
        self.process = TrainerProcess(
            INSTRUCTIONS,
            isolation or TrainerIsolation(),
            on_report=lambda _: None,
            on_ticket_wanted=self._give,
            on_line=self.lines.put,
            on_end=self.ends.put,
            command=command or (sys.executable, "-u", "-S", "-c", textwrap.dedent(code)),
        )

    def _give(self, wanted: TicketWanted) -> TicketReply:
        self.wanted.put(wanted)
        return TicketReply("t" * 4_000, 600.0)


# A process that requests COUNT tickets at once.
WANTS_TICKETS = """
    import json, os, sys, signal
    reports = json.loads(sys.stdin.readline())["reports_fd"]
    for _ in range(COUNT):
        os.write(reports, b'{"TicketWanted":{"has_one":true}}\\n')
"""


def test_a_trainer_gets_the_ticket_that_it_requests() -> None:
    started = Started(textwrap.dedent(WANTS_TICKETS).replace("COUNT", "1") + "print(sys.stdin.readline().strip())")
    assert started.lines.get(timeout=20).encode() + b"\n" == TicketReply("t" * 4_000, 600.0).to_line()
    assert started.ends.get(timeout=20).status == 0
    assert started.wanted.get_nowait() == TicketWanted(has_one=True)


def test_a_trainer_that_does_not_read_its_messages_does_not_block_its_daemon() -> None:
    """More than a pipe holds. A blocked write would hold the lock that the daemon's next message needs."""
    started = Started(textwrap.dedent(WANTS_TICKETS).replace("COUNT", "40") + "signal.pause()")
    for _ in range(40):
        started.wanted.get(timeout=20)
    started.process.leave_after_batch()
    started.process.stop(grace_s=20)
    assert started.ends.get(timeout=20).status == -signal.SIGTERM


@pytest.mark.parametrize("sent", ["b'[]\\n'", "b'[' * 100_000 + b'\\n'", "b'x' * (16 << 20)"])
def test_what_a_program_writes_to_the_reports_does_not_end_their_reader(sent: str) -> None:
    """A message of 16 MiB ends there, so that the daemon does not keep a line without an end."""
    code = f"""
        import json, os, sys
        reports = os.fdopen(json.loads(sys.stdin.readline())["reports_fd"], "wb")
        reports.write({sent} + b'{{"TicketWanted":{{"has_one":true}}}}\\n')
        reports.flush()
        print(len(sys.stdin.readline()))
    """
    started = Started(code)
    assert int(started.lines.get(timeout=20)) > 4_000
    assert started.ends.get(timeout=20).status == 0


def test_the_end_of_a_trainer_that_closed_its_input_is_reported() -> None:
    started = Started("import os, signal; os.close(0); print('closed'); signal.pause()")
    assert started.lines.get(timeout=20) == "closed"
    started.process.leave_after_batch()  # fails, and stays in the buffer of the pipe
    started.process.stop(grace_s=20)
    assert started.ends.get(timeout=20) == TrainerExit(-15, None)


def test_a_trainer_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon can start no thread, as when the limit on threads is reached."""
    before = psutil.Process().children()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="cannot watch the trainer: can't start new thread"):
        Started("import signal; signal.pause()")
    assert psutil.Process().children() == before, "it was reaped"


class TestProcessesOfATrainer:
    """A grandchild that has left the trainer's process group, and whose parent has ended, ends with the trainer."""

    @pytest.mark.parametrize(
        ("last", "status"),
        [("sys.exit(3)", 3), ("os._exit(0)", 0), ("os.kill(os.getpid(), signal.SIGKILL)", -9), ("os.abort()", -6)],
    )
    def test_end_when_it_ends_by_itself(self, last: str, status: int) -> None:
        started = Started(textwrap.dedent(ESCAPE) + last)
        escaped = int(started.lines.get(timeout=20))
        assert started.ends.get(timeout=20) == TrainerExit(status, None)
        assert not psutil.pid_exists(escaped)

    def test_end_when_it_is_stopped_and_ignores_that(self) -> None:
        deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf')\nwhile True: signal.pause()"
        started = Started(textwrap.dedent(ESCAPE) + deaf)
        escaped = int(started.lines.get(timeout=20))
        assert started.lines.get(timeout=20) == "deaf"
        started.process.stop(grace_s=0.1)
        assert started.ends.get(timeout=20) == TrainerExit(-9, None)
        assert not psutil.pid_exists(escaped)

    def test_end_with_the_daemon_though_the_trainer_is_stuck(self) -> None:
        """A stopped process stands for one that is stuck in C code, so that no thread of its own can end it."""
        daemon, answers = os.pipe()
        if (pid := os.fork()) == 0:  # a daemon, which is killed
            started = Started(textwrap.dedent(ESCAPE) + "print(os.getpid())\nos.kill(os.getpid(), signal.SIGSTOP)")
            told = [started.lines.get(timeout=20) for _ in range(2)]
            os.write(answers, " ".join(told).encode())
            signal.pause()
        os.close(answers)
        try:
            family = [os.pidfd_open(int(each)) for each in os.read(daemon, 100).split()]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(daemon)
        for each in family:
            assert select.select([each], [], [], 20)[0], "it has ended"
            os.close(each)


class TestLimits:
    def test_are_those_of_the_options_and_there_are_no_core_dumps(self) -> None:
        limits = TrainerLimits(memory=1 << 30, open_files=77, processes=99)
        kinds = "RLIMIT_CORE RLIMIT_DATA RLIMIT_NOFILE RLIMIT_NPROC"
        code = f"import resource as r; print([r.getrlimit(getattr(r, kind)) for kind in '{kinds}'.split()])"
        started = Started(code, TrainerIsolation(limits=limits))
        assert started.lines.get(timeout=20) == str([(limit, limit) for limit in (1, 1 << 30, 77, 99)])

    def test_core_dumps_are_off_without_options(self) -> None:
        started = Started("import resource as r; print(r.getrlimit(r.RLIMIT_CORE))")
        assert started.lines.get(timeout=20) == "(1, 1)"


class TestAnotherUser:
    @pytest.fixture
    def nobody(self) -> TrainerUser:
        if os.geteuid():
            pytest.skip("only root may start processes of another user")
        found = pwd.getpwnam("nobody")
        return TrainerUser("nobody", found.pw_uid, found.pw_gid, "")

    def test_has_its_own_ids_and_folder_and_the_pipes_of_the_daemon(self, nobody: TrainerUser) -> None:
        script = 'id -u; id -G; stat -c "%u %a" "$HOME"; echo "$HOME"; read line; echo "${line%%,*}"; exit 4'
        started = Started(isolation=TrainerIsolation(user=nobody), command=("/bin/sh", "-c", script))
        ids = [started.lines.get(timeout=20) for _ in range(3)]
        assert ids == [str(nobody.uid), str(nobody.gid), f"{nobody.uid} 700"]
        home = started.lines.get(timeout=20)
        assert started.lines.get(timeout=20).startswith('{"coordinator"'), "the instructions arrived"
        assert started.ends.get(timeout=20) == TrainerExit(4, None)
        assert not os.path.exists(home)

    def test_is_stopped_by_the_daemon(self, nobody: TrainerUser) -> None:
        command = ("/bin/sh", "-c", 'trap "" TERM; echo deaf; while :; do sleep 1000; done')
        started = Started(isolation=TrainerIsolation(user=nobody), command=command)
        assert started.lines.get(timeout=20) == "deaf"
        started.process.stop(grace_s=0.1)
        assert started.ends.get(timeout=20) == TrainerExit(-9, None)

    def test_cannot_read_the_environment_of_its_daemon(self, nobody: TrainerUser) -> None:
        command = ("/bin/sh", "-c", f"cat /proc/{os.getpid()}/environ")
        started = Started(isolation=TrainerIsolation(user=nobody), command=command)
        assert "Permission denied" in started.lines.get(timeout=20)
