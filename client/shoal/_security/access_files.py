"""Access files: the files in which the processes of one user on one machine find their tokens.

A coordinator writes a file with a token for each access role into a folder that only its user can read. The user's
clients, servers and workers find the file by the coordinator's address. On other machines, SHOAL_TOKEN_FILE names a
file with one token.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shoal import errors
from shoal._security.principal import AccessRole
from shoal._system import atomic_write, private_files

TOKEN_FILE_VARIABLE = "SHOAL_TOKEN_FILE"  # noqa: S105 - the name of a variable
_NEVER = object()
_LOOPBACK_NAMES = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1", "::1": "127.0.0.1"}
_MAX_BYTES = 64 << 10


class AccessFile:
    """The access file of one coordinator.

    Args:
        address: host:port of the coordinator.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        name = f"{_LOOPBACK_NAMES.get(host, host)}_{port}".replace("/", "_")
        self.path = private_files.state_folder() / "access" / f"{name}.json"

    def write(self, tokens: Mapping[AccessRole, str]) -> None:
        """Writes the tokens. Only this user can read the file.

        Raises:
            StoreFailed: the file cannot be written.
        """
        text = json.dumps({role.value: token for role, token in tokens.items()})
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.parent.chmod(0o700)
            with atomic_write(self.path) as unfinished, open(private_files.create(unfinished), "w") as file:
                file.write(text)
        except OSError as error:
            raise errors.StoreFailed(
                f"cannot write the tokens of this machine's processes to {self.path}: {error}. Set XDG_STATE_HOME to a "
                "folder that this user may write to"
            ) from None

    def remove(self, tokens: Mapping[AccessRole, str]) -> None:
        """Removes the file, unless another coordinator has written its own tokens to it."""
        with suppress(OSError, errors.ShoalError):
            if self.read() == {role.value: token for role, token in tokens.items()}:
                self.path.unlink()

    def discard(self) -> None:
        """Removes the file that an earlier coordinator at this address has left.

        A coordinator that asks for no tokens calls it. Otherwise, clients would send it the tokens in the file, which
        are still valid for the earlier coordinator, and perhaps without TLS.
        """
        with suppress(OSError):
            self.path.unlink()

    def read(self) -> dict[str, str]:
        """Returns the tokens by access role. There are none if the file does not exist.

        Raises:
            Unauthenticated: another user could have read or written the file, or it has no tokens.
        """
        try:
            text = _private_text(self.path)
        except FileNotFoundError:
            return {}
        try:
            tokens = json.loads(text)
            return {str(role): str(token) for role, token in tokens.items()}
        except (ValueError, AttributeError, RecursionError):
            raise errors.Unauthenticated(
                f"{self.path} is damaged, and its tokens cannot be read; restart the coordinator, which writes the file"
            ) from None


class TokenSource:
    """The token of a process. Call the object to get the token. Thread-safe.

    The token is in the file that SHOAL_TOKEN_FILE names, or else in this user's access file. It is read again when the
    file changes.

    Args:
        address: host:port of the coordinator.
        role: the access role of the process.
    """

    def __init__(self, address: str, role: AccessRole) -> None:
        self._named, self._access_file, self._role = os.environ.get(TOKEN_FILE_VARIABLE, ""), AccessFile(address), role
        self._path = Path(self._named) if self._named else self._access_file.path
        self._seen: tuple[object, str] = _NEVER, ""

    def __call__(self) -> str:
        """Returns the token; empty if there is none.

        Raises:
            Unauthenticated: the file that SHOAL_TOKEN_FILE names does not exist, or the file cannot be used.
        """
        try:
            status = os.stat(self._path)
            version: object = (status.st_mtime_ns, status.st_ino, status.st_size)
        except OSError:
            version = None
        seen, token = self._seen
        if seen is _NEVER or seen != version:
            token = _token_in(self._path) if self._named else self._access_file.read().get(self._role.value, "")
            self._seen = version, token
        return token


def _token_in(path: Path) -> str:
    """Returns the token in a file.

    Raises:
        Unauthenticated: there is no such file, another user could have read or written it, or it is empty.
    """
    try:
        token = _private_text(path).strip()
    except FileNotFoundError:
        raise errors.Unauthenticated(
            f"there is no token file {path}; create one with `shoal token create`, or correct {TOKEN_FILE_VARIABLE}"
        ) from None
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise errors.Unauthenticated(f"the token file {path} must have one token, and nothing else")
    return token


def _private_text(path: Path) -> str:
    """Returns the text of a file that only this user can read and write.

    Raises:
        FileNotFoundError: there is no such file.
        Unauthenticated: it is not private, or cannot be read.
    """
    try:
        content = private_files.read_secret("the token file", path, errors.Unauthenticated, _MAX_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise errors.Unauthenticated(f"the token file {path} cannot be read: {error.strerror}") from None
    return content.decode(errors="replace")


__all__ = ["TOKEN_FILE_VARIABLE", "AccessFile", "TokenSource"]
