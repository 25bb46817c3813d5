"""Codemod that moves modules into packages and rewrites what names them.

    python tools/codemods/move_modules.py memory wire       # these tables of rooms.toml
    python tools/codemods/move_modules.py --all

It moves the files with `git mv`, rewrites import statements by their syntax tree, and dotted names and paths in
strings, docstrings and documents by text. It changes no logic. Running it again changes nothing. To update a branch
from before a move, merge the move into the branch and run the codemod there once more.
"""

import argparse
import ast
import re
import subprocess
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"shoal": "client", "shoal_server": "server", "shoal_coordinator": "server"}
FOLDERS |= {"shoal_worker": "worker", "shoal_nn": "worker"}
TEXTS = (".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".json", "Makefile", "Dockerfile", ".proto")
# Their words are history, or somebody else's.
IMPORT = re.compile(r"\s*(from|import) ")
WIDTH = 120
LEFT_ALONE = ("tools/codemods/", "client/shoal/v1/", "CHANGELOG.md")


def path_of(module: str) -> Path:
    """The file that a module is, or would be, in."""
    parts = module.split(".")
    return Path(FOLDERS[parts[0]], *parts[:-1], parts[-1] + ".py")


def git(*command: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def move(old: str, new: str) -> None:
    """Moves a module's file, and makes the packages on its way."""
    source, target = path_of(old), path_of(new)
    if not (ROOT / source).exists():
        return
    # A module whose name becomes its package's steps aside first.
    package = target.parent
    aside = source.with_name(source.stem + "_moving.py")
    git("mv", str(source), str(aside))
    (ROOT / package).mkdir(parents=True, exist_ok=True)
    git("mv", str(aside), str(target))
    while package.name not in ("client", "server", "worker"):
        door = ROOT / package / "__init__.py"
        if not door.exists():
            door.write_text(f'"""The package {package.name.strip("_")}."""\n')
            git("add", str(door))
        package = package.parent


class Rewriter:
    """Rewrites one file's imports.

    Args:
        moved: the new module of each old one.
        modules: the dotted names of all modules and packages that there are now.
    """

    def __init__(self, moved: dict[str, str], modules: set[str]) -> None:
        self._moved, self._modules = moved, modules

    def rewrite(self, text: str) -> str:
        tree = ast.parse(text)
        lines = text.split("\n")
        renamed: dict[str, str] = {}
        edits: list[tuple[int, int, list[str]]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (replaced := self._from(node, tree, renamed)):
                indent = lines[node.lineno - 1][: node.col_offset]
                edits.append((node.lineno, node.end_lineno or node.lineno, [indent + line for line in replaced]))
        for start, end, replacement in sorted(edits, reverse=True):
            comment = re.search(r"  # .*$", lines[start - 1])
            if comment:
                replacement[0] += comment.group()
            lines[start - 1 : end] = replacement
        text = "\n".join(lines)
        return rename(text, renamed) if renamed else text

    def _from(self, node: ast.ImportFrom, tree: ast.Module, renamed: dict[str, str]) -> list[str]:
        assert node.module
        found: dict[str, list[str]] = defaultdict(list)
        changed = False
        for alias in node.names:
            source, name, shown = node.module, alias.name, alias.asname
            whole = f"{source}.{name}"
            if whole in self._moved and whole not in DOORS:  # a module as an object
                target = self._moved[whole]
                source, _, leaf = target.rpartition(".")
                if shown is None and leaf != name:
                    if leaf in names_in(tree) - {name}:
                        shown = name
                    else:
                        renamed[name] = leaf
                name = leaf
                changed = True
            elif source in self._moved and whole not in self._modules and name not in exported(source):
                source = self._moved[source]
                changed = True
            found[source].append(name if shown in (None, name) else f"{name} as {shown}")
        return [f"from {source} import {', '.join(names)}" for source, names in found.items()] if changed else []


# Modules that other code uses as objects by the name of what is a package now: its `__init__` has their names.
DOORS = {"shoal._rpc", "shoal.optim"}


def exported(package: str) -> set[str]:
    """The names that a package's door imports."""
    door = ROOT / path_of(package).with_suffix("") / "__init__.py"
    if not door.exists():
        return set()
    nodes = ast.walk(ast.parse(door.read_text()))
    return {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def names_in(tree: ast.Module) -> set[str]:
    """Every identifier that a file binds or uses outside attributes."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import))
    return found | {alias.asname or alias.name for node in imports for alias in node.names}


def rename(text: str, renamed: dict[str, str]) -> str:
    """Renames module objects where they are used."""
    tree = ast.parse(text)
    lines = [line.encode() for line in text.split("\n")]
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in renamed]
    for node in sorted(uses, key=lambda it: (it.lineno, it.col_offset), reverse=True):
        line = lines[node.lineno - 1]
        start, end = node.col_offset, node.col_offset + len(node.id.encode())
        lines[node.lineno - 1] = line[:start] + renamed[node.id].encode() + line[end:]
    return "\n".join(line.decode() for line in lines)


def mentions(text: str, moved: dict[str, str]) -> str:
    """Rewrites dotted names and file paths in strings, docstrings and documents."""
    for old, new in sorted(moved.items(), key=lambda item: -len(item[0])):
        if old in DOORS:
            continue
        leaves = "|".join(sorted({it.rpartition(".")[2] for it in moved.values() if it.rpartition(".")[0] == old}))
        guard = rf"(?!\.(?:{leaves})\b)" if leaves else ""
        pattern = rf"(?<![\w.]){re.escape(old)}\b(?!/){guard}"
        text = "\n".join(line if IMPORT.match(line) else re.sub(pattern, new, line) for line in text.split("\n"))
        text = text.replace(str(path_of(old)), str(path_of(new)))
    return text


def wrapped(text: str) -> str:
    """Wraps lines of docstrings and comments that have become too long, into the lines that follow."""
    lines = text.split("\n")
    documents = documented(ast.parse(text))
    index = 0
    while index < len(lines):
        line = lines[index]
        mark = re.match(r"\s*(# )?", line).group()  # type: ignore[union-attr]
        if len(line) <= WIDTH or not ("#" in mark or index + 1 in documents) or ("#" not in mark and '"""' in line):
            index += 1
            continue
        end = line.rfind(" ", 0, WIDTH + 1)
        lines[index], rest = line[:end], line[end + 1 :]
        following = lines[index + 1] if index + 1 < len(lines) else ""
        goes_on = following.startswith(mark) and following[len(mark) : len(mark) + 1].strip() and '"""' not in following
        if goes_on:
            lines[index + 1] = f"{mark}{rest} {following[len(mark) :]}"
        else:
            lines.insert(index + 1, mark + rest)
            documents = {number + (number > index + 1) for number in documents} | {index + 2}
        index += 1
    return "\n".join(lines)


def documented(tree: ast.Module) -> set[int]:
    """The numbers of the lines of docstrings."""
    strings = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {number for node in strings for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def main() -> None:
    """Moves the rooms that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    tables = tomllib.loads((Path(__file__).parent / "rooms.toml").read_text())
    chosen = list(tables) if options.all else options.rooms
    moved = {old: new for room in chosen for old, new in tables[room].items()}
    for old, new in moved.items():
        move(old, new)
    files = git("ls-files").split("\n")
    pythons = [name for name in files if name.endswith(".py")]
    modules = {
        ".".join(Path(name).with_suffix("").parts[1:]).removesuffix(".__init__")
        for name in pythons
        if name.startswith(("client/", "server/", "worker/"))
    }
    rewriter = Rewriter(moved, modules)
    for name in filter(None, files):
        if name.startswith(LEFT_ALONE) or not name.endswith(TEXTS) or not (ROOT / name).is_file():
            continue
        file = ROOT / name
        before = text = file.read_text()
        if name.endswith(".py"):
            text = rewriter.rewrite(text)
        text = mentions(text, moved)
        if name.endswith(".py") and text != before:
            text = wrapped(text)
        if text != before:
            file.write_text(text)


if __name__ == "__main__":
    main()
