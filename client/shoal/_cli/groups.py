"""The command `groups`, and the tables of `timings` about groups of ranks."""

from collections.abc import Iterable, Sequence

from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._display import group_records
from shoal.status import Bubble, GroupStatus, GroupTimings, RankTimes

# The phases of a rank, as in `RankTimes`.
_PHASES = ["local_reduce", "wait", "transfer"]
_COLUMNS = ["rank", "steps", "calls", *(it.replace("_", " ") for it in _PHASES)]
_STAGE_COLUMNS = ["stage", "bubble"]
_NO_STRAGGLER = "no rank is a straggler"


@options.connected
def groups(
    connect: options.Connect,
    as_json: options.JsonOption = False,
) -> None:
    """Lists the elastic groups of ranks, with what they wait for, and the rank that the others wait for.

    These are the groups of a MultiWorkerMirroredStrategy with `workers`, and pipelines that the coordinator has brought
    together. `shoal timings GROUP` shows the times of the ranks. Groups without a coordinator are not listed.
    """
    columns = ["group", "ranks", "minimum", "generation", "straggler"]
    with Output(as_json) as out, connect() as client:
        found = client.groups()
        rows = [(_cells(it), group_records.listed_group(it)) for it in found]
        notes = [f"{it.name}: waits for {it.waits_for}" for it in found if it.waits_for]
        out.rows("" if rows else "there is no elastic group", columns, rows, notes=notes)


def show_group(out: Output, status: GroupStatus) -> None:
    """Shows the times of an elastic group."""
    if out.as_json:
        out.record(group_records.group(status))
        return
    if status.waits_for:
        verdict = f"its {'next' if status.generation else 'first'} generation waits for {status.waits_for}"
    else:
        verdict = str(status.straggler or _NO_STRAGGLER)
    bubble = status.bubble()
    columns = _columns(bubble)
    rows: list[tuple[list[str], Row]] = [
        ([*_times(it.rank, it.times, columns), it.address], {}) for it in status.members
    ]
    out.rows(f"group {status.name}: {verdict}", [*columns, "address"], rows, notes=_notes(bubble))


def show_hybrid_groups(out: Output, found: Iterable[tuple[str, GroupTimings]]) -> None:
    """Shows the times of hybrid groups, each with the session that it shares."""
    for worker, timings in found:
        bubble = timings.bubble()
        columns = _columns(bubble)
        rows: list[tuple[list[str], Row]] = [(_times(rank, it, columns), {}) for rank, it in enumerate(timings.ranks)]
        verdict = str(timings.straggler() or _NO_STRAGGLER)
        out.rows(f"hybrid group of {worker}: {verdict}", columns, rows, notes=_notes(bubble))


def _columns(bubble: Bubble | None) -> list[str]:
    return [*_COLUMNS, *(_STAGE_COLUMNS if bubble else ())]


def _notes(bubble: Bubble | None) -> list[str]:
    return ["seconds of the last minute", *([str(bubble)] if bubble else [])]


def _cells(status: GroupStatus) -> list[str]:
    late = status.straggler
    return [
        status.name,
        f"{status.size}/{status.ranks}",
        str(status.min_ranks),
        str(status.generation),
        f"rank {late.rank}, {1e3 * late.seconds:.3g} ms a call" if late else "-",
    ]


def _times(rank: int, times: RankTimes, columns: Sequence[str]) -> list[str]:
    found = [str(rank), f"{times.steps:,}", f"{times.calls:,}", *(f"{getattr(times, it):.2f}" for it in _PHASES)]
    if _STAGE_COLUMNS[0] in columns:
        stage = times.stage
        bubble = stage.bubble if stage else None
        found += [str(stage.stage) if stage else "-", "-" if bubble is None else f"{bubble:.3f}"]
    return found


__all__ = ["groups", "show_group", "show_hybrid_groups"]
