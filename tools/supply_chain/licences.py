"""List of the licences of all locked packages, in docs/reference/licences.md.

    python tools/supply_chain/licences.py            # writes the list, from the packages that are installed here
    python tools/supply_chain/licences.py --check    # checks that it is complete, and that each licence is allowed

`requirements/licences.toml` has the allowed licences, the exceptions, and the licences that metadata does not say.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import lock_files
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

_PAGE = Path("docs/reference/licences.md")
_RULES = Path(lock_files.FOLDER) / "licences.toml"

# Classifiers that name one licence. "BSD License" does not: there are several.
_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}

_HEAD = """\
# Licences of dependencies

`make lock` writes this page. It lists every package of the lock files in `requirements/`, and the licence that the
package's metadata names. The page says nothing about code that Shoal contains: see `LICENSE` and `THIRD_PARTY.md`.
*base* is what every installation of Shoal contains; the other names are extras and groups of `pyproject.toml`.

| package | licence | needed by |
| --- | --- | --- |
"""
_EXCEPTIONS = """
## Exceptions

All other licences are in the list of allowed licences in `requirements/licences.toml`.

| licence | why it is accepted |
| --- | --- |
"""
_ROW = re.compile(r"^\| (?!package |--- )([a-z0-9-]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Rules:
    """Licences that are allowed, exceptions for single packages, and stated licences, from licences.toml."""

    allowed: frozenset[str]
    exceptions: Mapping[str, Mapping[str, Any]]
    stated: Mapping[str, str]

    def permit(self, package: str, licence: str) -> bool:
        """Returns whether a package may have a licence, which is an SPDX expression without parentheses.

        Of alternatives one must be allowed, of several licences that hold together all.
        """
        if package in self.exceptions.get(licence, {}).get("packages", ()):
            return True
        return any(all(part in self.allowed for part in each.split(" AND ")) for each in licence.split(" OR "))


def rules(root: Path) -> Rules:
    """Returns the rules of a repository."""
    read = tomllib.loads((root / _RULES).read_text())
    return Rules(frozenset(read["allowed"]), read["exceptions"], read["stated"])


def licence_of(distribution: Distribution) -> str:
    """Returns the licence of an installed package as an SPDX expression; empty if its metadata names none."""
    metadata = distribution.metadata
    for named in [*metadata.get_all("License-Expression", []), *metadata.get_all("License", [])]:
        try:
            return str(canonicalize_license_expression(named))
        except InvalidLicenseExpression:
            continue
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if "License ::" in line]
    return _CLASSIFIERS.get(classifiers[0], "") if len(classifiers) == 1 else ""


def page(needed: Mapping[str, str], licences: Mapping[str, str], exceptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page.

    Args:
        needed: for each package the lock files that list it.
        licences: the licence of each package.
        exceptions: the licences that are accepted for some packages, with the reason.
    """
    rows = "".join(f"| {name} | {licences[name]} | {by} |\n" for name, by in sorted(needed.items()))
    reasons = "".join(f"| {licence} | {each['reason']} |\n" for licence, each in sorted(exceptions.items()))
    return _HEAD + rows + _EXCEPTIONS + reasons


def faults(text: str, needed: Mapping[str, str], allowed: Rules) -> list[str]:
    """Returns what is wrong with the text of the page.

    Args:
        text: the page.
        needed: for each package the lock files that list it.
        allowed: the rules.
    """
    rows = {name: (licence, by) for name, licence, by in _ROW.findall(text.partition("## Exceptions")[0])}
    found = [
        f"{name} is not in the list, or is needed by others"
        for name in needed
        if rows.get(name, ("", ""))[1] != needed[name]
    ]
    found += [f"{name} is in the list, but in no lock file" for name in rows if name not in needed]
    return found + [
        f"{name} has the licence {licence}, which is not allowed"
        for name, (licence, _) in rows.items()
        if not allowed.permit(name, licence)
    ]


def needed_by(root: Path) -> dict[str, str]:
    """Returns for each locked package the names of the lock files that list it."""
    files = lock_files.read(root / lock_files.FOLDER)
    listed: dict[str, set[str]] = {}
    for name, file in files.items():
        for package in file.packages:
            listed.setdefault(package, set()).add(name)
    headers = {each.name for each in lock_files.all_packages(root / lock_files.FOLDER)} - set(listed)
    return {
        **{package: ", ".join(sorted(names)) for package, names in listed.items()},
        **dict.fromkeys(headers, lock_files.HEADERS),
    }


def _write(root: Path, needed: Mapping[str, str], allowed: Rules) -> None:
    licences = _licences(needed, allowed, distributions())
    (root / _PAGE).write_text(page(needed, licences, allowed.exceptions))


def _licences(needed: Iterable[str], allowed: Rules, installed: Iterable[Distribution]) -> dict[str, str]:
    excepted = {name: licence for licence, each in allowed.exceptions.items() for name in each["packages"]}
    known = {canonicalize_name(each.name): licence_of(each) for each in installed} | excepted | dict(allowed.stated)
    if unknown := sorted(name for name in needed if not known.get(name)):
        sys.exit(
            f"licences that no metadata names: {', '.join(unknown)}; read them, and add them to {_RULES}, [stated]"
        )
    return {name: known[name] for name in needed}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Writes the list of licences, or checks it.")
    parser.add_argument("--check", action="store_true", help="check the list (default: write it first)")
    arguments = parser.parse_args()
    root, needed, allowed = lock_files.ROOT, needed_by(lock_files.ROOT), rules(lock_files.ROOT)
    if not arguments.check:
        _write(root, needed, allowed)
    if found := faults((root / _PAGE).read_text(), needed, allowed):
        sys.exit(
            "\n".join(
                [f"{_PAGE} is not what `make lock` writes, or has a licence that {_RULES} does not allow:", *found]
            )
        )


if __name__ == "__main__":
    main()
