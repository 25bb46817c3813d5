"""A network that loses all packets between a primary and its backup, and says nothing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal._transport.lane_socket import LOSS_S
from support.faults import silent_network

# A network namespace of its own, in which this user may take devices down.
OWN_NETWORK = ("unshare", "--map-root-user", "--net")


def has_own_network() -> bool:
    if not shutil.which(OWN_NETWORK[0]):
        return False
    return subprocess.run([*OWN_NETWORK, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not has_own_network(), reason="this user may not make network namespaces")
def test_both_ends_of_a_replica_notice_that_the_network_is_silent() -> None:
    program = Path(silent_network.__file__)
    command = [*OWN_NETWORK, sys.executable, str(program)]
    path = str(program.parents[2])
    done = subprocess.run(command, check=True, capture_output=True, timeout=60, env={"PYTHONPATH": path})
    # The servers log on the same stream, also after the result.
    [result] = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
    noticed = json.loads(result)
    # Without the probes of `detect_loss`, it takes 30 s.
    assert all(0 < seconds < LOSS_S + 8 for seconds in noticed.values()), noticed
