"""JSON records of groups of ranks, for `--json` and the page."""

from dataclasses import asdict
from typing import Any

from shoal.status import Bubble, GroupStatus, GroupTimings, RankTimes, StragglerRank


def group_timings(found: GroupTimings) -> dict[str, Any]:
    """Returns the times of the ranks of a group over the last minute, in seconds."""
    ranks = [{"rank": rank, **_times(times)} for rank, times in enumerate(found.ranks)]
    return {"straggler": _straggler(found.straggler()), "bubble": _bubble(found.bubble()), "ranks": ranks}


def group(status: GroupStatus) -> dict[str, Any]:
    """Returns the record of an elastic group, with the times of its ranks, or None instead if the status has none."""
    ranks = [{"rank": it.rank, "address": it.address, **_times(it.times)} for it in status.members]
    is_complete = len(ranks) == status.size
    return {
        **listed_group(status),
        "bubble": _bubble(status.bubble()) if is_complete else None,
        "ranks": ranks if is_complete else None,
    }


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


def _times(found: RankTimes) -> dict[str, Any]:
    """Returns the times of a rank. `bubble` is that of its stage."""
    return {**asdict(found), "bubble": found.stage.bubble if found.stage else None}


def _bubble(found: Bubble | None) -> dict[str, Any] | None:
    return {**asdict(found), "ideal": found.ideal} if found else None


def _straggler(found: StragglerRank | None) -> dict[str, Any] | None:
    return asdict(found) if found else None


__all__ = ["group", "group_timings", "listed_group"]
