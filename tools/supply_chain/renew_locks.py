"""Renewal of the lock files: `make lock` keeps the locked versions, `make lock UPGRADE=1` takes the newest ones.

uv resolves pyproject.toml for all Pythons and machines at the same time, with one version of each package. The first
resolution has all extras, so that all lock files agree. The resolution of each lock file then starts from these
versions. It needs a network. uv does not read the configuration of pip, so this program passes on the index and the
certificates.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

import lock_files

UV = Path(sys.executable).with_name("uv")
_HEADER = "# Written by `make lock`; see tools/supply_chain/lock_files.py."

# The headers that CuPy compiles with must fit the compiler of the base image, so each version of CUDA has its own.
_HEADERS = {
    "nvidia-cuda-runtime-cu12": ["12.0", "12.1", "12.2", "12.3", "12.4", "12.5", "12.6", "12.8", "12.9"],
    "nvidia-cuda-runtime": ["13.0", "13.1", "13.2", "13.3", "13.4", "13.5"],
}


def lock_text(own: str, included: Iterable[lock_files.LockedPackage], includes: Iterable[str]) -> str:
    """Returns the text of a lock file.

    Args:
        own: the resolution of everything that the lock file installs, as a requirements file.
        included: the packages that other lock files list.
        includes: the names of these lock files.
    """
    # A package that an included lock file has for fewer environments is listed again.
    listed = {(each.name, each.marker) for each in included}
    lines = [_HEADER, *(f"-r {name}.txt" for name in includes)]
    for each in lock_files.parse(own).packages.values():
        if (each.name, each.marker) not in listed:
            lines += each.lines
    return "\n".join(lines) + "\n"


def renew(root: Path, *, upgrade: bool) -> None:
    """Renews all lock files of a repository.

    Args:
        root: the repository.
        upgrade: whether to take the newest versions instead of the locked ones.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = lock_files.wanted(project)
    folder = root / lock_files.FOLDER
    with tempfile.TemporaryDirectory(prefix="shoal-lock-") as name:
        work = Path(name)
        shutil.copy(root / "pyproject.toml", work)
        for each in ("build", *project.get("dependency-groups", {})):
            (work / f"{each}.in").write_text("\n".join(map(str, wanted[each].requirements)) + "\n")
        locked = [] if upgrade else [each for each in lock_files.all_packages(folder) if each.name not in _HEADERS]
        (work / "all.txt").write_text("".join("\n".join(each.lines) + "\n" for each in locked))
        _compile(work, "all", [source for each in wanted for source in _sources(each, work)])
        written: dict[str, lock_files.LockFile] = {}
        for each in _included_first(wanted):
            shutil.copy(work / "all.txt", work / f"{each}.txt")
            _compile(work, each, _sources(each, work))
            included = {
                package for include in wanted[each].includes for package in lock_files.closure(written, include)
            }
            text = lock_text((work / f"{each}.txt").read_text(), included, wanted[each].includes)
            written[each] = lock_files.parse(text)
            (folder / f"{each}.txt").write_text(text)
        (folder / f"{lock_files.HEADERS}.txt").write_text(_headers(work))
    for stale in set(lock_files.read(folder)) - set(wanted):
        (folder / f"{stale}.txt").unlink()


def _included_first(wanted: dict[str, lock_files.Wanted]) -> list[str]:
    ordered: list[str] = []

    def add(name: str) -> None:
        for include in wanted[name].includes:
            add(include)
        if name not in ordered:
            ordered.append(name)

    for name in wanted:
        add(name)
    return ordered


def _sources(name: str, work: Path) -> list[str]:
    """Returns uv's arguments for what one lock file is made from."""
    if (work / f"{name}.in").exists():
        return [f"{name}.in"]
    return ["pyproject.toml", *(["--extra", name] if name != "base" else [])]


def _headers(work: Path) -> str:
    lines = [_HEADER]
    for package, versions in _HEADERS.items():
        for version in versions:
            (work / "headers.in").write_text(f"{package}=={version}.*\n")
            (work / "headers.txt").write_text("")
            _compile(work, "headers", ["headers.in", "--no-annotate"])
            [found] = lock_files.parse((work / "headers.txt").read_text()).packages.values()
            lines.append(" ".join(line.strip().removesuffix(" \\") for line in found.lines))
    return "\n".join(lines) + "\n"


def _compile(work: Path, name: str, sources: list[str]) -> None:
    """Writes NAME.txt; the versions that it has already are kept where they fit."""
    settings = ["--universal", "--generate-hashes", "--fork-strategy", "fewest", "--no-header", "--quiet"]
    command = [str(UV), "pip", "compile", *settings, *sources, "--output-file", f"{name}.txt"]
    done = subprocess.run(command, cwd=work, env=settings_of_pip(), check=False)
    if done.returncode:
        sys.exit(f"uv could not resolve {name}; it needs a network, and its reason is above")


def settings_of_pip() -> dict[str, str]:
    """Returns the environment of uv: that of this process, with the index and the certificates of pip."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    names = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    found = {}
    for line in listed.stdout.splitlines():
        key, _, value = line.partition("=")
        if variable := names.get(key.rpartition(".")[2]):
            found[variable] = value.strip("'")
    return {**found, **os.environ}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Renews the lock files in requirements/.")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions (default: keep those locked)")
    renew(lock_files.ROOT, upgrade=parser.parse_args().upgrade)
    lock_files.main()


if __name__ == "__main__":
    main()
