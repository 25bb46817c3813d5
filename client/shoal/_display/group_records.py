"""JSON records of groups of ranks, for `--json` and the page."""

from dataclasses import asdict
from typing import Any

from shoal.status import GroupStatus, GroupTimings, StragglerRank


def group_timings(found: GroupTimings) -> dict[str, Any]:
    """Returns the times of the ranks of a group over the last minute, in seconds."""
    ranks = [{"rank": rank, **asdict(times)} for rank, times in enumerate(found.ranks)]
    return {"straggler": _straggler(found.straggler()), "ranks": ranks}


def group(status: GroupStatus) -> dict[str, Any]:
    """Returns the record of an elastic group, with the times of its ranks, or None instead if the status has none."""
    ranks = [{"rank": it.rank, "address": it.address, **asdict(it.times)} for it in status.members]
    return {**listed_group(status), "ranks": ranks if len(ranks) == status.size else None}


def listed_group(status: GroupStatus) -> dict[str, Any]:
    """Returns the record of an elastic group in a list, without its ranks."""
    return {
        "name": status.name,
        "submitter": status.submitter,
        "generation": status.generation,
        "size": status.size,
        "most_ranks": status.ranks,
        "min_ranks": status.min_ranks,
        "waits_for": status.waits_for,
        "straggler": _straggler(status.straggler),
    }


def _straggler(found: StragglerRank | None) -> dict[str, Any] | None:
    return asdict(found) if found else None


__all__ = ["group", "group_timings", "listed_group"]
