"""The running build: the version and commit of Shoal, Python, and the main libraries."""

import json
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Libraries that bug reports name. Those that are not installed are left out.
_LIBRARIES = ("cupy-cuda12x", "cupy-cuda13x", "grpcio", "numba", "numpy", "protobuf")
_COMMIT_FILE = "commit.txt"  # tools/release/commit_hook.py writes it into wheels and sdists
_GIT_S = 10.0


@dataclass(frozen=True)
class Build:
    """The running build.

    Attributes:
        version: version of Shoal.
        commit: abbreviated commit that Shoal was built from, with "-dirty" if files differed from it. None if unknown.
        python: implementation and version of Python.
        platform: system and architecture, such as "Linux-x86_64".
        libraries: versions of the installed libraries by package name.
    """

    version: str
    commit: str | None
    python: str
    platform: str
    libraries: dict[str, str]

    def __str__(self) -> str:
        commit = f" (commit {self.commit})" if self.commit else ""
        libraries = ", ".join(f"{name} {number}" for name, number in self.libraries.items())
        return f"shoal {self.version}{commit}\n{self.python} on {self.platform}; {libraries}"


def current() -> Build:
    """Returns the build that runs in this process."""
    return Build(
        version=version("shoal"),
        commit=_commit(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        platform=f"{platform.system()}-{platform.machine()}",
        libraries=dict(filter(None, map(_installed, _LIBRARIES))),
    )


def _installed(library: str) -> tuple[str, str] | None:
    try:
        return library, version(library)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        return Path(__file__).with_name(_COMMIT_FILE).read_text().strip() or None
    except FileNotFoundError:
        return commit_of(distribution("shoal"))


def commit_of(installed: Distribution) -> str | None:
    """Returns the commit that an installer recorded (PEP 610), or that git names for an editable install.

    Args:
        installed: the distribution as importlib.metadata finds it.
    """
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if recorded := origin.get("vcs_info", {}).get("commit_id"):
        return str(recorded)[:12]
    if not origin.get("dir_info", {}).get("editable"):
        return None
    root = Path(unquote(urlsplit(origin["url"]).path))
    if not (root / ".git").exists():  # else git would answer for a repository around it
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S)  # noqa: S603 - ours
        return found.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


__all__ = ["Build", "commit_of", "current"]
