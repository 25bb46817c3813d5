"""The reference of the command line, from the tree of commands that `shoal` runs."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from markdown_text import code, page, table, text

from shoal._cli.app import app
from shoal._cli.help import EXAMPLES

_NOTES = re.compile(r"\s*\[([^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*)\]$")
_NOTE_KINDS = ("env var", "default", "required")
_RANGE = re.compile(r"-?[\d.]*<?=?x[<>]=?|[-\d.]+<=?x")
_TYPE = re.compile(r" <[\w\[\]]+>$")
_DEFAULT = re.compile(r" Default: ([^.`]*(?:\.\S[^.`]*)*)\.(?= `|$)")  # a range may follow


def commands() -> Iterator[tuple[str, Any, Any]]:
    """Yields each command with its full name and its context: `shoal`, its commands, and theirs."""
    root = typer.main.get_command(app)
    yield from _walk("shoal", root, typer.Context(root, info_name="shoal"))


def _walk(name: str, command: Any, context: Any) -> Iterator[tuple[str, Any, Any]]:
    yield name, command, context
    if hasattr(command, "list_commands"):
        for child in sorted(command.list_commands(context)):
            found = command.get_command(context, child)
            if not found.hidden:
                yield from _walk(f"{name} {child}", found, typer.Context(found, info_name=child, parent=context))


def _notes(described: str) -> tuple[str, dict[str, str]]:
    """Splits a help text from what stands in brackets after it: the variable, the default, whether it is required."""
    match = _NOTES.search(described)
    if not match or not (match[1].startswith(_NOTE_KINDS) or _RANGE.match(match[1])):
        return described, {}
    described, notes = described[: match.start()], {}
    for note in match[1].split("; "):
        kind, _, value = note.partition(": ")
        if kind in _NOTE_KINDS:
            notes[kind] = value[1:-1] if value.startswith("(") and value.endswith(")") else value
        else:  # the range of a number
            described += f" `{note}`"
    return described, notes


def _parameters(command: Any, context: Any, kind: str) -> list[list[str]]:
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if parameter.param_type_name != kind or record is None:
            continue
        described, notes = _notes(record[1])
        if stated := _DEFAULT.search(described):
            described = described.replace(stated[0], "", 1)
            notes.setdefault("default", stated[1])
        default = "required" if "required" in notes else code(notes.get("default", ""))
        # Typer appends an argument's type to its name: `JOB <str>`.
        row = [code(_TYPE.sub("", record[0])), text(described), default]
        rows.append(row if kind == "argument" else [*row, code(notes.get("env var", ""))])
    return rows


def _section(name: str, command: Any, context: Any) -> Iterator[str]:
    depth = len(name.split())
    yield f"{'#' * max(depth, 2)} `{name}` {{ #{name.replace(' ', '-')} }}"
    # A form feed ends what is shown; single newlines are the source's own.
    shown = (command.help or "").split("\f")[0].strip()
    yield from ("", *(f"{text(paragraph)}\n" for paragraph in shown.split("\n\n")))
    arguments = _parameters(command, context, "argument")
    usage = " ".join([name, "[OPTIONS]", *(row[0].strip("`").split(" ")[0] for row in arguments)])
    if hasattr(command, "list_commands"):
        usage += " COMMAND"
    yield from ("```console", usage, "```")
    if arguments:
        yield from table(["argument", "meaning", "default"], arguments)
    options = _parameters(command, context, "option")
    if options:
        yield from table(["option", "meaning", "default", "variable"], options)
    if command.epilog:
        yield text(command.epilog)
    yield from ("", "Examples:", "", "```console", *EXAMPLES[name], "```", "")


def _variables(found: list[tuple[str, Any, Any]]) -> list[str]:
    """Returns a table of the environment variables that have a flag, each with the commands that read it."""
    users: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, command, context in found:
        for flag, _, default, variable in _parameters(command, context, "option"):
            if variable:
                long = re.findall(r"--[a-z-]+", flag)[0]
                users.setdefault((variable, long), {}).setdefault(default, []).append(name)
    rows = []
    for (variable, flag), by_default in sorted(users.items()):
        defaults = [f"{default or 'none'} ({', '.join(map(code, names))})" for default, names in by_default.items()]
        rows.append([variable, code(flag), "; ".join(defaults)])
    return table(["variable", "flag", "default, and the commands that read it"], rows)


def pages() -> dict[str, str]:
    """Returns the page of all commands."""
    found = list(commands())
    lines = [
        "# Commands",
        "",
        "Every command with its options, as `--help` prints them. An option takes precedence over its",
        "environment variable, and the variable over the default. [The command line](../command-line.md) explains what",
        "commands share.",
    ]
    lines += table(
        ["command", "purpose"],
        (
            [f"[`{name}`](#{name.replace(' ', '-')})", text((command.help or "").split("\n\n")[0])]
            for name, command, _ in found
        ),
    )
    for name, command, context in found:
        lines += _section(name, command, context)
    lines += ["## Environment variables", *_variables(found)]
    return {"reference/cli/index.md": page(lines)}
