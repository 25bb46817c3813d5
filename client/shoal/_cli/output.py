"""Output of a command: tables and sentences for people, JSON objects for machines, and the exit code."""

import json
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal import errors
from shoal._system.exit_codes import INTERRUPTED, exit_code
from shoal._system.terminal import printable

EXIT_CODES_HELP = (
    "Exit codes: 0 success; 1 an error without a code of its own; 2 wrong usage, an invalid job, or an action that is "
    "not allowed; 3 the cluster does not answer or did not start; 4 unknown job, group, checkpoint or server; 5 the "
    "state of the job or server does not allow the command (name in use, still running, no variables yet, last "
    "server); 6 time limit exceeded; 7 the job failed or was cancelled; 130 interrupted."
)

PIPE_COLUMNS = 240
_NO_LIMIT = 100_000

Row = Mapping[str, Any]


class Output:
    """Prints the results of a command. Within `with`, an error becomes a message and an exit code.

    Args:
        as_json: whether to print JSON objects instead of text.
        width: columns of the screen. None means those of this terminal.
    """

    def __init__(self, as_json: bool, *, width: int | None = None) -> None:
        self.as_json = as_json
        # For a pipe, rich assumes 80 columns.
        width = width or (None if sys.stdout.isatty() else PIPE_COLUMNS)
        # The text comes from users: rich must not interpret tags or emoji names in it.
        self._people = _console(width=width)
        self.errors = _console(stderr=True)

    def message(self, text: str, record: Row, *, beside: bool = False) -> None:
        """Prints a sentence for people, or a record for machines.

        Args:
            text: the sentence.
            record: the JSON object.
            beside: whether to print on standard error, because standard output carries a file.
        """
        stream = sys.stderr if beside else sys.stdout
        stream.write((_json(record) if self.as_json else printable(text)) + "\n")
        stream.flush()

    def record(self, record: Row) -> None:
        """Prints one JSON object on a line."""
        sys.stdout.write(_json(record) + "\n")
        sys.stdout.flush()

    def rows(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[tuple[Sequence[str], Row]],
        *,
        optional: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> None:
        """Prints a table for people, or the record of each row for machines.

        Args:
            title: the line above the table.
            columns: the headings.
            rows: the cells and the record of each row.
            optional: the columns that are omitted, in this order, if the screen is too narrow. Cells are never cut; a
                terminal wraps the lines of a table that is still too wide.
            notes: the lines below the table.
        """
        if self.as_json:
            for _, record in rows:
                self.record(record)
            return
        table = _table(columns, [cells for cells, _ in rows])
        left = list(optional)
        while left and self._width(table) > self._people.width:
            gone = left.pop(0)
            kept = [index for index, column in enumerate(columns) if column != gone]
            columns = [columns[index] for index in kept]
            rows = [([cells[index] for index in kept], record) for cells, record in rows]
            table = _table(columns, [cells for cells, _ in rows])
        if title:
            self._people.print(printable(title))
        _console(width=max(self._width(table), self._people.width)).print(table)
        for note in notes:
            self._people.print(printable(note))

    def _width(self, table: Table) -> int:
        """Returns the width of a table without wrapping, in columns."""
        return table.__rich_measure__(self._people, self._people.options.update(width=_NO_LIMIT)).maximum

    def error(self, code: str, message: str, details: Mapping[str, str]) -> None:
        """Prints an error on standard error.

        Args:
            code: the error code, such as UNKNOWN_JOB.
            message: the text.
            details: further fields of the JSON object.
        """
        if self.as_json:
            sys.stderr.write(_json({"error": {"code": code, "message": message, "details": dict(details)}}) + "\n")
        else:
            self.errors.print(Text.assemble(("error:", "bold red"), f" {printable(message)}"), soft_wrap=True)

    def __enter__(self) -> "Output":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, errors.ShoalError):
            self.error(error.code, error.message, error.details)
            raise typer.Exit(exit_code(error)) from None
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None


def _console(**options: Any) -> Console:
    return Console(highlight=False, markup=False, emoji=False, **options)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    for cells in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _json(value: Any) -> str:
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity by None, because JSON has neither."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


__all__ = ["EXIT_CODES_HELP", "INTERRUPTED", "Output", "Row"]
