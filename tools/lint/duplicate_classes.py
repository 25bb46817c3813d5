"""Lint for class names that the sources define more than once.

    python tools/lint/duplicate_classes.py          # fails if there are more than 5, or one that the glossary lacks
    python tools/lint/duplicate_classes.py --list   # prints all of them, and never fails

A reader who meets a class name must know which class it is. Generated code does not count, nor do private classes
inside functions, nor the Keras-shaped front: its names are those of Keras, and code outside of it writes
`keras.layers.Dense`. A name that two packages share for a reason has a row in the glossary.
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


def duplicates(root: Path, sources: Sequence[str] = SOURCES) -> dict[str, list[str]]:
    """Returns where each class name is defined that is defined more than once.

    Args:
        root: the folder that the sources lie in.
        sources: the folders to read, relative to `root`.

    Returns:
        By name, in alphabetical order: `path:line` of each definition.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for path in sorted((root / source).rglob("*.py")):
            relative = path.relative_to(root)
            if any(map(relative.is_relative_to, (GENERATED, KERAS))) or "__pycache__" in relative.parts:
                continue
            for node in classes(ast.parse(path.read_text(), str(relative))):
                places[node.name].append(f"{relative.as_posix()}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def names_in_glossary(text: str) -> set[str]:
    """Returns the class names in the first column of the glossary's table of shared names.

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
        f"{', '.join(places)}: class {name} is defined {len(places)} times: rename one, or explain both in {GLOSSARY}, "
        f'section "{SECTION}"'
        for name, places in found.items()
        if name not in known
    ]
    if len(found) > most:
        messages.append(f"{len(found)} class names are defined more than once, {most} are allowed: rename some")
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
    parser = argparse.ArgumentParser(description="Reports class names that are defined more than once.")
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
