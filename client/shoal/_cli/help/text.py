"""Text of `--help`, in which no command, option or example is cut or broken, so that users can copy it.

typer and its libraries wrap a table to the terminal's width, and cut words in a narrow column.
"""

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from shoal._cli.help.examples import EXAMPLES

_WIDEST, _NARROWEST = 100, 40
_LEFT = 26  # columns of an option; a longer one has a line of its own
_OTHERS = "Commands"


def help_lines(command: Any, context: Any, width: int | None = None) -> list[str]:
    """Returns the lines of a command's help: usage, meaning, arguments, options, commands and examples.

    Args:
        command: a command of typer.
        context: its context.
        width: columns of the text. Words that are longer stay whole. None means those of this terminal.
    """
    width = max(_NARROWEST, min(_WIDEST, width or shutil.get_terminal_size().columns))
    arguments = [it for it in command.get_params(context) if it.param_type_name == "argument"]
    options = [it for it in command.get_params(context) if it.param_type_name == "option"]
    words = [command_path(context), "[OPTIONS]", *map(_usage_of, arguments)]
    if hasattr(command, "list_commands"):
        words.append("COMMAND")
    lines = [f"Usage: {' '.join(words)}", ""]
    for paragraph in (command.help or "").split("\f")[0].strip().split("\n\n"):
        lines += [*_wrapped(paragraph, width, 2), ""]
    lines += _section("Arguments", ((_usage_of(it), _meaning(it, context)) for it in arguments), width)
    lines += _section("Options", _option_rows(options, context), width)
    lines += _commands(command, context, width)
    if command.epilog:
        lines += [*_wrapped(command.epilog, width, 0), ""]
    if examples := EXAMPLES.get(command_path(context)):
        lines += ["Examples:", *(f"  {line}" for line in examples)]
    return lines


def command_path(context: Any) -> str:
    """Returns the words of a command, such as "shoal checkpoints ls"."""
    names = []
    while context:
        names.append(context.info_name or "")
        context = context.parent
    return " ".join(reversed(names))


def _usage_of(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]{}")
    return name if argument.required else f"[{name}]"


def _meaning(parameter: Any, context: Any) -> str:
    record = parameter.get_help_record(context)
    return record[1] if record else ""


def _option_rows(options: Iterable[Any], context: Any) -> Iterator[tuple[str, str]]:
    return (record for option in options if (record := option.get_help_record(context)))


def _commands(command: Any, context: Any, width: int) -> list[str]:
    """Returns the lines of a group's commands, in a section for each kind."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, name)
        if child is None or child.hidden:
            continue
        first = (child.help or "").split("\f")[0].strip().split("\n\n")[0].partition(". ")[0]
        kind = getattr(child, "rich_help_panel", None)
        sections.setdefault(kind if isinstance(kind, str) else _OTHERS, []).append((name, first.rstrip(".") + "."))
    return [line for kind, rows in sections.items() for line in _section(kind, rows, width)]


def _section(title: str, rows: Iterable[tuple[str, str]], width: int) -> list[str]:
    lines = []
    for left, meaning in rows:
        text = _wrapped(meaning, width, _LEFT + 2)
        if len(left) <= _LEFT - 2:
            lines += [f"  {left:<{_LEFT}}{(text or [''])[0].lstrip()}", *text[1:]]
        else:
            lines += [f"  {left}", *text]
    return [f"{title}:", *(line.rstrip() for line in lines), ""] if lines else []


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return textwrap.wrap(
        " ".join(text.split()),
        width,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


__all__ = ["command_path", "help_lines"]
