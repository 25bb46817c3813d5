"""Size limits that keep the tree readable: modules in a folder, lines of a file, lines of a function."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("client", "server", "worker", "tests", "benchmarks", "examples", "tools")
MODULES, FILE_LINES, FUNCTION_LINES = 20, 400, 60
PATHS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "/v1/" not in path.as_posix() and "__pycache__" not in path.parts
]
SOURCES = [path for path in PATHS if path.relative_to(ROOT).parts[0] in ("client", "server", "worker")]


def test_no_folder_has_more_modules_than_a_reader_takes_in() -> None:
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in PATHS if path.name != "__init__.py")
    assert len(counts) > len(FOLDERS), "the tests would pass on an empty tree"
    assert not {folder: count for folder, count in counts.items() if count > MODULES}


def test_no_file_is_too_long() -> None:
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in SOURCES}
    assert not {name: count for name, count in lines.items() if count > FILE_LINES}


def test_no_function_is_too_long() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not {where: count for where, count in lengths.items() if count > FUNCTION_LINES}
