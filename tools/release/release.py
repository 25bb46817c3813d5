"""Builder of a release in dist/, which also proves that the release works: `make release`.

docs/how-to/release.md has the procedure. The script takes these steps:

1. It builds a wheel and an sdist from the tracked files, with the build system of the lock files.
2. It checks what they contain, file by file, and their metadata.
3. It installs each in a clean environment outside of the repository, and trains there (`smoke.py`). The wheel gets the
   locked dependencies. The sdist gets what the index has, as for users.
4. It writes the SBOM of the wheel's environment, and SHA256SUMS.

At the end it lists what is still missing before the files may be published.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.utils import canonicalize_name

sys.path.append(str(Path(__file__).parents[1] / "supply_chain"))

import lock_files
import version

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PACKAGES = (
    "client/shoal",
    "server/shoal_server",
    "server/shoal_coordinator",
    "worker/shoal_worker",
    "worker/shoal_nn",
    "worker/shoal_distribute",
)
EXAMPLES = ("examples/", "shoal/_examples/")  # in the repository, and in a wheel
COMMIT_FILE = "shoal/_system/commit.txt"

_PLACEHOLDER = "example.invalid"
_SMOKE_LIMIT_S = 300.0


def wheel_faults(members: set[str], tracked: set[str]) -> list[str]:
    """Returns what a wheel lacks of the packages, and what it has besides.

    Args:
        members: the wheel's files.
        tracked: the repository's files.
    """
    owners = {package: package.partition("/")[0] + "/" for package in PACKAGES}
    wanted = {
        path.removeprefix(owner)
        for package, owner in owners.items()
        for path in tracked
        if path.startswith(package + "/")
    }
    found = {path for path in members if ".dist-info/" not in path}
    wanted |= {path.replace(EXAMPLES[0], EXAMPLES[1], 1) for path in tracked if path.startswith(EXAMPLES[0])}
    return _differences("the wheel", found, wanted | {COMMIT_FILE})


def sdist_faults(members: set[str], tracked: set[str]) -> list[str]:
    """Returns what an sdist lacks of the tracked files, and what it has besides.

    Args:
        members: the sdist's files, without the folder that holds them.
        tracked: the repository's files.
    """
    return _differences("the sdist", members, tracked | {"PKG-INFO", f"client/{COMMIT_FILE}"})


def _differences(what: str, found: set[str], wanted: set[str]) -> list[str]:
    lacking = [f"{what} lacks {path}" for path in sorted(wanted - found)]
    return lacking + [f"{what} has {path}, which no commit has" for path in sorted(found - wanted)]


def sbom_faults(sbom: Mapping[str, Any], number: str) -> list[str]:
    """Returns where an SBOM differs from the lock file of Shoal's dependencies, requirements/base.txt.

    Args:
        sbom: the SBOM, in CycloneDX's JSON.
        number: the version of Shoal.
    """
    files = lock_files.read(ROOT / lock_files.FOLDER)
    environment = {name: str(value) for name, value in default_environment().items()}
    locked = {(each.name, each.version) for each in lock_files.closure(files, "base") if each.applies(environment)}
    found = {(canonicalize_name(each["name"]), each["version"]) for each in sbom.get("components", ())}
    root = sbom["metadata"]["component"]
    faults = [] if (root["name"], root["version"]) == ("shoal", number) else [f"the SBOM is not of shoal {number}"]
    faults += [f"the SBOM lacks {name} {version}" for name, version in sorted(locked - found)]
    return faults + [f"the SBOM has {name} {version}, which is not locked" for name, version in sorted(found - locked)]


def unready(project: str, changelog: str, number: str, state: str, tags: set[str]) -> list[str]:
    """Returns what is missing before a build may be published.

    Args:
        project: the text of pyproject.toml.
        changelog: the text of CHANGELOG.md.
        number: the version.
        state: what `git status --porcelain` prints.
        tags: those of the commit that was built.
    """
    found = []
    if _PLACEHOLDER in project:
        found.append(f"[project.urls] in pyproject.toml points to {_PLACEHOLDER}: name the project's address")
    if state:
        found.append("files differ from the last commit: commit them, and build again")
    if not re.search(rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        found.append(f"CHANGELOG.md has no '## [{number}] - DATE': `make version VERSION={number}` writes one")
    if f"v{number}" not in tags:
        found.append(f"the commit has no tag v{number}: `git tag --sign v{number}`")
    return found


def main() -> None:
    """Makes a release."""
    argparse.ArgumentParser(
        description="Builds wheel and sdist in dist/, and tests each in a clean environment."
    ).parse_args()
    version.check()
    number = version.version(ROOT)
    shutil.rmtree(DIST, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    wheel, sdist = DIST / f"shoal-{number}-py3-none-any.whl", DIST / f"shoal-{number}.tar.gz"
    sbom = DIST / f"shoal-{number}.cdx.json"
    _check_contents(wheel, sdist)
    _run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    _smoke(wheel, sbom)
    _smoke(sdist)
    if faults := sbom_faults(json.loads(sbom.read_text()), number):
        raise SystemExit("\n".join(faults))
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in (wheel, sdist, sbom)]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")
    tags = set(_git("tag", "--points-at", "HEAD").split())
    project, changelog = ((ROOT / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md"))
    left = unready(project, changelog, number, _git("status", "--porcelain"), tags)
    print("\n  ".join(["Before this is published:", *left]) if left else "Ready to publish: dist/")


def _check_contents(wheel: Path, sdist: Path) -> None:
    tracked = set(_git("ls-files").splitlines())
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        commit = archive.read(COMMIT_FILE).decode().strip()
    with tarfile.open(sdist) as tar:
        in_sdist = {member.name.partition("/")[2] for member in tar.getmembers() if not member.isdir()}
    if faults := wheel_faults(in_wheel, tracked) + sdist_faults(in_sdist, tracked):
        raise SystemExit("\n".join(faults))
    for path, files in ((wheel, in_wheel), (sdist, in_sdist)):
        print(f"{path.name}: {len(files)} files, {path.stat().st_size / 1e6:.1f} MB, commit {commit}")


def _smoke(built: Path, sbom: Path | None = None) -> None:
    """Installs a distribution in an environment of its own, and trains there.

    Args:
        built: the distribution.
        sbom: the SBOM to write. The environment then has the locked dependencies; otherwise it has those of the index.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shoal-release-") as folder:
        _run(sys.executable, "-m", "venv", f"{folder}/venv")
        python = f"{folder}/venv/bin/python"
        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        if sbom:
            _run(*install, "--require-hashes", "--requirement", ROOT / lock_files.FOLDER / "base.txt")
            _run(*install, "--no-index", built)
        else:
            _run(*install, built)
        shutil.copy(Path(__file__).with_name("smoke.py"), folder)
        # Nothing of this repository or of this environment.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SHOAL_"))}
        environment = {**kept, "PATH": f"{folder}/venv/bin:{os.environ['PATH']}"}
        _run(python, "smoke.py", version.version(ROOT), cwd=folder, env=environment, timeout=_SMOKE_LIMIT_S)
        if sbom:
            _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip")  # the venv's own
            settings = ("--pyproject", ROOT / "pyproject.toml", "--output-reproducible", "--output-file", sbom)
            _run(sys.executable, "-m", "cyclonedx_py", "environment", *settings, python)
    print(f"{built.name}: installs and trains in a clean environment ({time.monotonic() - started:.0f} s)")


def _run(*command: str | Path, **options: object) -> None:
    print("+", *(str(word).replace(f"{ROOT}/", "") for word in command), flush=True)
    done = subprocess.run(command, check=False, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
