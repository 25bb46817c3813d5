"""Launcher of the examples of `examples/distribute`: a process for each task, forked so that all share the imports.

    echo '[["mirrored.py", ["--epochs", "1"], TF_CONFIG or ""]]' | python example_tasks.py

It waits for all tasks, except those of the type `ps`, which run until they are stopped. The exit status is the number
of tasks that failed.
"""

import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path

import shoal_distribute  # noqa: F401 - before the forks

EXAMPLES = Path(__file__).parents[3] / "examples" / "distribute"

# File name, arguments, and TF_CONFIG, which may be empty.
Task = tuple[str, list[str], str]


def main() -> int:
    """Runs the tasks that standard input has."""
    servers: list[int] = []
    others: dict[int, Task] = {}
    for task in json.load(sys.stdin):
        pid = os.fork()
        if not pid:
            run(*task)
            return 0
        if '"type": "ps"' in task[2]:
            servers.append(pid)
        else:
            others[pid] = task
    failed = 0
    while others and not failed:
        pid, status = os.wait()
        failed += bool(others.pop(pid, None)) and status != 0
    for pid in [*servers, *others]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return failed


def run(name: str, arguments: list[str], tf_config: str) -> None:
    """Runs an example in this process, and returns at its end."""
    os.environ["TF_CONFIG"] = tf_config
    path = str(EXAMPLES / name)
    sys.argv, sys.path[0] = [path, *arguments], str(EXAMPLES)
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
