"""Lock files in `requirements/`: the exact packages, with hashes, of Shoal and of each extra of pyproject.toml.

`python tools/supply_chain/lock_files.py` checks that the lock files agree with pyproject.toml; `make lock` renews them.
A lock file is a requirements file of pip. It lists what it needs besides the lock files that it includes:

| lock file | contents |
| --- | --- |
| base.txt | the dependencies of Shoal |
| EXTRA.txt | what an extra adds to base.txt and to the extras that it includes |
| build.txt | the build system of pyproject.toml, for wheels and editable installs |
| GROUP.txt | a dependency group of pyproject.toml; it does not include base.txt |
| cuda-headers.txt | the headers of each version of CUDA, one line each; install.sh of the image picks one |
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = "requirements"
HEADERS = "cuda-headers"

# PyTorch and JAX have a build for each accelerator, and pip's configuration decides which one it installs. Keras needs
# one of them, and Transformers needs PyTorch. The version of Ray must be that of the Ray cluster. submitit is only in
# environments that submit to Slurm.
UNLOCKED_EXTRAS = frozenset({"frameworks", "jax", "keras", "ray", "reference", "slurm", "torch", "transformers"})

# Where the lock files must work: Linux, with the Pythons of pyproject.toml.
_MACHINES = ("x86_64", "aarch64")

_PACKAGE = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)(?: ; (.+?))? \\$")
_HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}( \\)?$")
_INCLUDE = re.compile(r"^-r ([a-z0-9-]+)\.txt$")


@dataclass(frozen=True)
class LockedPackage:
    """A package of a lock file.

    Attributes:
        name: the normalized name.
        version: the only version that may be installed.
        marker: the environments that install it, as a PEP 508 marker; empty for all.
        lines: its lines of the lock file, with its hashes.
    """

    name: str
    version: str
    marker: str
    lines: tuple[str, ...]

    def applies(self, environment: Mapping[str, str]) -> bool:
        """Returns whether an environment installs the package."""
        return not self.marker or Marker(self.marker).evaluate(dict(environment))


@dataclass(frozen=True)
class LockFile:
    """A lock file: its own packages by name, and the names of the lock files that it includes."""

    packages: Mapping[str, LockedPackage]
    includes: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """What pyproject.toml wants of a lock file: requirements, and the lock files to include."""

    requirements: tuple[Requirement, ...]
    includes: tuple[str, ...]


def parse(text: str) -> LockFile:
    """Returns the contents of a lock file.

    Raises:
        ValueError: a line is neither a package with a hash nor an include. The address of an index is such a line.
    """
    packages: dict[str, LockedPackage] = {}
    includes = []
    block: list[str] = []

    def close() -> None:
        if not block:
            return
        found = _PACKAGE.match(block[0])
        if not found or not any(_HASH.match(line) for line in block):
            raise ValueError(f"{block[0]!r} is not a package with a version and a hash")
        name, version, marker = canonicalize_name(found[1]), found[2], found[3] or ""
        if name in packages:
            raise ValueError(f"{name} is there twice")
        packages[name] = LockedPackage(name, version, marker, tuple(block))
        block.clear()

    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if include := _INCLUDE.match(line):
            includes.append(include[1])
        elif line.startswith("    #") or _HASH.match(line):
            block.append(line)
        else:
            close()
            block.append(line)
    close()
    return LockFile(packages, tuple(includes))


def wanted(project: Mapping[str, Any]) -> dict[str, Wanted]:
    """Returns what a parsed pyproject.toml wants of each lock file, by the name of the file."""
    own = project["project"]["name"]
    found = {"base": _wanted(own, project["project"]["dependencies"], ())}
    for extra, lines in project["project"]["optional-dependencies"].items():
        if extra not in UNLOCKED_EXTRAS:
            found[extra] = _wanted(own, lines, ("base",))
    found["build"] = _wanted(own, project["build-system"]["requires"], ())
    for group, lines in project.get("dependency-groups", {}).items():
        found[group] = _wanted(own, lines, ())
    return found


def _wanted(own: str, lines: list[str], includes: tuple[str, ...]) -> Wanted:
    requirements = [Requirement(line) for line in lines]
    extras = [extra for each in requirements if each.name == own for extra in sorted(each.extras)]
    return Wanted(tuple(each for each in requirements if each.name != own), (*includes, *extras))


def read(folder: Path) -> dict[str, LockFile]:
    """Returns the lock files of a folder by name, without the CUDA headers, which no other lock file includes."""
    return {path.stem: parse(path.read_text()) for path in sorted(folder.glob("*.txt")) if path.stem != HEADERS}


def closure(files: Mapping[str, LockFile], name: str) -> set[LockedPackage]:
    """Returns the packages of a lock file and of the lock files that it includes.

    A package is there twice if two lock files install it in different environments.
    """
    found = set(files[name].packages.values())
    return found.union(*(closure(files, include) for include in files[name].includes))


def all_packages(folder: Path) -> list[LockedPackage]:
    """Returns every package of every lock file once for each version, sorted by name."""
    files = [parse(path.read_text()) for path in folder.glob("*.txt") if path.stem != HEADERS]
    headers = folder / f"{HEADERS}.txt"
    found = {(each.name, each.version): each for file in files for each in file.packages.values()}
    for line in headers.read_text().splitlines() if headers.exists() else []:
        if line and not line.startswith("#"):
            name, _, version = line.split(" ", 1)[0].partition("==")
            found[name, version] = LockedPackage(name, version, "", (line,))
    return [found[key] for key in sorted(found)]


def supported_environments(project: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yields the environments in which the lock files must work, for `Marker.evaluate`."""
    pythons = [
        line.rpartition(" ")[2]
        for line in project["project"]["classifiers"]
        if re.search(r":: Python :: 3\.\d+$", line)
    ]
    for python, machine in product(pythons, _MACHINES):
        yield {
            "python_version": python,
            "python_full_version": f"{python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "os_name": "posix",
            "platform_machine": machine,
        }


def faults(project: Mapping[str, Any], files: Mapping[str, LockFile]) -> list[str]:
    """Returns where the lock files disagree with a parsed pyproject.toml, or with each other."""
    want = wanted(project)
    found = [f"there is no {FOLDER}/{name}.txt" for name in want if name not in files]
    found += [f"{FOLDER}/{name}.txt belongs to nothing in pyproject.toml" for name in files if name not in want]
    if found:
        return found
    for name, each in want.items():
        if files[name].includes != each.includes:
            found.append(f"{FOLDER}/{name}.txt includes {files[name].includes}, not {each.includes}")
            continue
        locked = closure(files, name)
        for requirement in each.requirements:
            if reason := _unsatisfied(requirement, locked, project):
                found.append(f"{FOLDER}/{name}.txt {reason}")
    direct = {canonicalize_name(requirement.name) for each in want.values() for requirement in each.requirements}
    versions: dict[str, set[str]] = {}
    for name, file in files.items():
        for package in file.packages.values():
            versions.setdefault(package.name, set()).add(package.version)
            if package.name not in direct and any("(pyproject.toml)" in line for line in package.lines):
                found.append(f"{FOLDER}/{name}.txt has {package.name}, which pyproject.toml no longer names")
    return found + [f"{name} has several versions: {sorted(each)}" for name, each in versions.items() if len(each) > 1]


def _unsatisfied(requirement: Requirement, locked: set[LockedPackage], project: Mapping[str, Any]) -> str:
    """Returns why a lock file does not satisfy a requirement; empty if it does."""
    packages = [each for each in locked if each.name == canonicalize_name(requirement.name)]
    if not packages:
        return f"lacks {requirement.name}"
    for each in packages:
        if not requirement.specifier.contains(each.version, prereleases=True):
            return f"has {each.name} {each.version}; pyproject.toml wants {requirement}"
    for environment in supported_environments(project):
        if not any(each.applies(environment) for each in packages):
            where = f"Python {environment['python_version']} on {environment['platform_machine']}"
            return f"does not install {requirement.name} for {where}"
    return ""


def main() -> None:
    """Checks the lock files of this repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if found := faults(project, read(ROOT / FOLDER)):
        sys.exit("\n".join(["The lock files do not agree with pyproject.toml; renew them with `make lock`:", *found]))


if __name__ == "__main__":
    main()
