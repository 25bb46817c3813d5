"""List of licences: it is complete, and a licence that is not allowed is an error. `make lint` checks the real one."""

import sys
from email.message import Message
from importlib.metadata import Distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
sys.path.append(str(ROOT / "tools" / "supply_chain"))

import licences  # noqa: E402 - tools are no package

RULES = licences.Rules(
    frozenset({"MIT", "Apache-2.0"}), {"GPL-2.0-only": {"packages": ["codespell"], "reason": "a program"}}, {}
)
NEEDED = {"codespell": "dev", "numpy": "base", "rich": "base"}
LICENCES = {"codespell": "GPL-2.0-only", "numpy": "MIT AND Apache-2.0", "rich": "MIT"}


@pytest.mark.parametrize(
    ("package", "licence", "allowed"),
    [
        ("rich", "MIT", True),
        ("rich", "MIT AND Apache-2.0", True),
        ("rich", "MIT AND GPL-2.0-only", False),
        ("rich", "MIT OR GPL-2.0-only", True),
        ("rich", "GPL-2.0-only", False),
        ("codespell", "GPL-2.0-only", True),
        ("rich", "", False),
    ],
)
def test_which_licences_are_allowed(package: str, licence: str, allowed: bool) -> None:
    assert RULES.permit(package, licence) is allowed


def test_the_page_lists_every_package_and_exception() -> None:
    text = licences.page(NEEDED, LICENCES, RULES.exceptions)
    assert licences.faults(text, NEEDED, RULES) == []
    assert "| GPL-2.0-only | a program |" in text


def test_a_page_that_is_out_of_date() -> None:
    text = licences.page(NEEDED, {**LICENCES, "rich": "GPL-2.0-only"}, {})
    found = licences.faults(text, {"codespell": "dev", "numpy": "data", "typer": "base"}, RULES)
    assert found == [
        "numpy is not in the list, or is needed by others",
        "typer is not in the list, or is needed by others",
        "rich is in the list, but in no lock file",
        "rich has the licence GPL-2.0-only, which is not allowed",
    ]


class Installed(Distribution):
    """A package with this metadata."""

    def __init__(self, *fields: tuple[str, str]) -> None:
        self._message = Message()
        for name, value in fields:
            self._message[name] = value

    def read_text(self, filename: str) -> str | None:
        return self._message.as_string() if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "see file")], "MIT OR Apache-2.0"),
        ([("License", "BSD-3-Clause"), ("Classifier", "License :: OSI Approved :: BSD License")], "BSD-3-Clause"),
        (
            [("License", "Apache 2.0"), ("Classifier", "License :: OSI Approved :: Apache Software License")],
            "Apache-2.0",
        ),
        ([("Classifier", "License :: OSI Approved :: BSD License")], ""),
        (
            [
                ("Classifier", "License :: OSI Approved :: MIT License"),
                ("Classifier", "License :: OSI Approved :: Apache Software License"),
            ],
            "",
        ),
        ([("License", "Copyright the authors")], ""),
    ],
)
def test_the_licence_of_a_package_is_what_its_metadata_names(fields: list[tuple[str, str]], licence: str) -> None:
    assert licences.licence_of(Installed(*fields)) == licence
