"""The version of Shoal: checks that all mentions of it agree with pyproject.toml, or sets it everywhere.

    python tools/release/version.py          # prints the version; fails if a mention differs
    python tools/release/version.py 0.2.0    # sets it, and makes a heading for the unreleased part of CHANGELOG.md

`shoal.__version__` and the wheel get the version from pyproject.toml. The other mentions are `ARG VERSION` in the
Dockerfile, and the tags of images (`shoal:X.Y.Z`) in README.md, deploy/ and docs/, which people copy.
"""

import argparse
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]

_NUMBER = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
_OWN = re.compile(rf'(?<=^version = "){_NUMBER}(?="$)', re.MULTILINE)
_MENTION = re.compile(rf"(?:(?<=\bshoal:)|(?<=^ARG VERSION=)){_NUMBER}", re.MULTILINE)
_UNRELEASED = "## [Unreleased]\n"


def version(root: Path) -> str:
    """Returns the version in pyproject.toml."""
    found = _OWN.search((root / "pyproject.toml").read_text())
    if not found:
        raise SystemExit(f"{root / 'pyproject.toml'} has no line 'version = \"X.Y.Z\"'")
    return found[0]


def mentions(root: Path) -> list[tuple[str, str]]:
    """Returns where else a version of Shoal is written, as file:line, and which."""
    found = []
    for path in _files(root):
        text = path.read_text()
        for match in _MENTION.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append((f"{path.relative_to(root)}:{line}", match[0]))
    return found


def set_version(root: Path, new: str, today: date) -> None:
    """Sets the version everywhere, and heads the unreleased part of the changelog with it.

    Raises:
        SystemExit: it is not a version, or the changelog has it already.
    """
    if not re.fullmatch(_NUMBER, new):
        raise SystemExit(f"{new!r} is not a version: give X.Y.Z, or X.Y.Z followed by a1, b1 or rc1 for a pre-release")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    if f"## [{new}]" in text or _UNRELEASED not in text:
        raise SystemExit(f"CHANGELOG.md has '## [{new}]' already, or lacks '## [Unreleased]'")
    changelog.write_text(text.replace(_UNRELEASED, f"{_UNRELEASED}\n## [{new}] - {today.isoformat()}\n", 1))
    project = root / "pyproject.toml"
    project.write_text(_OWN.sub(new, project.read_text(), count=1))
    for path in _files(root):
        before = path.read_text()
        after = _MENTION.sub(new, before)
        if after != before:
            path.write_text(after)


def _files(root: Path) -> Iterator[Path]:
    """Yields the files that name images for people and clusters; decisions keep what was true when they were made."""
    yield root / "Dockerfile"
    yield root / "README.md"
    for folder, *suffixes in (("deploy", "", ".yml", ".yaml", ".example", ".md"), ("docs", ".md")):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in suffixes and "decisions" not in path.parts:
                yield path


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Prints the version and checks all mentions, or sets the version.")
    parser.add_argument("version", nargs="?", help="the new version, such as 0.2.0 (default: print and check)")
    new = parser.parse_args().version
    if new:
        set_version(ROOT, new, datetime.now(UTC).date())
    check()


def check() -> None:
    """Prints the version. Raises SystemExit if a mention differs from it."""
    own = version(ROOT)
    if other := [f"{where} has {found}" for where, found in mentions(ROOT) if found != own]:
        raise SystemExit(f"pyproject.toml has version {own}, and\n  " + "\n  ".join(other))
    print(own)


if __name__ == "__main__":
    main()
