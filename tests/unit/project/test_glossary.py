"""Glossary: each name in its column "in code" exists in the sources."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GLOSSARY = ROOT / "docs/explanation/glossary.md"
SOURCES = ("client", "server", "worker", "protos")


def in_code() -> list[str]:
    """Returns what stands between backticks in the third column of tables with three columns."""
    rows = re.findall(r"^\|[^|\n]*\|[^|\n]*\|([^|\n]*)\|$", GLOSSARY.read_text(), re.MULTILINE)
    return sorted({name for row in rows for name in re.findall(r"`([^`]+)`", row)})


def lacking(name: str, paths: set[str], texts: list[str]) -> list[str]:
    """Returns the parts of a dotted name that no source defines.

    A part is defined as a file or a folder, a class, a function, a message, an RPC, an enum, or a name that has an
    annotation or a value.
    """
    return [
        part
        for part in ([] if any(path.endswith(f"/{name}") for path in paths) else name.split("."))
        if not any(path.endswith((f"/{part}.py", f"/{part}/__init__.py")) for path in paths)
        and not any(
            part in text  # which is faster than the pattern
            and re.search(rf"\b(?:class|def|message|rpc|enum) {part}\b|\b{part}(?:: | = )", text, re.MULTILINE)
            for text in texts
        )
    ]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The Python and proto files of the product by path, without generated code."""
    found = (path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto"))
    generated = ROOT / "client/shoal/v1"
    return {path.as_posix(): path.read_text() for path in found if not path.is_relative_to(generated)}


def test_every_name_under_in_code_exists(sources: dict[str, str]) -> None:
    names = in_code()
    assert "shoal.Variable" in names
    assert len(names) > 80
    texts = list(sources.values())
    missing = {name: parts for name in names if (parts := lacking(name, set(sources), texts))}
    assert not missing


def test_a_name_that_nothing_defines_is_found(sources: dict[str, str]) -> None:
    assert lacking("Lease.nowhere_to_be_found", set(sources), list(sources.values())) == ["nowhere_to_be_found"]
