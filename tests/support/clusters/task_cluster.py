"""Tasks of TF_CONFIG as processes of this host, all with the same script."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from shoal._rpc import reserve

Task = tuple[str, int]


class TaskCluster:
    """Runs a script in each task. It is a context manager, and kills what is left.

    Args:
        script: path of the script.
        counts: number of tasks of each type.
        environment: variables to add.
    """

    def __init__(self, script: Path, counts: Mapping[str, int], environment: Mapping[str, str] | None = None) -> None:
        self._script = script
        self.tasks: list[Task] = [(kind, number) for kind, count in counts.items() for number in range(count)]
        self._cluster: dict[str, list[str]] = {}
        self._files = ExitStack()
        for kind, _ in self.tasks:
            # Held until the end, so that no other process gets the port before the task listens there.
            held = self._files.enter_context(reserve("127.0.0.1", 0))
            self._cluster.setdefault(kind, []).append(f"127.0.0.1:{held.getsockname()[1]}")
        inherited = {key: value for key, value in os.environ.items() if key != "SHOAL_COORDINATOR"}
        self._environment = {**inherited, **(environment or {})}
        self._processes: dict[Task, subprocess.Popen[bytes]] = {}
        self._printed: dict[Task, IO[str]] = {}
        self._said: dict[Task, IO[str]] = {}

    def start(self, task: Task) -> None:
        """Starts the process of a task, perhaps again."""
        kind, number = task
        config = json.dumps({"cluster": self._cluster, "task": {"type": kind, "index": number}})
        # Files, because a task whose pipe is full would wait for a reader, and others for the task.
        printed = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        said = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
        self._printed[task], self._said[task] = printed, said
        environment = {**self._environment, "TF_CONFIG": config}
        self._processes[task] = subprocess.Popen(
            [sys.executable, str(self._script)], env=environment, stdout=printed, stderr=said
        )

    def kill(self, task: Task) -> bool:
        """Kills a task as `kill -9` does. Returns whether it ran."""
        process = self._processes[task]
        ran = process.poll() is None
        process.kill()
        process.wait()
        return ran

    def revive(self, task: Task) -> str:
        """Starts a task again if it has ended with an error, as a supervisor does. Returns what it has said."""
        process = self._processes[task]
        if not process.poll():
            return ""
        said = _text(self._said[task])
        self.start(task)
        return said

    def has_ended(self, task: Task) -> bool:
        """Returns whether the process of a task has ended."""
        return self._processes[task].poll() is not None

    def check_runs(self, task: Task) -> None:
        """Fails with what a task has said if it has ended."""
        assert not self.has_ended(task), f"{task} has ended: {_text(self._said[task])}"

    def pid(self, task: Task) -> int:
        """Returns the process id of a task."""
        return self._processes[task].pid

    def output(self, task: Task, timeout_s: float = 60) -> str:
        """Waits for the end of a task, and returns what it has printed. Its exit status must be 0."""
        assert self._processes[task].wait(timeout_s) == 0, f"{task}: {_text(self._said[task])}"
        return _text(self._printed[task])

    def __enter__(self) -> "TaskCluster":
        for task in self.tasks:
            self.start(task)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()  # servers run until they are stopped
        for process in self._processes.values():
            process.wait()
        self._files.close()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


__all__ = ["Task", "TaskCluster"]
