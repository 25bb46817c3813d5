"""Build hook of hatchling: writes into each distribution the commit from which it is built, for `shoal version`.

The commit comes from SHOAL_REVISION if this variable is set. A build without the repository, such as the build of the
image, sets this variable. Otherwise the commit comes from git in this folder. A wheel that is built from an sdist keeps
the commit of the sdist. An editable install records no commit: it asks git when it runs.
"""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FILE = "shoal/_system/commit.txt"


def commit(root: Path) -> str:
    """Returns the commit of a folder, with "-dirty" if files differ from it; empty if the commit is not known."""
    if named := os.environ.get("SHOAL_REVISION", ""):
        return named
    if not (root / ".git").exists():  # else git would answer for a repository around it
        return ""
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class CommitHook(BuildHookInterface[Any]):
    """Adds the file with the commit to a wheel or an sdist."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if version == "editable" or (root / "client" / _FILE).exists():
            return
        if found := commit(root):
            self._folder = TemporaryDirectory()
            source = Path(self._folder.name) / "commit.txt"
            source.write_text(found + "\n")
            build_data["force_include"][str(source)] = f"client/{_FILE}" if self.target_name == "sdist" else _FILE

    def finalize(self, *_: Any) -> None:
        if folder := getattr(self, "_folder", None):
            folder.cleanup()
