"""Supervised role, as `shoal up` starts it: it reports that it is ready, and ends when its standard input closes."""

import subprocess
from collections.abc import Sequence


def until_ready(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a role until it is ready, and then to its end. Raises CalledProcessError if the exit status is not 0."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--supervised"], text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout
        ready = process.stdout.readline()
        rest, logs = process.communicate(timeout=60)
    done = subprocess.CompletedProcess(command, process.returncode, ready + rest, logs)
    done.check_returncode()
    return done
