"""The options of the roles' commands that are the same on each node."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from shoal._engines import check_flags
from shoal._role.worker_options import program_options, repeated, texts

_PATHS = (str, os.PathLike)


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
        give = "a folder, such as 'examples', or a list of them"
        self._path, self._programs = texts("path", path, give, _PATHS), program_options(allow_programs, trainer_env)
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
            made += [*repeated("--path", map(_on_nodes, self._path)), *self._programs]
        return [*made, *self._further.get(role, ())]


def _on_nodes(folder: str) -> str:
    """Returns a folder as the workers find it: in Ray's `working_dir` if there is one, else where it is here."""
    return folder if "working_dir" in ray.get_runtime_context().runtime_env else _absolute(folder)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


__all__ = ["RoleFlags"]
