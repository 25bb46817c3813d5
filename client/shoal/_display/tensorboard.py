"""A job's events as TensorBoard's event files."""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from shoal import errors
from shoal._system import load
from shoal.events import CheckpointEnded, EvaluationEnded, Event, MetricsReported, StateChanged

_WHO = "shoal.callbacks.TensorBoard"
# Seconds, by the time of events, until what was written has to be on the disk.
_FLUSH_S = 10.0
# Records of a run and group of tags that are known again. The coordinator keeps a job's last 20,000 log lines and
# figures, and as many other events, however old: so older ones of a group do not come again.
_MOST_KNOWN = 50_000
# What the names of our files end with: those of others in the same folder are not read.
_SUFFIX = ".shoal"
# Of a record: its length and the checksum of that before it, its own checksum behind it.
_LENGTH, _HEAD, _TAIL = struct.Struct("<Q"), 12, 4


class TensorBoard:
    """Writes a job's figures to a folder that `tensorboard --logdir FOLDER` shows.

    | run | tag | by |
    | --- | --- | --- |
    | FOLDER/WORKER | train/NAME: the loss, and what the program adds | the worker's step |
    | FOLDER | evaluation/NAME | step of the worker that evaluated |
    | FOLDER | progress/samples_per_s, progress/epoch | pushes of all workers |
    | FOLDER | checkpoint/bytes, checkpoint/seconds | the checkpoint's step |

    Times are those of the events. What is in the folder already is not written again, so a job can be watched anew into
    the same one: what comes of an event is the same each time. A folder may have several jobs, one after the other; of
    two at a time each needs its own.

        handle.wait(callbacks=[shoal.callbacks.TensorBoard("runs/digits")])

    Args:
        folder: where to; made where it is not there.

    Raises:
        ImportError: tensorboardX is not installed: pip install 'shoal[tensorboard]'.
        StorageFailed: the folder cannot be read or written; also when an event is.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = load("tensorboardX.event_file_writer", _WHO, extra="tensorboard")
        self._messages = load("tensorboardX.proto.event_pb2", _WHO, extra="tensorboard")
        self._folder = Path(folder).absolute()
        self._runs: dict[Path, _Run] = {}
        self._flushed_at = 0.0
        with _storage(self._folder):
            self._run(self._folder)

    def __call__(self, event: Event) -> None:
        """Writes an event; that of the job's end closes the files."""
        with _storage(self._folder):
            match event:
                case MetricsReported():
                    self._add(self._folder / _name(event.worker), event, event.step, "train", event.values)
                    now = event.progress
                    pace = {"samples_per_s": now.samples_per_s, "epoch": now.epoch}
                    self._add(self._folder, event, now.steps, "progress", pace)
                case EvaluationEnded():
                    self._add(self._folder, event, event.result.step, "evaluation", event.result.values)
                case CheckpointEnded(saved=saved) if saved:
                    sizes = {"bytes": saved.nbytes, "seconds": event.seconds}
                    self._add(self._folder, event, saved.step, "checkpoint", sizes)
            if isinstance(event, StateChanged) and event.state.finished:
                self.close()
            elif not isinstance(event, MetricsReported) or event.time - self._flushed_at >= _FLUSH_S:
                self.flush()
                self._flushed_at = event.time

    def flush(self) -> None:
        """Brings what was written to the disk."""
        for run in self._runs.values():
            run.flush()

    def close(self) -> None:
        """Closes the files. An event that comes later begins new ones."""
        for run in self._runs.values():
            run.close()

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, folder: Path, event: Event, step: int, group: str, values: Mapping[str, float]) -> None:
        if values:
            self._run(folder).add(event.time, step, {f"{group}/{name}": values[name] for name in sorted(values)})

    def _run(self, folder: Path) -> "_Run":
        if folder not in self._runs:
            self._runs[folder] = _Run(folder, self._files, self._messages)
        return self._runs[folder]


class _Run:
    """The event files of a folder: those that are there, and one more as soon as there is something new."""

    def __init__(self, folder: Path, files: Any, messages: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._files, self._messages = folder, files, messages
        self._there: dict[str, dict[bytes, None]] = {}  # by group, oldest first
        for file in self._ours():
            for record in _records(file):
                self._know(record, messages.Event.FromString(record))
        self._writer: Any = None
        self._dirty = False

    def add(self, time: float, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars by their tags, unless they are there."""
        event = self._messages.Event(wall_time=time, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        record = event.SerializeToString()
        if record in self._there.get(_group(event), ()):
            return
        if self._writer is None:
            # Its name has the time in seconds: one that begins and one that ended in the same are two files.
            suffix = f".{os.getpid()}.{len(self._ours()):04}{_SUFFIX}"
            # Not the package's `SummaryWriter`, whose records go through a pickle and a thread to the file.
            self._writer = self._files.EventsWriter(str(self._folder / "events"), suffix)
        self._writer.write_event(event)
        self._know(record, event)
        self._dirty = True

    def flush(self) -> None:
        if self._dirty:
            self._writer.flush()
            self._dirty = False

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._dirty = None, False

    def _know(self, record: bytes, event: Any) -> None:
        there = self._there.setdefault(_group(event), {})
        there[record] = None
        if len(there) > _MOST_KNOWN:
            del there[next(iter(there))]

    def _ours(self) -> list[Path]:
        return sorted(self._folder.glob(f"events.out.tfevents.*{_SUFFIX}"))


def _group(event: Any) -> str:
    """What the tags of a record begin with; empty: it has none, as a file's first."""
    tags = [value.tag for value in event.summary.value]
    return str(tags[0].partition("/")[0]) if tags else ""


def _records(path: Path) -> Iterator[bytes]:
    """What is whole in an event file; who wrote it may have died over the last record."""
    left = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(_HEAD)) == _HEAD:
            size = _LENGTH.unpack_from(head)[0]
            left -= _HEAD + size + _TAIL
            if left < 0:
                return
            yield file.read(size)
            file.seek(_TAIL, os.SEEK_CUR)


@contextmanager
def _storage(folder: Path) -> Iterator[None]:
    """Errors of files as Shoal's."""
    try:
        yield
    except OSError as error:
        raise errors.StorageFailed(
            f"TensorBoard's files in {folder} cannot be written: {error.strerror or error}; name a folder that you may "
            "write to",
            folder=str(folder),
        ) from None


def _name(worker: str) -> str:
    """A member id as the name of a folder below ours."""
    name = quote(worker, safe="")
    return name if not name.startswith(".") else f"%2E{name[1:]}"


__all__ = ["TensorBoard"]
