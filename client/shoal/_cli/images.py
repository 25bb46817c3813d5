"""The command `compile`, which compiles kernels in advance when a container image is built."""

import time
from pathlib import Path
from typing import Annotated

import typer

from shoal._cli import options
from shoal._cli.output import Output
from shoal._numerics import kernels


def compile_(
    folder: Annotated[Path, typer.Argument(help="Folder for the compiled code. It is created if it does not exist.")],
    level: Annotated[
        list[str] | None,
        typer.Option(help="Processor level, such as x86-64-v3. Repeatable. Default: all levels of this architecture."),
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compiles all kernels for an image. Roles load them from the folder that SHOAL_KERNELS names."""
    with Output(as_json) as out:
        for each in level or kernels.levels():
            started = time.perf_counter()
            kernels.precompile(folder, each)
            seconds = round(time.perf_counter() - started, 1)
            out.message(
                f"{each}: compiled in {seconds:g} s", {"level": each, "seconds": seconds, "folder": str(folder)}
            )


__all__ = ["compile_"]
