"""Codemod that renames identifiers and phrases, by tables of words.toml.

    python tools/codemods/rename_identifiers.py generation       # these tables
    python tools/codemods/rename_identifiers.py --all

A table has `in`, globs of the files that it applies to (default: all), `out`, globs of files that it leaves alone, and
`names`: old = new. A name is replaced where it stands alone as an identifier, in code, strings and documents alike.
`parts` are replaced inside longer identifiers, too: `epoch` in `stale_epoch`, `Epoch` in `StaleEpoch`.
Generated code, the changelog and decisions are left alone; `make protos` follows a rename in protos/.
"""

import argparse
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEXTS = (
    ".py",
    ".proto",
    ".md",
    ".toml",
    ".yaml",
    ".yml",
    ".json",
    ".js",
    ".html",
    ".css",
    ".sh",
    "Makefile",
    "Dockerfile",
)
LEFT_ALONE = (
    "tools/codemods/",
    "tools/lint/",
    "client/shoal/v1/",
    "CHANGELOG.md",
    "docs/explanation/decisions/",
    "tests/golden/",
)


def files_of(table: dict[str, Any]) -> list[Path]:
    """The tracked files that a table applies to."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted, unwanted = table.get("in", ["*"]), table.get("out", [])
    return [
        ROOT / name
        for name in listed.split()
        if name.endswith(TEXTS)
        and not name.startswith(LEFT_ALONE)
        and any(fnmatch(name, glob) for glob in wanted)
        and not any(fnmatch(name, glob) for glob in unwanted)
        and (ROOT / name).is_file()
    ]


def rules_of(table: dict[str, Any]) -> list[tuple[re.Pattern[str], str]]:
    """The patterns of a table and what replaces them, the longest first."""
    names = [(rf"(?<![\w]){re.escape(old)}(?!\w)", new) for old, new in table.get("names", {}).items()]
    parts = [
        (rf"(?<![a-z]){re.escape(old)}(?![a-z])" if old[0].islower() else rf"{re.escape(old)}(?![a-z])", new)
        for old, new in table.get("parts", {}).items()
    ]
    return [(re.compile(pattern), new) for pattern, new in sorted(names + parts, key=lambda rule: -len(rule[0]))]


def main() -> None:
    """Renames what the tables that are named say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    tables = tomllib.loads((Path(__file__).parent / "words.toml").read_text())
    for name in tables if options.all else options.tables:
        rules = rules_of(tables[name])
        for file in files_of(tables[name]):
            text = before = file.read_text()
            for pattern, new in rules:
                text = pattern.sub(new, text)
            if text != before:
                file.write_text(text)


if __name__ == "__main__":
    main()
