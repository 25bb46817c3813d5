"""Isolation of the trainers of one worker, and the command that starts an isolated trainer."""

import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal_worker.isolation.environment import check_additions, trainer_environment
from shoal_worker.isolation.limits import TrainerLimits
from shoal_worker.isolation.user import TrainerUser

_TMP = "/tmp"  # noqa: S108 - the folder in it gets a random name
_GUARD = str(Path(__file__).with_name("guard.py"))


@dataclass(frozen=True, slots=True)
class TrainerIsolation:
    """How a worker isolates its trainers.

    Attributes:
        environment: variables besides the allowed ones, each as NAME or NAME=VALUE; see `trainer_environment`.
        limits: resource limits.
        user: the user that trainers run as; None means the daemon's own.
        tls: paths of the files for TLS, from `trainer_tls`. If there are none, trainers use those of the daemon.

    Raises:
        BadRequest: an item of `environment` is invalid.
    """

    environment: tuple[str, ...] = field(default=(), repr=False)  # may hold secrets
    limits: TrainerLimits = field(default_factory=TrainerLimits)
    user: TrainerUser | None = None
    tls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_additions(self.environment)

    def guarded(
        self, command: Sequence[str], lifeline: int, reports: int, daemon: Mapping[str, str] = os.environ
    ) -> "GuardedCommand":
        """Returns the command of the guard that runs a trainer.

        Args:
            command: the trainer's command.
            lifeline: file descriptor that the guard inherits and whose end it waits for.
            reports: file descriptor that the trainer inherits through the guard.
            daemon: the daemon's environment.

        Raises:
            OSError: the trainer's folder cannot be created.
        """
        settings: dict[str, Any] = {"command": list(command), "limits": self.limits.by_resource()}
        settings |= {"lifeline": lifeline, "reports": reports}
        if self.user is None:
            scratch, own = "", dict(daemon)
        else:
            scratch = _own_folder(self.user)
            settings |= {"user": self.user.uid, "group": self.user.gid, "scratch": scratch}
            own = {**daemon, **_variables(self.user, scratch)}
        environment = trainer_environment(own, self.environment)
        # -I and -S: the guard loads no files of the user, and no packages of this environment.
        words = (sys.executable, "-I", "-S", _GUARD, json.dumps(settings))
        return GuardedCommand(words, environment, scratch)


@dataclass(frozen=True, slots=True)
class GuardedCommand:
    """The command of a guard, with what its trainer gets.

    Attributes:
        words: the command.
        environment: the environment of the guard and of the trainer.
        scratch: a folder that belongs to the trainer's user; empty if the trainer has the daemon's user.
    """

    words: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    scratch: str = ""

    def clean_up(self) -> None:
        """Removes the trainer's folder, in case the guard did not start or could not remove it."""
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _own_folder(user: TrainerUser) -> str:
    """Creates a temporary folder that only this user, and root, may enter.

    The folder is in the daemon's TMPDIR, or in /tmp if other users cannot enter TMPDIR.
    """
    place = next((each for each in (tempfile.gettempdir(), _TMP) if _is_open(Path(each))), None)
    folder = tempfile.mkdtemp(prefix="shoal-trainer-", dir=place)
    try:
        os.chown(folder, user.uid, user.gid)
    except OSError:
        os.rmdir(folder)
        raise
    return folder


def _is_open(folder: Path) -> bool:
    """Returns whether all users may enter a folder."""
    return all(each.stat().st_mode & stat.S_IXOTH for each in (folder, *folder.parents))


def _variables(user: TrainerUser, scratch: str) -> dict[str, str]:
    """Returns the variables that replace those of the daemon's user.

    Numba and CuPy keep compiled code in a folder. They refuse a folder that they cannot write to. If other users could
    write to the folder, they could run code as the trainer's user.
    """
    return {
        "HOME": user.home or scratch,
        "USER": user.name,
        "LOGNAME": user.name,
        "TMPDIR": scratch,
        "NUMBA_CACHE_DIR": f"{scratch}/numba",
    }


__all__ = ["GuardedCommand", "TrainerIsolation"]
