"""The command tree: the commands of the client, and those of the installed roles."""

import functools
import re
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal._cli import (
    checkpoints,
    cluster,
    drain,
    examples,
    groups,
    installation,
    job_metrics,
    job_placement,
    jobs,
    roles,
    submit,
)
from shoal._cli.access import certs, tokens
from shoal._cli.help import help_lines
from shoal._cli.output import EXIT_CODES_HELP

_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "path": "PATH", "Path": "PATH"}
_HELP = ["-h", "--help"]
# Texts of the options that typer adds, in the style of the others.
_ADDED_OPTIONS = {
    "help": "Shows this message and exits.",
    "install_completion": "Installs completion for the current shell.",
    "show_completion": "Shows completion for the current shell, to copy it or to change the installation.",
}


def _name_values(command: Any, name: str) -> Any:
    """Returns the command with a `--help` of Shoal, in which an option has a placeholder for its value, not a type.

    A flag takes no value, so it loses the type that typer shows. The options that typer adds get texts of Shoal.
    """
    command.format_help = functools.partial(_format_help, command)
    context = typer.Context(command, info_name=name, help_option_names=_HELP)
    for option in command.get_params(context):
        if option.name in _ADDED_OPTIONS:
            option.help = _ADDED_OPTIONS[option.name]
        if option.param_type_name != "option" or option.metavar is not None:
            continue
        if option.is_flag:
            option.metavar = ""
        elif shown := re.search(r"<(?:list\[)?(\w+)(?: range)?\]?>$", (option.get_help_record(context) or ("",))[0]):
            option.metavar = _TYPES.get(shown[1])
    for child, each in getattr(command, "commands", {}).items():
        _name_values(each, child)
    return command


def _format_help(command: Any, context: Any, formatter: Any) -> None:
    formatter.write("\n".join(help_lines(command, context)).rstrip("\n"))


class _WithRoles(TyperGroup):
    """Loads `shoal coordinator|server|worker` by entry point when they are called.

    The shared package imports no role, and `shoal jobs` does not wait for the imports of a server.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry_points(group="shoal.roles").names)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for role in entry_points(group="shoal.roles", name=cmd_name):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(name=cmd_name, rich_help_panel="One role")(role.load())
            return _name_values(typer.main.get_command(single), cmd_name)
        found = super().get_command(ctx, cmd_name)
        return found and _name_values(found, cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        options: list[Any] = self.get_params(ctx)
        for option in options:
            option.metavar = ""  # the group's own options are flags
            option.help = _ADDED_OPTIONS.get(option.name, option.help)
        _format_help(self, ctx, formatter)


app = typer.Typer(
    cls=_WithRoles,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES_HELP,
    context_settings={"help_option_names": _HELP},
)
app.command(rich_help_panel="Cluster")(cluster.up)
app.command(rich_help_panel="Cluster")(cluster.status)
app.command(rich_help_panel="Cluster")(drain.drain)
app.command(rich_help_panel="Cluster")(groups.groups)
app.command(rich_help_panel="Cluster")(cluster.page)
app.add_typer(tokens.app, name="token", rich_help_panel="Cluster")
app.command(name="compile", rich_help_panel="Cluster")(installation.compile_)
app.command(rich_help_panel="Cluster")(installation.version)
app.command(rich_help_panel="Jobs")(examples.examples)
app.command(rich_help_panel="Jobs")(submit.submit)
for _command in (
    jobs.jobs,
    jobs.wait,
    jobs.logs,
    job_metrics.metrics,
    job_placement.placement,
    jobs.data,
    jobs.timings,
):
    app.command(rich_help_panel="Jobs")(_command)
app.command(name="set-learning-rate", rich_help_panel="Jobs")(jobs.set_learning_rate)
for _command in (jobs.cancel, jobs.drop, jobs.pull):
    app.command(rich_help_panel="Jobs")(_command)
app.command(rich_help_panel="Checkpoints")(jobs.checkpoint)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel="Checkpoints")
app.add_typer(certs.app, name="certs", rich_help_panel="Cluster")
app.command(rich_help_panel="Checkpoints")(checkpoints.export)
app.command(name="import", rich_help_panel="Checkpoints")(checkpoints.import_)
app.command(rich_help_panel="One role", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    roles.run
)


def find_command(name: str) -> Any:
    """Returns a command of `shoal`, such as that of a role, as it would be called."""
    group = _command_group()
    return group.get_command(typer.Context(group, info_name="shoal"), name)


@functools.cache
def _command_group() -> Any:
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        installation.version()
        raise typer.Exit


@app.callback()
def shoal(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Shows the version and build, and exits."
        ),
    ] = False,
) -> None:
    """A parameter-server cluster for training."""


__all__ = ["app", "find_command"]
