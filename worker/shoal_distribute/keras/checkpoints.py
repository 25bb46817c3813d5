"""Checkpoints of custom training loops: numbered files of models, optimizers and numbers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import errors
from shoal_distribute.keras.files import read_arrays, write_arrays
from shoal_distribute.keras.layers.base import Layer
from shoal_distribute.keras.models import saving
from shoal_distribute.keras.optimizers import Optimizer
from shoal_distribute.values import DistributedVariable

_SUFFIX = ".npz"
_OWN = ("objects", "save_counter")  # attributes of a Checkpoint


class Checkpoint:
    """Objects that are written and restored together.

        checkpoint = Checkpoint(model=model, optimizer=optimizer, epoch=0)
        checkpoint.epoch += 1
        path = checkpoint.save("checkpoints/ckpt")      # checkpoints/ckpt-1
        checkpoint.restore(path)

    The objects are attributes, too. In several processes, all of them call `save`, and the first one writes. All need
    to read the file.

    Args:
        **objects: models, layers, optimizers of `keras.optimizers`, variables, and whole numbers.

    Raises:
        BadRequest: an object is of another kind.

    Attributes:
        save_counter: number of the last checkpoint.
        objects: the objects by name. Numbers are replaced by `restore`.
    """

    def __init__(self, **objects: Any) -> None:
        for name, it in objects.items():
            if not isinstance(it, Layer | Optimizer | DistributedVariable | int):
                raise errors.BadRequest(
                    f"Checkpoint({name}=...) got a {type(it).__name__}; give models, layers, optimizers of "
                    "keras.optimizers, variables or whole numbers"
                )
            if hasattr(type(self), name) or name in _OWN:
                raise errors.BadRequest(f"Checkpoint({name}=...) would hide Checkpoint.{name}; use another name")
        self.objects, self.save_counter = dict(objects), 0

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("objects", {})
        if name not in objects:
            raise AttributeError(f"the checkpoint has no object {name!r}", name=name, obj=self)
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        objects = self.__dict__.get("objects", {})
        if name not in objects:
            super().__setattr__(name, value)
        elif isinstance(objects[name], int) and isinstance(value, int | np.integer):
            objects[name] = int(value)
        else:
            raise errors.BadRequest(
                f"{name} of a checkpoint can be set only if it is a whole number, and to one; make another Checkpoint"
            )

    @property
    def writes(self) -> bool:
        """Whether this process writes the files: of several processes, the first one does."""
        strategies = [it.strategy for it in self.objects.values() if not isinstance(it, int)]
        return all(it.writes_files for it in strategies)

    def save(self, file_prefix: str | Path) -> str:
        """Writes the next numbered checkpoint.

        Args:
            file_prefix: path and beginning of the name.

        Returns:
            The path, such as "ckpt-1", as `restore` takes it.

        Raises:
            StorageFailed: the file cannot be written.
        """
        self.save_counter += 1
        return self.write(f"{file_prefix}-{self.save_counter}")

    def write(self, file_prefix: str | Path) -> str:
        """Writes a checkpoint without a number of its own, and returns its path.

        Args:
            file_prefix: the path.

        Raises:
            StorageFailed: the file cannot be written.
        """
        arrays = {"save_counter": np.array(self.save_counter)}
        for name, it in self.objects.items():
            arrays |= {f"{name}/{key}": array for key, array in self._arrays_of(it).items()}
        if self.writes:
            write_arrays(f"{file_prefix}{_SUFFIX}", arrays, {})
        return str(file_prefix)

    def restore(self, save_path: str | Path | None) -> "RestoreStatus":
        """Sets the objects to what a checkpoint has. Models must be built.

        Args:
            save_path: what `save` returned; None, as `latest_checkpoint` returns it without a file, changes nothing.

        Returns:
            What the file has and this checkpoint has not.

        Raises:
            UnknownCheckpoint: there is no such file.
            CorruptCheckpoint: the file is of another kind, or damaged.
            IncompatibleCheckpoint: the variables are not those of the objects, or an optimizer is of another kind.
        """
        if save_path is None:
            return RestoreStatus(None)
        arrays, _ = read_arrays(f"{save_path}{_SUFFIX}")
        for name, it in self.objects.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
            if not own:
                raise errors.IncompatibleCheckpoint(
                    f"{save_path} has no {name!r}; restore it into the objects it is of"
                )
            self._set(name, it, own, str(save_path))
        self.save_counter = int(arrays["save_counter"])
        named = {key.partition("/")[0] for key in arrays if "/" in key}
        return RestoreStatus(str(save_path), sorted(named - self.objects.keys()))

    def _arrays_of(self, it: Any) -> dict[str, np.ndarray]:
        if isinstance(it, Layer):
            return saving.values_of(it)
        if isinstance(it, Optimizer):
            return {saving.placed(name, self._places()): array for name, array in it.state().items()}
        return {"value": it.numpy() if isinstance(it, DistributedVariable) else np.array(it)}

    def _set(self, name: str, it: Any, arrays: dict[str, np.ndarray], where: str) -> None:
        if isinstance(it, Layer):
            saving.set_values(it, arrays, where)
        elif isinstance(it, Optimizer):
            names = {place: own for own, place in self._places().items()}
            it.restore({saving.placed(key, names): array for key, array in arrays.items()})
        elif isinstance(it, DistributedVariable):
            it.assign(arrays["value"])
        else:
            self.objects[name] = int(arrays["value"])

    def _places(self) -> dict[str, str]:
        """Returns the place of each variable of the models, by its name: names differ from run to run."""
        models = {name: it for name, it in self.objects.items() if isinstance(it, Layer)}
        return {
            variable.name: place
            for name, it in models.items()
            for place, variable in saving.variables_by_place(it, f"{name}/").items()
        }


class RestoreStatus:
    """What `Checkpoint.restore` has done. All objects of the checkpoint are restored, or `restore` raises.

    Args:
        path: path of the file; None if there was none.
        unused: names of the objects that only the file has.
    """

    def __init__(self, path: str | None, unused: Sequence[str] = ()) -> None:
        self._path, self._unused = path, list(unused)

    def expect_partial(self) -> "RestoreStatus":
        """Says that the file may have more objects. They are ignored in any case, without a warning."""
        return self

    def assert_existing_objects_matched(self) -> "RestoreStatus":
        """Checks that all objects of the checkpoint were restored.

        Raises:
            UnknownCheckpoint: there was no file.
        """
        if self._path is None:
            raise errors.UnknownCheckpoint("nothing was restored, because restore got None; give the path of a file")
        return self

    def assert_consumed(self) -> "RestoreStatus":
        """Checks that the checkpoint has all objects of the file.

        Raises:
            IncompatibleCheckpoint: the file has more objects.
            UnknownCheckpoint: there was no file.
        """
        self.assert_existing_objects_matched()
        if self._unused:
            raise errors.IncompatibleCheckpoint(
                f"{self._path} also has {', '.join(self._unused)}; give Checkpoint these objects, or leave out "
                "assert_consumed"
            )
        return self


class CheckpointManager:
    """Checkpoints of one folder. The last ones are kept.

    Args:
        checkpoint: what is written.
        directory: the folder.
        max_to_keep: number of checkpoints to keep; None means all.
        checkpoint_name: beginning of the files' names.
    """

    def __init__(
        self, checkpoint: Checkpoint, directory: str | Path, max_to_keep: int | None, checkpoint_name: str = "ckpt"
    ) -> None:
        self.checkpoint, self.directory = checkpoint, Path(directory)
        self._keep, self._name = max_to_keep, checkpoint_name

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints, the oldest first."""
        return _checkpoints(self.directory, self._name)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint; None if there is none."""
        found = self.checkpoints
        return found[-1] if found else None

    def save(self) -> str:
        """Writes the next checkpoint, removes those that are too old, and returns its path.

        Raises:
            StorageFailed: the file cannot be written.
        """
        path = self.checkpoint.save(self.directory / self._name)
        if self._keep is not None and self.checkpoint.writes:
            for old in self.checkpoints[: -self._keep]:
                Path(f"{old}{_SUFFIX}").unlink(missing_ok=True)
        return path

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint if there is one, and returns its path."""
        path = self.latest_checkpoint
        self.checkpoint.restore(path)
        return path


def latest_checkpoint(checkpoint_dir: str | Path) -> str | None:
    """Returns the path of a folder's newest checkpoint, by its number; None if it has none.

    Args:
        checkpoint_dir: the folder.
    """
    found = _checkpoints(Path(checkpoint_dir), "")
    return found[-1] if found else None


def _checkpoints(folder: Path, name: str) -> list[str]:
    numbered = []
    for path in folder.glob(f"*{_SUFFIX}") if folder.is_dir() else []:
        match = re.fullmatch(r"(.+)-(\d+)", path.name.removesuffix(_SUFFIX))
        if match and name in {"", match[1]}:
            numbered.append((int(match[2]), str(path).removesuffix(_SUFFIX)))
    return [path for _, path in sorted(numbered)]


__all__ = ["Checkpoint", "CheckpointManager", "RestoreStatus", "latest_checkpoint"]
