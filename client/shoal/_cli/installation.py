"""Commands on this installation: `version`, also as `shoal --version`, and `compile`, for container images."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal._cli import options
from shoal._cli.output import Output
from shoal._numerics import kernels
from shoal._system import build


def version(as_json: options.JsonOption = False) -> None:
    """Prints the version and commit of Shoal, and the versions of Python and of the main libraries."""
    with Output(as_json) as out:
        found = build.current()
        out.message(str(found), asdict(found))


def compile_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder for the compiled code. It is created if it does not exist.")
    ],
    level: Annotated[
        list[str] | None,
        typer.Option(help="Processor level, such as x86-64-v3. Repeatable. Default: all levels of this architecture."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compiles all kernels, for a container image. Roles load them from the folder that SHOAL_KERNELS names."""
    with Output(as_json) as out:
        for each in level or kernels.levels():
            started = time.perf_counter()
            kernels.precompile(folder, each)
            seconds = round(time.perf_counter() - started, 1)
            out.message(
                f"{each}: compiled in {seconds:g} s", {"level": each, "seconds": seconds, "folder": str(folder)}
            )


__all__ = ["compile_", "version"]
