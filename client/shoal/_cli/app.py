"""The command tree: the commands of the client, and those of the installed roles."""

from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from shoal._cli import checkpoints, cluster, images, jobs, roles, submit, version
from shoal._cli.output import EXIT_CODES_HELP


class _WithRoles(TyperGroup):
    """Loads `shoal coordinator|server|worker` by entry point when they are called.

    The shared package imports no role, and `shoal jobs` does not wait for the imports of a server.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *entry_points(group="shoal.roles").names]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        for role in entry_points(group="shoal.roles", name=cmd_name):
            single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
            single.command(name=cmd_name, rich_help_panel="One role")(role.load())
            return typer.main.get_command(single)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_WithRoles,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog=EXIT_CODES_HELP,
)
app.command(rich_help_panel="Cluster")(cluster.up)
app.command(rich_help_panel="Cluster")(cluster.status)
app.command(name="compile", rich_help_panel="Cluster")(images.compile_)
app.command(rich_help_panel="Cluster")(version.version)
app.command(rich_help_panel="Jobs")(submit.submit)
for _command in (jobs.jobs, jobs.wait, jobs.logs, jobs.data, jobs.timings, jobs.cancel, jobs.drop, jobs.pull):
    app.command(rich_help_panel="Jobs")(_command)
app.command(rich_help_panel="Checkpoints")(jobs.checkpoint)
app.add_typer(checkpoints.app, name="checkpoints", rich_help_panel="Checkpoints")
app.command(rich_help_panel="Checkpoints")(checkpoints.export)
app.command(name="import", rich_help_panel="Checkpoints")(checkpoints.import_)
app.command(rich_help_panel="One role", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    roles.run
)


def _show_version(wanted: bool) -> None:
    if wanted:
        version.version()
        raise typer.Exit


@app.callback()
def shoal(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and build, and exit."),
    ] = False,
) -> None:
    """A parameter-server cluster for training."""


__all__ = ["app"]
