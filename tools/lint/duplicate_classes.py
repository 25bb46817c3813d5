"""Lint for names of classes and types that the sources define more than once.

    python tools/lint/duplicate_classes.py          # fails if there are more than 5, or one that the glossary lacks
    python tools/lint/duplicate_classes.py --list   # prints all of them, and never fails

A reader who meets such a name must know what it is. Public aliases of types at the top of a module count, too. These do
not count:

- generated code, private classes inside functions, and type variables;
- the options of commands (`flags.Coordinator`), which are read with the name of their module;
- what the Keras-shaped front exports: its names are those of Keras, and code outside of it writes `keras.layers.Dense`.

A name that two packages share for a reason has a row in the glossary.
"""

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = Path("docs/explanation/glossary.md")
SECTION = "Names that two packages define"
SOURCES = ("client/shoal", "server", "worker")
GENERATED = Path("client/shoal/v1")
KERAS = Path("worker/shoal_distribute/keras")
MOST_DUPLICATES = 5


def classes(module: ast.AST, in_function: bool = False) -> Iterator[ast.ClassDef]:
    """Yields the classes of a module that count: all but the private ones inside functions."""
    for node in ast.iter_child_nodes(module):
        if isinstance(node, ast.ClassDef) and not (in_function and node.name.startswith("_")):
            yield node
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from classes(node, inside)


def aliases(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the public names in CamelCase that a module assigns, with their lines; no type variables, no options."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            made_by = node.value.func if isinstance(node.value, ast.Call) else None
            made_by = node.value.value if isinstance(node.value, ast.Subscript) else made_by
            if not (isinstance(made_by, ast.Name) and made_by.id in {"Annotated", "ParamSpec", "TypeVar"}):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", target.id):
                        yield target.id, node.lineno


def exported(module: ast.Module) -> set[str]:
    """Returns the names in `__all__` of a module."""
    found: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.Assign) and [ast.unparse(it) for it in node.targets] == ["__all__"]:
            found |= {*ast.literal_eval(node.value)}
    return found


def duplicates(root: Path, sources: Sequence[str] = SOURCES) -> dict[str, list[str]]:
    """Returns where each name of a class or type is defined that is defined more than once.

    Args:
        root: the folder that the sources lie in.
        sources: the folders to read, relative to `root`.

    Returns:
        By name, in alphabetical order: `path:line` of each definition.
    """
    modules = {
        path.relative_to(root): ast.parse(path.read_text(), str(path))
        for source in sources
        for path in sorted((root / source).rglob("*.py"))
        if not path.is_relative_to(root / GENERATED) and "__pycache__" not in path.parts
    }
    of_keras: set[str] = set().union(*(exported(it) for path, it in modules.items() if is_front_of_keras(path)))
    places: dict[str, list[str]] = defaultdict(list)
    for path, module in modules.items():
        own = [(it.name, it.lineno) for it in classes(module)]
        for name, line in [*own, *aliases(module)]:
            if not (path.is_relative_to(KERAS) and name in of_keras):
                places[name].append(f"{path.as_posix()}:{line}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def is_front_of_keras(path: Path) -> bool:
    """Returns whether users import a module's names: it is `keras`, or a module or a package in it."""
    return path.parent == KERAS or (path.name == "__init__.py" and path.parents[1] == KERAS)


def names_in_glossary(text: str) -> set[str]:
    """Returns the names in the first column of the glossary's table of shared names.

    Args:
        text: the glossary, as Markdown.
    """
    section = re.search(rf"^#+ {SECTION}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return set()
    rows = re.findall(r"^\|([^|]*)\|", section[1], re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def problems(found: Mapping[str, Sequence[str]], known: set[str], most: int = MOST_DUPLICATES) -> list[str]:
    """Returns what is wrong with the duplicates, a message each.

    Args:
        found: the duplicates, by name, with their places.
        known: the names that the glossary explains.
        most: how many duplicates are allowed.
    """
    messages = [
        f"{', '.join(places)}: {name} is defined {len(places)} times: rename one, or explain both in {GLOSSARY}, "
        f'section "{SECTION}"'
        for name, places in found.items()
        if name not in known
    ]
    if len(found) > most:
        messages.append(f"{len(found)} names are defined more than once, {most} are allowed: rename some")
    messages += [
        f'{GLOSSARY}: section "{SECTION}" has {name}, which is not defined twice: remove the row'
        for name in sorted(known - found.keys())
    ]
    return messages


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Runs the lint and returns its exit status.

    Args:
        arguments: the command line without the program's name. Default: this process's.
        root: the repository to look at.
    """
    parser = argparse.ArgumentParser(description="Reports names of classes and types that are defined more than once.")
    parser.add_argument("--list", action="store_true", help="print every such name with its places, and succeed")
    options = parser.parse_args(arguments)
    found = duplicates(root)
    if options.list:
        for name, places in found.items():
            print(f"{name}: {', '.join(places)}")
        return 0
    glossary = root / GLOSSARY
    messages = problems(found, names_in_glossary(glossary.read_text() if glossary.exists() else ""))
    for message in messages:
        print(message)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
