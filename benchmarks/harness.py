"""Harness that runs contestants in turn, A B A B, and takes the medians of their rounds.

A contestant is a script that prints one JSON line. Each round is a fresh run of it. Benchmarks choose the contestants
and interpret their results.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import processes
from processes import Failed, Line

HERE = Path(__file__).parent
T = TypeVar("T")


@dataclass(frozen=True)
class Contestant:
    """One program that runs a workload."""

    name: str  # unique in a benchmark; what tables and charts say
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 180.0
    # What is wrong with a line that looks like a figure: "" when nothing is.
    objection: Callable[[Line], str] = lambda _line: ""


def ours(
    name: str,
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 180.0,
    objection: Callable[[Line], str] = lambda _line: "",
) -> Contestant:
    """Returns the contestant that runs a script of this folder with this Python interpreter."""
    return Contestant(name, (sys.executable, str(HERE / script), *arguments), env or {}, timeout_s, objection)


@dataclass
class Run:
    """One run of the benchmarks, and what it has seen so far."""

    rounds: int
    short: bool
    interpreters: Mapping[str, str]  # of the peers that are given, by name: "torch"
    say: Callable[[str], None]
    lines: dict[str, dict[str, list[Line]]] = field(default_factory=dict)  # by benchmark and contestant
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)  # the reasons, likewise
    skipped: dict[str, str] = field(default_factory=dict)  # the reasons, by row: what this machine cannot give

    @property
    def short_flag(self) -> tuple[str, ...]:
        """The flags of a short run, for our own scripts."""
        return ("--short",) if self.short else ()

    def skip(self, row: str, reason: str) -> None:
        """Records and prints that a row is not measured."""
        self.skipped[row] = reason
        self.say(f"{row} is skipped: {reason}")

    def contest(
        self, bench: str, contestants: Sequence[Contestant], *, rounds: int | None = None
    ) -> dict[str, list[Line]]:
        """Runs each contestant once a round. A contestant that fails twice in a row is dropped with all its rounds.

        Returns:
            The lines of the contestants that completed all rounds, by name.
        """
        seen: dict[str, list[Line]] = {contestant.name: [] for contestant in contestants}
        out = self.left_out.setdefault(bench, {})
        rounds = rounds or self.rounds
        for number in range(rounds):
            for contestant in contestants:
                if contestant.name in out:
                    continue
                try:
                    line = self._twice(contestant)
                except Failed as failure:
                    out[contestant.name] = str(failure)
                    self.say(f"{bench}: {contestant.name} is left out: {failure}")
                    continue
                seen[contestant.name].append(line)
                self.say(f"{bench}, round {number + 1} of {rounds}: {contestant.name}: {_told(line)}")
        complete = {name: lines for name, lines in seen.items() if name not in out}
        self.lines.setdefault(bench, {}).update(complete)
        return complete

    def _twice(self, contestant: Contestant) -> Line:
        try:
            return self._once(contestant)
        except Failed as failure:
            self.say(f"{contestant.name}: once more, since it {failure}")
            return self._once(contestant)

    def _once(self, contestant: Contestant) -> Line:
        line = processes.run(contestant.command, env=contestant.env, timeout_s=contestant.timeout_s)
        if objection := contestant.objection(line):
            raise Failed(f"gave a figure that does not count: {objection}")
        return line


def median(lines: Iterable[Line], key: str) -> float:
    """Returns the median of one figure over the rounds."""
    return float(statistics.median(line[key] for line in lines))


def alternate(ours: Sequence[T], peers: Sequence[T]) -> list[T]:
    """Returns both lists merged: each keeps its order and is spread evenly among the other, with ours first."""
    places = [
        ((number + 0.5 * late) / len(side), late, contestant)
        for late, side in enumerate((ours, peers))
        for number, contestant in enumerate(side)
    ]
    return [contestant for _, _, contestant in sorted(places, key=lambda place: place[:2])]


def _told(line: Line) -> str:
    results = [f"{name} {value:.4g}" for name, value in line.items() if isinstance(value, int | float)]
    return ", ".join(results)
