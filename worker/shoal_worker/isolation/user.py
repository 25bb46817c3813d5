"""User account that trainers run as, if the operator names one with --trainer-user."""

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal import errors

# Capabilities by their bits: to change the owner of a folder, to stop another user's process, and to become a user.
_NEEDED = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
_PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class TrainerUser:
    """A user that trainers run as.

    Attributes:
        name: the user's name.
        uid: the user's id.
        gid: the id of the user's group; the trainer has no other group.
        home: the user's home folder; empty if it does not exist or belongs to another user.
    """

    name: str
    uid: int
    gid: int
    home: str

    @classmethod
    def find(cls, given: str) -> "TrainerUser":
        """Returns the user with this name or id. Checks that this process may start a trainer as that user.

        Raises:
            BadRequest: there is no such user, this process lacks the permission, or that user cannot run Python.
        """
        try:
            found = pwd.getpwuid(int(given)) if given.isdecimal() else pwd.getpwnam(given)
        except (KeyError, OverflowError):
            raise errors.BadRequest(f"--trainer-user is {given!r:.80}, and this host has no such user") from None
        user = cls(found.pw_name, found.pw_uid, found.pw_gid, _own_folder(found))
        if missing := [name for name, bit in _NEEDED.items() if not _capabilities() >> bit & 1]:
            raise errors.BadRequest(
                f"--trainer-user is {given}, but this worker may not start processes of another user: it lacks "
                f"{', '.join(missing)}; run it as root or with these capabilities, or leave the option out"
            )
        user._check_python()
        return user

    def _check_python(self) -> None:
        try:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", ""],
                user=self.uid,
                group=self.gid,
                extra_groups=[],
                env={},
                capture_output=True,
                timeout=_PROBE_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise errors.BadRequest(
                f"--trainer-user is {self.name}, but this user cannot run {sys.executable} ({error}); let it read and "
                "enter the folders of Python and of Shoal"
            ) from None


def _own_folder(user: pwd.struct_passwd) -> str:
    try:
        return user.pw_dir if Path(user.pw_dir).stat().st_uid == user.pw_uid else ""
    except OSError:
        return ""


def _capabilities() -> int:
    """Returns the effective capabilities of this process, one for each bit."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return -1 if os.geteuid() == 0 else 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


__all__ = ["TrainerUser"]
