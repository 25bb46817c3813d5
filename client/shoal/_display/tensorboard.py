"""TensorBoard event files of a job's events."""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from shoal import errors
from shoal._system import check_type, load
from shoal.events import CheckpointEnded, EvaluationEnded, Event, MetricsReported, StateChanged

_WRITER = "shoal.callbacks.TensorBoard"
# Seconds, by the time of events, between two flushes.
_FLUSH_S = 10.0
# Records of a run and group of tags that are recognized when they come again. The coordinator keeps the last 20,000 log
# lines and metrics of a job, and as many other events, so older records of a group cannot come again.
MAX_KNOWN = 50_000
# The suffix of our files. Files of other writers in the same folder are not read.
_SUFFIX = ".shoal"
# A record has its length and that length's checksum before it, and its own checksum after it.
_LENGTH, _HEAD, _TAIL = struct.Struct("<Q"), 12, 4


class TensorBoard:
    """Writes the metrics of a job to a folder that `tensorboard --logdir FOLDER` shows.

    | run | tag | by |
    | --- | --- | --- |
    | FOLDER/WORKER | train/NAME: the loss and the program's metrics | the worker's step |
    | FOLDER | evaluation/NAME | step of the worker that evaluated |
    | FOLDER | progress/samples_per_s, progress/epoch | pushes of all workers |
    | FOLDER | checkpoint/bytes, checkpoint/seconds | the checkpoint's step |

    Times are those of the events. Records that the folder already has are not written again, so you can watch a job
    several times with the same folder. A folder can hold several jobs that run one after the other. Jobs that run at
    the same time need separate folders.

        handle.wait(callbacks=[shoal.callbacks.TensorBoard("runs/digits")])

    Args:
        folder: the folder. It is created if it does not exist.

    Raises:
        BadRequest: `folder` is not a path.
        ImportError: tensorboardX is not installed: pip install 'shoal[tensorboard]'.
        StorageFailed: the folder cannot be read or written, in the constructor or at an event.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check_type("folder", folder, (str, os.PathLike), "a folder, such as 'runs/digits'")
        self._files = load("tensorboardX.event_file_writer", _WRITER, extra="tensorboard")
        self._messages = load("tensorboardX.proto.event_pb2", _WRITER, extra="tensorboard")
        self._folder = Path(folder).absolute()
        self._runs: dict[Path, _EventFiles] = {}
        self._flushed_at = 0.0
        with _storage(self._folder):
            self._run(self._folder)

    def __call__(self, event: Event) -> None:
        """Writes an event. The end of the job closes the files."""
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
        """Flushes the files to disk."""
        for run in self._runs.values():
            run.flush()

    def close(self) -> None:
        """Closes the files. A later event starts new files."""
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

    def _run(self, folder: Path) -> "_EventFiles":
        if folder not in self._runs:
            self._runs[folder] = _EventFiles(folder, self._files, self._messages)
        return self._runs[folder]


class _EventFiles:
    """The event files of a folder. A new file is started for the first new record."""

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
        """Writes scalars by tag, unless the files already have them."""
        event = self._messages.Event(wall_time=time, step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        record = event.SerializeToString()
        if record in self._there.get(_group(event), ()):
            return
        if self._writer is None:
            # The writer adds the time in seconds, which does not distinguish two files of the same second.
            suffix = f".{os.getpid()}.{len(self._ours()):04}{_SUFFIX}"
            # `SummaryWriter` of the package is not used: it passes records through a pickle and a thread.
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
        if len(there) > MAX_KNOWN:
            del there[next(iter(there))]

    def _ours(self) -> list[Path]:
        return sorted(self._folder.glob(f"events.out.tfevents.*{_SUFFIX}"))


def _group(event: Any) -> str:
    """Returns the prefix of a record's tags, or an empty string if it has no tags, as a file's first record."""
    tags = [value.tag for value in event.summary.value]
    return str(tags[0].partition("/")[0]) if tags else ""


def _records(path: Path) -> Iterator[bytes]:
    """Yields the complete records of an event file. The last one is incomplete if its writer died."""
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
    """Converts OSError to StorageFailed."""
    try:
        yield
    except OSError as error:
        raise errors.StorageFailed(
            f"TensorBoard's files in {folder} cannot be written: {error.strerror or error}; name a folder that you may "
            "write to",
            folder=str(folder),
        ) from None


def _name(worker: str) -> str:
    """Returns a member id as a folder name."""
    name = quote(worker, safe="")
    return name if not name.startswith(".") else f"%2E{name[1:]}"


__all__ = ["TensorBoard"]
