"""A cluster that the tasks of TF_CONFIG form, all by the same script."""

import json
import os
import socket
import subprocess
import sys

import numpy as np

from shoal_distribute import OneDeviceStrategy
from support.clusters.local import ROOT
from support.programs.strategy_task import train

TASKS = [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0)]


def addresses(count: int) -> list[str]:
    """Returns free addresses of this host."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{it.getsockname()[1]}" for it in held]
    for each in held:
        each.close()
    return found


def test_one_script_is_chief_server_and_worker() -> None:
    places = addresses(len(TASKS))
    cluster: dict[str, list[str]] = {}
    for (kind, _), address in zip(TASKS, places, strict=True):
        cluster.setdefault(kind, []).append(address)
    environment = {key: value for key, value in os.environ.items() if key != "SHOAL_COORDINATOR"}
    script = str(ROOT / "tests/support/programs/strategy_task.py")
    processes = {
        (kind, number): subprocess.Popen(
            [sys.executable, script],
            env={
                **environment,
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": number}}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind, number in TASKS
    }
    try:
        outputs = {task: processes[task].communicate(timeout=60) for task in (("worker", 0), ("chief", 0))}
    finally:
        for process in processes.values():
            process.kill()  # servers run until they are stopped
        for process in processes.values():
            process.communicate()
    expected = train(OneDeviceStrategy("/cpu:0"), 1, 0)
    for task, (output, said) in outputs.items():
        assert processes[task].returncode == 0, said
        np.testing.assert_allclose(json.loads(output), expected, rtol=1e-10)
