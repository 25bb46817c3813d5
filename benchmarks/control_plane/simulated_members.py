"""Processes of simulated members (`members`), as the benchmarks of the control plane use them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE_S = 300.0
# Of the clocks of another process (clock_getcpuclockid(3)), the one that counts exactly; /proc/PID/stat counts ticks.
_SCHEDULER_CLOCK = 2


class Members:
    """A process of simulated members. `stop` ends it.

    Args:
        kind: "servers", "workers" or "sessions".
        address: the coordinator's.
        first: number of the first member.
        count: number of members.
        size: number of workers of the job for servers; number of variables for the others.
    """

    def __init__(self, kind: str, address: str, first: int, count: int, size: int) -> None:
        arguments = [kind, address, *map(str, (first, count, size))]
        command = [sys.executable, str(HERE / "members.py"), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, command: str) -> None:
        """Sends a command."""
        assert self._process.stdin
        print(command, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the oldest command without one. The first answer says that the members are ready."""
        assert self._process.stdout
        for text in self._process.stdout:  # logs may be among them
            if text.startswith("{"):
                line: dict[str, Any] = json.loads(text)
                return line
        raise SystemExit("a process of simulated members has ended")

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def members(
    kind: str, address: str, count: int, size: int, *, processes: int, first: int = 0
) -> Iterator[list[Members]]:
    """Runs simulated members, divided over some processes. It does not wait until they are ready."""
    shares = [first + count * part // processes for part in range(processes + 1)]
    with ExitStack() as stack:
        running = []
        for start, end in pairwise(shares):
            if end > start:
                running.append(Members(kind, address, start, end - start, size))
                stack.callback(running[-1].stop)
        yield running


def ready(processes: Sequence[Members]) -> None:
    """Waits until the members of all processes are ready."""
    for process in processes:
        process.answer()


def ask(processes: Sequence[Members], command: str = "count") -> dict[str, Any]:
    """Sends a command to all processes at once, and returns their answers, combined.

    Numbers are added up; if a name ends with `_s` or `_at`, the largest number is returned instead. Mappings are
    joined. If the name of a mapping ends with `_by_all`, only the entries that all processes have remain.
    """
    for process in processes:
        process.send(command)
    answers = [process.answer() for process in processes]
    return {key: _merged(key, [answer[key] for answer in answers]) for key in answers[0]}


def _merged(key: str, values: list[Any]) -> Any:
    if not isinstance(values[0], dict):
        return max(values) if key.endswith(("_s", "_at")) else sum(values)
    together = {name: max(value.get(name, 0.0) for value in values) for name in set().union(*values)}
    if key.endswith("_by_all"):
        return {name: at for name, at in together.items() if all(name in value for value in values)}
    return together


def cpu_s(pid: int) -> float:
    """Returns the processor time that all threads of a process have used, in seconds."""
    return time.clock_gettime((~pid << 3) | _SCHEDULER_CLOCK)


def wait_for(condition: Callable[[], bool], what: str, every_s: float = 0.1) -> None:
    """Waits until a condition is met."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(every_s)
