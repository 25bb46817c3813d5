"""Campaign: many seeds on several processors, the search for planted bugs, and the rows of the report."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from simulation.cluster import Result, run
from simulation.nodes import ServerNode
from simulation.plan import Plan, plan_of
from simulation.planted import PLANTED
from simulation.shrink import shrunk

# Seeds that a process runs before it reports.
_PART = 50
# Seeds within which a planted bug must be found.
PLANTED_WITHIN = 1_000


@dataclass
class Row:
    """A row of the report.

    Attributes:
        name: "clean", or the name of a planted bug.
        seeds: number of seeds.
        events: number of events.
        violations: number of seeds that broke an invariant.
        seeds_per_minute: on all processors together.
        found_after: seeds until the planted bug was found; 0 if it was not, or if there is none.
        acknowledged, undone: pushes.
        simulated_s: seconds of simulated time.
        failed: the seeds of violations, and the broken invariants.
    """

    name: str
    seeds: int = 0
    events: int = 0
    violations: int = 0
    seeds_per_minute: float = 0.0
    found_after: int = 0
    acknowledged: int = 0
    undone: int = 0
    simulated_s: float = 0.0
    failed: tuple[tuple[int, str], ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the row is as it must be."""
        return bool(self.found_after) if self.name in PLANTED else not self.violations

    def add(self, results: Iterable[Result]) -> None:
        """Counts runs."""
        for result in results:
            self.seeds += 1
            self.events += result.events
            self.acknowledged += result.acknowledged
            self.undone += result.undone
            self.simulated_s = round(self.simulated_s + result.seconds, 3)
            if result.rule:
                self.violations += 1
                self.failed = (*self.failed, (result.plan.seed, result.rule))[:100]


def clean(first: int, seeds: int, processes: int, tell: Callable[[str], object]) -> Row:
    """Runs seeds against the product.

    Args:
        first: the first seed.
        seeds: how many.
        processes: number of processes.
        tell: takes a line for each violation.
    """
    row, began = Row("clean"), time.perf_counter()
    parts = [range(start, min(start + _PART, first + seeds)) for start in range(first, first + seeds, _PART)]
    for results in _mapped(parts, processes):
        row.add(results)
        for result in results:
            if result.rule:
                tell(f"seed {result.plan.seed}: {result.what}")
    row.seeds_per_minute = round(60 * row.seeds / (time.perf_counter() - began))
    return row


def _mapped(parts: list[range], processes: int) -> Iterator[list[Result]]:
    if processes == 1:
        yield from map(_run_part, parts)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_run_part, parts)


def _run_part(seeds: range) -> list[Result]:
    return [run(plan_of(seed)) for seed in seeds]


def planted(name: str, first: int, within: int = PLANTED_WITHIN) -> tuple[Row, Result | None]:
    """Looks for a planted bug.

    Args:
        name: the bug.
        first: the first seed.
        within: the most seeds.

    Returns:
        The row, and the run that has found the bug.
    """
    row, began, found = Row(name), time.perf_counter(), None
    for seed in range(first, first + within):
        result = run(plan_of(seed), PLANTED[name])
        row.add([result])
        if result.rule:
            row.found_after, found = row.seeds, result
            break
    row.seeds_per_minute = round(60 * row.seeds / (time.perf_counter() - began))
    return row, found


def smallest(result: Result, server_class: type[ServerNode] = ServerNode) -> Result:
    """Returns the shrunk run of a violation."""
    fails = partial(_breaks, result.rule, server_class)
    return run(shrunk(result.plan, fails), server_class)


def _breaks(rule: str, server_class: type[ServerNode], plan: Plan) -> bool:
    return run(plan, server_class).rule == rule


def save(rows: Iterable[Row], path: Path) -> None:
    """Writes the rows to a file, which is replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_suffix(".tmp")
    begun.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    begun.replace(path)


__all__ = ["PLANTED_WITHIN", "Row", "clean", "planted", "save", "smallest"]
