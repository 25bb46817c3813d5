"""Files of results: `latest.json`, `rounds.json`, `machine.json`, the chart, and the table in the docs.

A run replaces the results of its own benchmarks and keeps the results of all others. Results may come from different
machines, so the files name the machine for each benchmark. The values of a row are from one run. Rows of different
benchmarks are not comparable.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart
import rows
from harness import HERE
from processes import Line
from rows import Row

FOLDER = HERE / "results"
DOCS = HERE.parent / "docs" / "explanation" / "performance.md"
PICTURE = HERE.parent / "docs" / "images" / "performance.svg"
BEGIN, END = "<!-- results -->", "<!-- /results -->"


@dataclass(frozen=True)
class Results:
    """The contents of the files of results.

    Attributes:
        rows: latest.json.
        rounds: rounds.json: every line, by benchmark and contestant.
        runs: machine.json: when, how and on what machine each benchmark ran, and who was left out.
    """

    rows: Sequence[Row]
    rounds: Mapping[str, Mapping[str, Sequence[Line]]]
    runs: Mapping[str, Any]

    def replaced(self, new: "Results") -> "Results":
        """Returns these results, with those of a newer run in place of the results of the same benchmarks."""
        return Results(
            rows.merged(self.rows, new.rows, new.runs),
            {**self.rounds, **{bench: new.rounds.get(bench, {}) for bench in new.runs}},
            {**self.runs, **new.runs},
        )

    def block(self) -> str:
        """Returns the block of the docs with these results, in Markdown."""
        on: dict[str, list[str]] = {}
        for bench, run in self.runs.items():
            told = [f"`{bench}`: {run['date']}, {run['rounds']} round{'s' if run['rounds'] > 1 else ''}"]
            told += [f"{name.replace('_', ' ')} {value:.3g}" for name, value in run.get("limits", {}).items()]
            told += [f"left out: {name}" for name in run["left_out"]]
            on.setdefault(_told(run["machine"]), []).append(f"- {'; '.join(told)}")
        parts = [rows.markdown(self.rows), *("\n".join([f"{machine}:", "", *runs]) for machine, runs in on.items())]
        return "\n\n".join(parts)


def _told(machine: Mapping[str, Any]) -> str:
    versions = {**machine["versions"], **machine["peers"]}
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB; Linux {machine['kernel']}, "
        f"Python {machine['python']}; {', '.join(f'{name} {version}' for name, version in versions.items())}"
    )


def load(folder: Path = FOLDER) -> Results:
    """Returns the results of earlier runs; empty if there are none."""
    return Results(
        [Row.from_json(row) for row in _read(folder / "latest.json", [])],
        _read(folder / "rounds.json", {}),
        _read(folder / "machine.json", {}),
    )


def save(results: Results, folder: Path = FOLDER) -> None:
    """Writes all files of results. The chart of the results in the repository is also a picture of the docs."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "latest.json", [row.to_json() for row in results.rows])
    _write(folder / "rounds.json", results.rounds)
    _write(folder / "machine.json", results.runs)
    chart.draw(results.rounds, PICTURE if folder == FOLDER else folder / "latest.svg")


def fill(text: str, block: str) -> str:
    """Returns a page with the block in place of the text between its markers.

    Raises:
        ValueError: the page has no such markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with an {END} after it")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def _read(path: Path, otherwise: Any) -> Any:
    return json.loads(path.read_text()) if path.exists() else otherwise


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")
