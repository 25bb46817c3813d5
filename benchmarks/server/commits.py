"""Processor time of a commit in the state machine of a lock group: python benchmarks/server/commits.py [--workers 1000]

No kernel runs and nothing is sent. All workers push a step and then wait for the next one, so the last commit of a step
lets the pulls of all workers through. The script prints one JSON line for each consistency mode. It takes the
longest commit of each step; "longest_ms" is the median of these.
"""

import argparse
import gc
import json
import statistics
import time

from shoal import consistency
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import FoldsDone, PullRequested, PushCommitted, PushStaged, WorkerAdmitted
from shoal_server.shards.machine.mode import Fold
from shoal_server.shards.machine.state import GroupState

MODES = (
    consistency.Asynchronous(),
    consistency.BoundedStaleness(0),
    consistency.Synchronous(),
    consistency.Synchronous(backup_workers=2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    gc.disable()
    for mode in MODES:
        steps = commits(mode, options.workers, options.steps)
        mean = statistics.mean(seconds for step in steps for seconds in step)
        longest = statistics.median(max(step) for step in steps)
        print(json.dumps({"mode": str(mode), "mean_ms": mean * 1e3, "longest_ms": longest * 1e3}))


def commits(mode: consistency.Consistency, workers: int, steps: int) -> list[list[float]]:
    """Returns the seconds of each commit, for each step.

    Args:
        mode: the consistency mode.
        workers: number of workers.
        steps: steps that each worker takes.
    """
    state = GroupState("job", mode_for(mode))
    names = [f"w{rank}" for rank in range(workers)]
    for rank, name in enumerate(names):
        state.handle(WorkerAdmitted(name, 1, rank))
    return [[_step(state, name, step) for name in names] for step in range(steps)]


def _step(state: GroupState, worker: str, step: int) -> float:
    state.handle(PullRequested(object(), worker, 1, step))
    state.handle(PushStaged(worker, 1, step, 1.0, state.version, {}))
    begun = time.thread_time()
    effects = state.handle(PushCommitted(worker, 1, step))
    if any(isinstance(effect, Fold) and effect.seals for effect in effects):
        state.handle(FoldsDone())
    seconds = time.thread_time() - begun
    state.handle(PullRequested(object(), worker, 1, step + 1))
    return seconds


if __name__ == "__main__":
    main()
