"""Command whose options are the fields of a dataclass."""

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.testing import CliRunner, Result

from shoal._role.options import command_of


@dataclass(frozen=True)
class Tide:
    height: Annotated[float, typer.Option(envvar="TIDE_HEIGHT", min=0, help="Metres.")] = 1.5
    spring: Annotated[bool, typer.Option("--spring")] = False


def ran(*arguments: str, **environment: Any) -> tuple[list[Tide], Result]:
    """What the command was given, and what it printed."""
    given = []

    @command_of(Tide)
    def tide(options: Tide) -> None:
        """Comes in."""
        given.append(options)

    app = typer.Typer()
    app.command()(tide)
    result = CliRunner().invoke(app, list(arguments), env=environment)
    return given, result


def test_each_field_is_an_option_a_variable_and_a_line_of_help() -> None:
    assert ran()[0] == [Tide()]
    assert ran("--height", "2", "--spring")[0] == [Tide(2.0, spring=True)]
    assert ran(TIDE_HEIGHT="3")[0] == [Tide(3.0)]
    text = ran("--help")[1].output
    assert "Comes in." in text
    assert "Metres." in text


def test_role_with_an_invalid_option_does_not_run() -> None:
    given, result = ran("--height", "-1")
    assert not given
    assert result.exit_code == 2
