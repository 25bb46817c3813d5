"""Shrinking of a plan that fails: fewer faults, better weather, fewer members and less data, with the same failure."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from shoal.consistency import Synchronous
from simulation.network import Weather
from simulation.plan import Plan, server_names, worker_names

# The most runs of one shrinking.
MOST_RUNS = 300


def shrunk(plan: Plan, fails: Callable[[Plan], bool], most: int = MOST_RUNS) -> Plan:
    """Returns a plan from which nothing more can be taken away.

    Args:
        plan: a plan that fails.
        fails: returns whether a plan fails in the same way.
        most: the most plans to try.

    Returns:
        The smallest plan that was found and fails.
    """
    tried = 0
    smaller = True
    while smaller and tried < most:
        smaller = False
        for candidate in _candidates(plan):
            tried += 1
            if fails(candidate):
                plan, smaller = candidate, True
                break
            if tried >= most:
                break
    return plan


def _candidates(plan: Plan) -> Iterator[Plan]:
    """Yields plans with less, those with much less first."""
    faults = plan.faults
    for count in sorted({len(faults), len(faults) // 2, 1} - {0}, reverse=True):
        for start in range(0, len(faults), count):
            yield replace(plan, faults=faults[:start] + faults[start + count :])
    calm = Weather()
    if plan.weather != calm:
        yield replace(plan, weather=calm)
        for name in ("lost", "lost_replies", "doubled", "late", "delay_s"):
            if getattr(plan.weather, name) != getattr(calm, name):
                yield replace(plan, weather=replace(plan.weather, **{name: getattr(calm, name)}))
    if plan.workers > 1:
        yield _with_members(plan, plan.servers, plan.workers - 1)
    if plan.servers > 1:
        yield _with_members(plan, plan.servers - 1, plan.workers)
    if plan.epochs > 1:
        yield replace(plan, epochs=1)
    if plan.samples > 2 * plan.range_size:
        yield replace(plan, samples=plan.samples // 2)
    if plan.replicas > 1:
        yield replace(plan, replicas=1)
    if plan.zones:
        yield replace(plan, zones=0)
    if plan.moves:
        yield replace(plan, moves=False)
    if plan.copy_s > 0.1:
        yield replace(plan, copy_s=0.1)
    if plan.norms:
        yield replace(plan, norms=False)
    if plan.overlap:
        yield replace(plan, overlap=False)
    if set(plan.paces) != {1.0}:
        yield replace(plan, paces=tuple(1.0 for _ in plan.paces))


def _with_members(plan: Plan, servers: int, workers: int) -> Plan:
    """Returns the plan with other numbers of members, without the faults of those that are gone."""
    names = {*server_names(servers), *worker_names(workers), plan.names[-1], ""}
    wanted = min(plan.wanted, workers)
    mode = plan.consistency
    if isinstance(mode, Synchronous) and mode.backup_workers >= wanted:
        mode = Synchronous()
    return replace(
        plan,
        servers=servers,
        workers=workers,
        wanted=wanted,
        consistency=mode,
        norms=plan.norms and servers > 1,
        replicas=plan.replicas if servers > 1 else 1,
        paces=(*plan.paces[: servers + workers], plan.paces[-1]),
        faults=tuple(fault for fault in plan.faults if fault.target in names and fault.other in names),
    )


__all__ = ["MOST_RUNS", "shrunk"]
