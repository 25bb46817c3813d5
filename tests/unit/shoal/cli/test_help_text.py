"""`--help`: nothing that can be typed is cut, and each command ends with examples that its own parser accepts."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from shoal._cli.app import app
from shoal._cli.help import EXAMPLES, command_path, help_lines


def walk(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    yield command, context
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, name)
        yield from walk(child, typer.Context(child, info_name=name, parent=context))


ROOT = typer.main.get_command(app)
COMMANDS = {
    command_path(context): (command, context) for command, context in walk(ROOT, typer.Context(ROOT, info_name="shoal"))
}


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_is_cut_on_a_narrow_screen(name: str, width: int) -> None:
    command, context = COMMANDS[name]
    shown = set(" ".join(help_lines(command, context, width)).split())
    assert not [word for word in shown if word.endswith("…")]
    records = [record for it in command.get_params(context) if (record := it.get_help_record(context))]
    meanings = [meaning for _, meaning in records] + [command.help or ""]
    assert {word for meaning in meanings for word in meaning.split("\f")[0].split()} <= shown
    options = [it for it in command.get_params(context) if it.param_type_name == "option" and not it.hidden]
    assert {word for it in options for word in it.get_help_record(context)[0].split()} <= shown


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_ends_with_examples_that_it_accepts(name: str) -> None:
    examples = EXAMPLES[name]
    command, context = COMMANDS[name]
    assert help_lines(command, context)[-len(examples) - 1 :] == ["Examples:", *(f"  {line}" for line in examples)]
    for line in examples:
        words = [word for word in shlex.split(line) if not word.startswith("TF_CONFIG=")]
        parts = max((path for path in COMMANDS if f"{' '.join(words)} ".startswith(f"{path} ")), key=len).split()
        assert parts[: len(name.split())] == name.split() or name == "shoal"
        meant, _ = COMMANDS[" ".join(parts)]
        # With its environment: an option that has a variable may be missing in the line.
        environment = {"SHOAL_CHECKPOINTS": "checkpoints"}
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            if "--path" not in words:  # its folder must exist
                meant.make_context(" ".join(parts), words[len(parts) :])


def test_examples_are_of_commands() -> None:
    assert EXAMPLES.keys() == COMMANDS.keys()


@pytest.mark.parametrize("arguments", [["-h"], ["submit", "-h"], ["checkpoints", "ls", "-h"], ["server", "-h"]])
def test_has_a_short_option(arguments: list[str]) -> None:
    result, long = (
        CliRunner().invoke(app, given, prog_name="shoal") for given in (arguments, [*arguments[:-1], "--help"])
    )
    assert (result.exit_code, result.stdout) == (0, long.stdout)
    assert "Examples:" in result.stdout


@pytest.mark.parametrize("role", ["server", "worker"])
def test_roles_take_the_coordinator_as_commands_do(role: str) -> None:
    command, _ = COMMANDS[f"shoal {role}"]
    assert command.make_context(role, ["-c", "host:1"]).params["coordinator"] == "host:1"
