"""Systems compared while their processes are killed: python benchmarks/kills/compare_kills.py [SYSTEM ...] [options].

Each system runs two servers and four workers as processes on this machine. A worker waits for 100 ms in each step, as
if it computed, so that a machine with few cores runs four workers at full speed. Every 15 s a process is killed, and a
supervisor starts it again at once. The victims are drawn from a seed, and are the same for all systems.

A batch counts as useful if its update was acknowledged, and never undone by going back to a checkpoint.

The systems: shoal-replicas, shoal-checkpoints, tensorflow, torchft. The last two need the environments of `make
bench-peers`. The script prints what it measures. `--keep` writes it to benchmarks/results/kills.json, and renews the
table and the chart of docs/explanation/surviving-kills.md (`kills_page`).
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import kills_page
import machine
import rivals
import schedule
import update_log
from shoal_system import ShoalSystem
from supervisor import Supervisor
from system import System
from tensorflow_system import TensorFlowSystem
from torchft_system import TorchftSystem

SECONDS, UNDISTURBED_S = 600.0, 60.0
# Until all workers have made some steps, and until training goes on after the last kill.
_START_S, _RESUME_S, _STEADY_S = 180.0, 90.0, 5.0


def systems(interpreters: Mapping[str, str]) -> dict[str, System]:
    """Returns the systems that can run here, by the name of the command line."""
    found: dict[str, System] = {
        "shoal-replicas": ShoalSystem("Shoal, 2 replicas", replicas=2),
        "shoal-checkpoints": ShoalSystem("Shoal, checkpoints alone", replicas=1),
        "shoal-synchronous": ShoalSystem("Shoal, 2 replicas, synchronous", replicas=2, mode="sync"),
    }
    if "tensorflow" in interpreters:
        found["tensorflow"] = TensorFlowSystem(interpreters["tensorflow"])
    if "torchft" in interpreters:
        found["torchft"] = TorchftSystem(interpreters["torchft"])
    return found


DEFAULT = ("shoal-replicas", "shoal-checkpoints", "tensorflow", "torchft")


def run(system: System, seconds: float, kills: Sequence[schedule.Kill], folder: Path) -> dict[str, Any]:
    """Makes one run, and returns what it measured.

    Args:
        system: what is run.
        seconds: length of the measurement.
        kills: processes that are killed in it.
        folder: folder for logs and checkpoints.
    """
    victims: Counter[str] = Counter()
    with Supervisor(folder) as supervisor:
        system.start(supervisor, folder)
        _await(lambda: _all_train(folder), _START_S, "all workers to train")
        time.sleep(_STEADY_S)
        restarts_before, loads = supervisor.restarts(), []
        begin = time.monotonic()
        for kill in kills:
            time.sleep(max(0.0, begin + kill.at_s - time.monotonic()))
            victims[system.victim(kill)] += 1
            supervisor.kill(system.victim(kill))
            loads.append(os.getloadavg()[0])
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        loads.append(os.getloadavg()[0])
        end = begin + seconds
        # A later entry says whether the system has still to go back to a checkpoint.
        _await(lambda: _latest(folder) > end + 0.5, _RESUME_S, "an update", False)
        restarts = {name: count - restarts_before[name] for name, count in supervisor.restarts().items()}
        checked = system.end(supervisor, folder, victims) or {}
    logs = update_log.read(folder)
    return measured(logs, begin, seconds) | {
        "kills": len(kills),
        "victims": dict(sorted(victims.items())),
        "restarted": {name: count for name, count in restarts.items() if count},
        "load": round(statistics.mean(loads), 1),
        "checked": {"acknowledged": sum(map(len, logs)), **checked},
    }


def measured(logs: Sequence[Sequence[update_log.Entry]], begin: float, seconds: float) -> dict[str, Any]:
    """Returns the useful samples of a run, and their curve.

    Args:
        logs: the acknowledged updates of each process.
        begin: begin of the measurement.
        seconds: length of the measurement.
    """
    times = [*(begin + at for at in _points(seconds)), begin + seconds]
    counts = update_log.useful(logs, times)
    within = [entry for log in logs for entry in log if begin < entry.at <= begin + seconds]
    samples = [update_log.BATCH * (count - counts[0]) for count in counts]
    return {
        "seconds": seconds,
        "samples": samples[-1],
        "samples_per_s": round(samples[-1] / seconds, 1),
        "undone": max(0, len(within) - samples[-1] // update_log.BATCH),
        "curve": samples,
    }


def joined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the seconds, the samples per second and the load of several undisturbed runs together."""
    seconds = sum(run["seconds"] for run in runs)
    return {
        "seconds": seconds,
        "samples_per_s": round(sum(run["samples"] for run in runs) / seconds, 1),
        "load": round(statistics.mean(run["load"] for run in runs), 1),
        "runs": [run["samples_per_s"] for run in runs],
    }


def _printed_run(system: System, name: str, seconds: float, parent: Path | None) -> dict[str, Any]:
    """Makes and prints one run. The logs of its processes are kept if they have a folder."""
    folder = Path(tempfile.mkdtemp(prefix=name.replace(", ", "-").replace(" ", "-") + "-", dir=parent))
    found = run(system, seconds, schedule.kills(seconds) if name.endswith("killed") else (), folder)
    print(f"{name}: {json.dumps(found)}", flush=True)
    if not parent:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _points(seconds: float) -> list[float]:
    return [kills_page.POINT_S * number for number in range(math.ceil(seconds / kills_page.POINT_S))]


def _all_train(folder: Path) -> bool:
    logs = update_log.read(folder)
    return bool(logs) and all(logs) and sum(map(len, logs)) >= 10 * schedule.WORKERS


def _latest(folder: Path) -> float:
    """Returns the time of the latest entry."""
    return max((log[-1].at for log in update_log.read(folder) if log), default=0.0)


def _await(true: Callable[[], Any], seconds: float, what: str, needed: bool = True) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            if needed:
                sys.exit(f"waited for {seconds:g} s for {what}; the logs of the processes say why")
            return
        time.sleep(0.2)


def main() -> int:
    """Runs the benchmark, and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"default: {', '.join(DEFAULT)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="length of a run with kills; default: 600")
    parser.add_argument(
        "--undisturbed",
        type=float,
        default=UNDISTURBED_S,
        help="length of a run without; there is one before and one after the run with kills; default: 60",
    )
    parser.add_argument("--keep", action="store_true", help="write the results, and renew the page and its chart")
    parser.add_argument("--folder", type=Path, help="folder for the logs of the processes; default: a temporary one")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end, too
    interpreters = {name: path for name, path in rivals.interpreters().items() if name in ("tensorflow", "torchft")}
    known = systems(interpreters)
    for name in options.systems or [it for it in DEFAULT if it in known]:
        if name not in known:
            parser.error(f"{name} cannot run; there are {', '.join(known)}, and `make bench-peers` adds others")
        system, folder = known[name], options.folder
        before = _printed_run(system, f"{name}, undisturbed", options.undisturbed, folder)
        killed = _printed_run(system, f"{name}, killed", options.seconds, folder)
        after = _printed_run(system, f"{name}, undisturbed again", options.undisturbed, folder)
        result = {"key": name, "name": system.name, "date": machine.now(), "killed": killed}
        result["undisturbed"] = joined([before, after])  # both, because the load of the machine changes
        if options.keep:
            kills_page.keep(result | {"machine": machine.described(interpreters)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
