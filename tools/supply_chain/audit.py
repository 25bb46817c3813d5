"""Audit of the locked packages: `make audit` asks a database on the network for their known vulnerabilities.

It exits with 0 if there is none, with 1 if there are some, and with 2 if the database did not answer for every
package. pip-audit alone would report success in the last case.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lock_files

_VULNERABLE, _UNKNOWN = 1, 2
_NEEDS = "make audit needs a network with access to a database of vulnerabilities: PyPI's, or OSV's with AUDIT=osv"


def verdict(dependencies: Iterable[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Returns the exit status, and lines for people.

    Args:
        dependencies: the packages in pip-audit's JSON. Each has its vulnerabilities, or the reason why it was skipped.
    """
    lines, skipped, audited = [], [], 0
    for each in dependencies:
        if reason := each.get("skip_reason"):
            skipped.append(f"{each['name']}: {reason}")
            continue
        audited += 1
        for found in each["vulns"]:
            fixed = ", ".join(found["fix_versions"]) or "no version"
            lines.append(f"{each['name']} {each['version']} has {found['id']}; fixed in: {fixed}")
    if lines:
        return _VULNERABLE, [*lines, "take newer versions with `make lock UPGRADE=1`"]
    if skipped:
        return _UNKNOWN, [_NEEDS, f"{len(skipped)} packages were not audited; the first one is {skipped[0]}"]
    return 0, [f"no known vulnerabilities in {audited} packages"]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Looks for known vulnerabilities of the locked packages.")
    parser.add_argument("--service", default="pypi", choices=["pypi", "osv"], help="the database (default: pypi)")
    service = parser.parse_args().service
    answers = [
        each
        for pins in _rounds(lock_files.all_packages(lock_files.ROOT / lock_files.FOLDER))
        for each in _ask(service, pins)
    ]
    status, lines = verdict(answers)
    print("\n".join(lines), file=sys.stderr if status else sys.stdout)
    sys.exit(status)


def _rounds(packages: Iterable[lock_files.LockedPackage]) -> list[list[str]]:
    """Returns the packages in lists that have at most one version of each: pip-audit takes no more."""
    rounds: list[dict[str, str]] = []
    for each in packages:
        free = next((pins for pins in rounds if each.name not in pins), None)
        if free is None:
            rounds.append(free := {})
        free[each.name] = f"{each.name}=={each.version}"
    return [list(pins.values()) for pins in rounds]


def _ask(service: str, pins: Iterable[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="shoal-audit-") as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("\n".join(pins) + "\n")
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--format", "json"]
        command += ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--requirement", str(listed)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        dependencies: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        reason = (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
        print(f"{_NEEDS}\npip-audit says: {reason[:500]}", file=sys.stderr)
        sys.exit(_UNKNOWN)
    return dependencies


if __name__ == "__main__":
    main()
