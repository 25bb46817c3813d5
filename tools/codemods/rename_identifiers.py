"""Codemod that renames identifiers, by tables of words.toml.

    python tools/codemods/rename_identifiers.py coordinator       # these tables
    python tools/codemods/rename_identifiers.py --all

A table has `in`, globs of the files that it applies to (default: all), and `names`: old = new. A name that no prose can
contain (`take_up`, `JobLife`) is replaced wherever it stands alone. A name that is also an English word (`Part`,
`blamed`) is replaced in code and between backticks, but not in comments, strings and documents.
Generated code, the changelog, decisions and recorded files are left alone; `make protos` follows a rename in protos/.
"""

import argparse
import ast
import io
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEXTS = (".py", ".proto", ".md", ".toml", ".yaml", ".yml", ".json", ".js", ".html", ".css", "Makefile", "Dockerfile")
LEFT_ALONE = (
    "tests/unit/project/",
    "tools/",
    "client/shoal/v1/",
    "CHANGELOG.md",
    "docs/decisions/",
    "docs/explanation/decisions/",
    "tests/golden/",
)
# What an attribute of these is called is not ours to change, or is changed in protos/.
FOREIGN = re.compile(r"asyncio|threading|multiprocessing|pb|\w+_pb2|tf|torch|np|xp|nn|keras|typing")
Rules = dict[str, str]


def files_of(table: dict[str, Any]) -> list[Path]:
    """The tracked files that a table applies to."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [
        ROOT / name
        for name in listed.split()
        if name.endswith(TEXTS)
        and not name.startswith(LEFT_ALONE)
        and any(fnmatch(name, glob) for glob in table.get("in", ["*"]))
        and (ROOT / name).is_file()
    ]


def is_word(name: str) -> bool:
    """Whether prose may contain it: no underscore, and no capital letter but the first."""
    return name.isalpha() and name[1:].islower()


def replacer(rules: Rules) -> Callable[[str], str]:
    """A function that replaces the names in a text."""
    if not rules:
        return lambda text: text
    pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, sorted(rules, key=len, reverse=True)))})(?!\w)")
    return lambda text: pattern.sub(lambda found: rules[found.group()], text)


def renamed_python(text: str, words: Rules) -> str:
    """A Python file with words renamed in code, in the braces of f-strings, and between backticks.

    A string that is nothing but a name is an annotation or a line of `__all__` if the name begins with a capital; for
    others, only strings of `__all__` are names.
    """
    lines = text.splitlines(keepends=True)
    in_braces, replace = re.compile(r"\{[^{}]*\}"), replacer(words)
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    exported = text.find("__all__ = ")
    first_exported = text[:exported].count("\n") + 1 if exported >= 0 else len(lines) + 1
    for index, token in enumerate(tokens):
        new = token.string
        if token.type == tokenize.NAME:
            if not (tokens[index - 1].string == "." and FOREIGN.fullmatch(tokens[index - 2].string)):
                new = words.get(new, new)
        elif (
            token.type == tokenize.STRING
            and (new[1:2].isupper() or token.start[0] >= first_exported)
            and new[1:-1] in words
        ):
            new = f'"{words[new[1:-1]]}"'
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            new = re.sub(r"`[^`\n]+`", lambda found: replace(found.group()), new)
            if token.type == tokenize.STRING and "f" in token.string.partition(token.string[-1])[0].lower():
                new = in_braces.sub(lambda found: replace(found.group()), new)
        if new != token.string:
            edits.append((token.start, token.end, new))
    for (row, column), (end_row, end_column), new in reversed(edits):
        head, tail = lines[row - 1][:column], lines[end_row - 1][end_column:]
        lines[row - 1 : end_row] = [head + new + tail]
    return "".join(lines)


def renamed(file: Path, rules: Rules) -> str:
    """A file's text, renamed."""
    words = {old: new for old, new in rules.items() if is_word(old)}
    text = replacer({old: new for old, new in rules.items() if old not in words})(file.read_text())
    if not words:
        return text
    if file.suffix == ".py":
        text = renamed_python(text, words)
        ast.parse(text)
        return text
    if file.suffix in (".md", ".proto"):
        return re.sub(r"`[^`\n]+`", lambda found: replacer(words)(found.group()), text)
    return text


def main() -> None:
    """Renames what the tables that are named say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    tables = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
    for name in tables if options.all else options.tables:
        for file in files_of(tables[name]):
            text = renamed(file, tables[name]["names"])
            if text != file.read_text():
                file.write_text(text)


if __name__ == "__main__":
    main()
