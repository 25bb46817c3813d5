"""Lint for lines of Markdown prose that are longer than 145 characters.

    python tools/lint/long_lines.py  # fails if there are some; one line for each

Tables, code, and what benchmarks write (between two comments) cannot be wrapped.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 145
_GENERATED = re.compile(r"^<!-- (\w+) -->$.*?^<!-- /\1 -->$", re.MULTILINE | re.DOTALL)


def long_lines(page: str) -> Iterator[tuple[int, int]]:
    """Yields the number and the length of each line of prose that is too long."""
    fenced = False
    page = _GENERATED.sub(lambda block: "\n" * block[0].count("\n"), page)
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and len(line) > LONGEST and not line.startswith(("|", "    ")):
            yield number, len(line)


def main() -> None:
    """Checks all pages that git tracks."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    found = [
        f"{name}:{number}: a line of {length} characters; wrap it at about 140"
        for name in pages
        for number, length in long_lines((ROOT / name).read_text(encoding="utf-8"))
    ]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
