"""The options of the roles' commands that are the same on each node."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from shoal._engines import check_flags
from shoal._system import check_type


class RoleFlags:
    """The options of the commands. The arguments are those of `RayCluster`.

    Raises:
        BadRequest: an argument is not valid.
    """

    def __init__(
        self,
        *,
        path: Any,
        allow_programs: Any,
        trainer_env: Any,
        checkpoints: str,
        store: str,
        flags: Mapping[str, Sequence[str]] | None,
        log_level: str,
    ) -> None:
        self._path = _texts("path", [path] if isinstance(path, os.PathLike) else path)
        self._allow_programs = _texts("allow_programs", allow_programs)
        self._trainer_env = _texts("trainer_env", trainer_env)
        self._checkpoints, self._store, self._log_level = checkpoints, store, log_level
        self._further = check_flags(flags)

    def of(self, role: str) -> list[str]:
        """Returns the options of a role."""
        made = ["--log-level", self._log_level]
        if role == "coordinator" and self._store:
            made += ["--store", self._store if self._store == "memory" else _absolute(self._store)]
        if role != "worker" and self._checkpoints:
            made += ["--checkpoints", self._checkpoints if "://" in self._checkpoints else _absolute(self._checkpoints)]
        if role == "worker":
            made += [flag for folder in self._path for flag in ("--path", _on_nodes(folder))]
            made += [flag for pattern in self._allow_programs for flag in ("--allow-program", pattern)]
            made += [flag for variable in self._trainer_env for flag in ("--trainer-env", variable)]
        return [*made, *self._further.get(role, ())]


def _on_nodes(folder: str) -> str:
    """Returns a folder as the workers find it: in Ray's `working_dir` if there is one, else where it is here."""
    return folder if "working_dir" in ray.get_runtime_context().runtime_env else _absolute(folder)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _texts(name: str, given: Any) -> list[str]:
    """Returns one text or several of them as a list."""
    texts = [given] if isinstance(given, str) else given
    check_type(name, texts, Sequence, "a text, or a list of them")
    for text in texts:
        check_type(name, text, (str, os.PathLike), "a text, or a list of them")
    return [str(text) for text in texts]


__all__ = ["RoleFlags"]
