"""The command `examples`, which lists and copies the examples that Shoal is installed with."""

import ast
import shutil
from pathlib import Path
from typing import Annotated

import typer

import shoal
from shoal import errors
from shoal._cli import options
from shoal._cli.output import Output, Row

# In a wheel beside the package; in a checkout at its root.
_FOLDERS = (Path(shoal.__file__).parent / "_examples", Path(shoal.__file__).parents[2] / "examples")


def examples(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="Examples to copy. Without one, all are listed.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Copies all examples.")] = False,
    to: Annotated[Path, typer.Option("--to", help="Folder to copy to. It is created if it is missing.")] = Path(),
    as_json: options.JsonOption = False,
) -> None:
    """Lists the examples that Shoal is installed with, or copies some of them, with the files that they need.

    Existing files are not overwritten.
    """
    with Output(as_json) as out:
        found = {path.name: path for path in _found()}
        chosen = list(found) if everything else [_file_name(name, found) for name in names or ()]
        if not chosen:
            rows: list[tuple[list[str], Row]] = [
                ([name, _purpose(path)], {"name": name, "purpose": _purpose(path)}) for name, path in found.items()
            ]
            out.rows("", ["example", "purpose"], rows, notes=["`shoal examples NAME` copies one to this folder"])
        for name, source in _with_their_files(chosen, found).items():
            target = to / name
            _copy(source, target)
            out.message(f"wrote {target}", {"name": name, "file": str(target)})


def _found() -> list[Path]:
    folder = next((it for it in _FOLDERS if it.is_dir()), None)
    if folder is None:
        raise errors.BadRequest("this installation has no examples; install the wheel of Shoal, or use its repository")
    return sorted([*folder.glob("*.py"), *folder.glob("distribute/*.py")], key=lambda path: path.name)


def _file_name(name: str, found: dict[str, Path]) -> str:
    file = name if name.endswith(".py") else f"{name}.py"
    if file not in found:
        raise errors.BadRequest(f"there is no example {name!r}; choose one of: {', '.join(found)}", name=name)
    return file


def _with_their_files(chosen: list[str], found: dict[str, Path]) -> dict[str, Path]:
    """Returns the chosen examples, the examples that they import, and their data files, by name."""
    files: dict[str, Path] = {}
    waiting = [found[name] for name in chosen]
    while waiting:
        path = waiting.pop(0)
        if path.name in files:
            continue
        files[path.name] = path
        if path.name in found:
            text = path.read_text(encoding="utf-8")
            waiting += [found[f"{module}.py"] for module in _imported(text) if f"{module}.py" in found]
            # An example names each data file that it reads.
            waiting += [data for data in sorted(path.parent.glob("*.npz")) if data.name in text]
    return files


def _imported(text: str) -> list[str]:
    """Returns the names of the modules that an example imports."""
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return modules


def _purpose(path: Path) -> str:
    """Returns the first paragraph of an example's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def _copy(source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as read, target.open("xb") as written:
            shutil.copyfileobj(read, written)
    except FileExistsError:
        raise errors.BadRequest(f"{target} exists, and is not overwritten; name another folder with --to") from None
    except OSError as error:
        raise errors.BadRequest(f"cannot write {target}: {error.strerror}; name another folder with --to") from None


__all__ = ["examples"]
