"""Callbacks: TensorBoard's files, record by record, and the progress bar."""

import io
import re
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event as Record
from tensorboardX.record_writer import masked_crc32c

import shoal
from shoal import callbacks, errors
from shoal._display import tensorboard
from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, MetricsReported, StateChanged
from shoal.status import Evaluation, JobState, Progress, SavedCheckpoint

RUNNING = StateChanged(1, 10.0, JobState.RUNNING, "")
TRAINED = MetricsReported(
    2, 11.0, "worker-0", 5, {"loss": 0.5, "accuracy": 0.75}, Progress(steps=9, samples_per_s=80.0)
)
BESIDE = MetricsReported(
    3, 11.0, "worker-1", 4, {"loss": float("nan")}, Progress(steps=10, epoch=1, samples_per_s=90.0)
)
EVALUATED = EvaluationEnded(4, 12.0, "worker-1", Evaluation(1, 6, {"loss": 0.25}), True)
SAVED = CheckpointEnded(5, 13.0, 1, SavedCheckpoint(1, 7, 4096, 12.5), 0.5, "")
FAILED_CHECKPOINT = CheckpointEnded(6, 14.0, 2, None, 0.5, "the disk is full")
ENDED = StateChanged(7, 15.0, JobState.SUCCEEDED, "")
LIFE = (RUNNING, TRAINED, BESIDE, EVALUATED, SAVED, FAILED_CHECKPOINT, ENDED)


def checked_records(folder: Path) -> list[Record]:
    """Returns the metric records of a run's files; asserts that each has TFRecord's format and checksums."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        text = file.read_bytes()
        while text:
            head, (size, sum_of_head) = text[:8], struct.unpack_from("<QI", text)
            data, (sum_of_data,) = text[12 : 12 + size], struct.unpack_from("<I", text, 12 + size)
            assert (masked_crc32c(head), masked_crc32c(data)) == (sum_of_head, sum_of_data)
            found.append(Record.FromString(data))
            text = text[16 + size :]
    assert all(record.file_version or record.summary.value for record in found)
    return [record for record in found if record.summary.value]


def scalars(folder: Path) -> list[tuple[str, int, float, float]]:
    """Tag, step, time and value."""
    return [
        (value.tag, record.step, record.wall_time, value.simple_value)
        for record in checked_records(folder)
        for value in record.summary.value
    ]


def watch(folder: Path, events: Sequence[Event]) -> None:
    """As one `wait` does."""
    with callbacks.TensorBoard(folder) as board:
        for event in events:
            board(event)


class TestTensorBoard:
    def test_has_the_metrics_of_each_worker_and_of_the_job(self, tmp_path: Path) -> None:
        watch(tmp_path, LIFE)
        assert scalars(tmp_path) == [
            ("progress/epoch", 9, 11.0, 0.0),
            ("progress/samples_per_s", 9, 11.0, 80.0),
            ("progress/epoch", 10, 11.0, 1.0),
            ("progress/samples_per_s", 10, 11.0, 90.0),
            ("evaluation/loss", 6, 12.0, 0.25),
            ("checkpoint/bytes", 7, 13.0, 4096.0),
            ("checkpoint/seconds", 7, 13.0, 0.5),
        ]
        assert scalars(tmp_path / "worker-0") == [("train/accuracy", 5, 11.0, 0.75), ("train/loss", 5, 11.0, 0.5)]
        ((tag, step, time, value),) = scalars(tmp_path / "worker-1")
        assert (tag, step, time, value != value) == ("train/loss", 4, 11.0, True)

    @pytest.mark.parametrize("seen", range(len(LIFE) + 1))
    def test_restarted_callback_writes_each_event_once(self, tmp_path: Path, seen: int) -> None:
        watch(tmp_path / "again", LIFE[:seen])
        watch(tmp_path / "again", LIFE)
        watch(tmp_path / "again", LIFE)
        watch(tmp_path / "once", LIFE)
        for run in (".", "worker-0", "worker-1"):
            assert repr(scalars(tmp_path / "again" / run)) == repr(scalars(tmp_path / "once" / run))

    def test_continues_after_a_truncated_record(self, tmp_path: Path) -> None:
        watch(tmp_path, LIFE[:2])
        (file,) = (tmp_path / "worker-0").iterdir()
        whole = file.read_bytes()
        begun = len(whole) - len(checked_records(tmp_path / "worker-0")[0].SerializeToString()) - 16
        for size in range(begun, len(whole)):
            for each in (tmp_path / "worker-0").iterdir():
                each.unlink()
            file.write_bytes(whole[:size])
            watch(tmp_path, LIFE[:2])
            assert len([*(tmp_path / "worker-0").iterdir()]) == 2, (
                "what was torn is written again, to a file of its own"
            )
            file.unlink()
            assert [tag for tag, *_ in scalars(tmp_path / "worker-0")] == ["train/accuracy", "train/loss"]

    def test_new_job_of_the_same_name_continues_in_the_same_folder(self, tmp_path: Path) -> None:
        watch(tmp_path, LIFE)
        later = MetricsReported(2, 99.0, "worker-0", 5, {"loss": 0.5}, Progress())
        watch(tmp_path, [later, ENDED])
        assert scalars(tmp_path / "worker-0")[-1] == ("train/loss", 5, 99.0, 0.5)

    def test_is_on_the_disk_while_the_job_runs(self, tmp_path: Path) -> None:
        board = callbacks.TensorBoard(tmp_path)
        board(RUNNING)
        board(TRAINED)
        assert scalars(tmp_path / "worker-0") == []  # it comes soon enough
        board(EVALUATED)
        assert len(scalars(tmp_path / "worker-0")) == 2
        board(MetricsReported(5, EVALUATED.time + 9.5, "worker-0", 6, {"loss": 0.25}, Progress()))
        assert len(scalars(tmp_path / "worker-0")) == 2
        board(MetricsReported(6, EVALUATED.time + 10.5, "worker-0", 7, {"loss": 0.125}, Progress()))
        assert len(scalars(tmp_path / "worker-0")) == 4
        board.close()

    def test_remembers_only_events_that_can_repeat(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensorboard, "MAX_KNOWN", 2)
        reports = [MetricsReported(n, float(n), "worker-0", n, {"loss": 1.0}, Progress(steps=n)) for n in range(1, 6)]
        watch(tmp_path, [*reports, ENDED])
        watch(tmp_path, [*reports[-2:], ENDED])
        assert [step for _, step, *_ in scalars(tmp_path / "worker-0")] == [1, 2, 3, 4, 5]

    def test_knows_an_old_evaluation_after_many_metrics(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensorboard, "MAX_KNOWN", 2)
        reports = [MetricsReported(n, float(n), "worker-0", n, {"loss": 1.0}, Progress(steps=n)) for n in range(5, 9)]
        watch(tmp_path, [EVALUATED, *reports, EVALUATED, ENDED])
        watch(tmp_path, [EVALUATED, *reports[-2:], ENDED])
        assert [tag for tag, *_ in scalars(tmp_path)].count("evaluation/loss") == 1

    @pytest.mark.parametrize("worker", ["../up", "a/b", ".", "..", ".hidden", "ünder"])
    def test_names_of_workers_stay_in_the_folder(self, tmp_path: Path, worker: str) -> None:
        watch(tmp_path / "board", [MetricsReported(1, 1.0, worker, 1, {"loss": 0.5}, Progress()), ENDED])
        assert [path.name for path in tmp_path.iterdir()] == ["board"]
        (run,) = (path for path in (tmp_path / "board").iterdir() if path.is_dir())
        assert len(scalars(run)) == 1

    def test_files_of_others_are_left_alone(self, tmp_path: Path) -> None:
        other = tmp_path / "events.out.tfevents.1.host"
        other.write_bytes(b"no records at all")
        watch(tmp_path, LIFE)
        assert other.read_bytes() == b"no records at all"

    def test_unwritable_folder_raises_an_error_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(errors.StorageFailed, match=r"file cannot be written: .*; name a folder"):
            callbacks.TensorBoard(tmp_path / "file")

    def test_missing_package_raises_an_error_with_advice(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
        with pytest.raises(ImportError, match=r"TensorBoard needs tensorboardX.*pip install 'shoal\[tensorboard\]'"):
            callbacks.TensorBoard(tmp_path / "board")
        assert not (tmp_path / "board").exists()


class TestProgressBar:
    @staticmethod
    def shown(job: shoal.Job | None, events: Sequence[Event], *, terminal: bool = True) -> str:
        """What stands on a screen of 80 columns in the end, and above it."""
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=terminal, width=80, color_system=None, highlight=False)
        with callbacks.ProgressBar(job, console=console) as bar:
            for event in events:
                bar(event)
        return screen.getvalue()

    def last_line(self, job: shoal.Job | None, events: Sequence[Event]) -> str:
        lines = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "\n", self.shown(job, events)).splitlines()
        return [line for line in lines if line.strip()][-1]

    def test_shows_share_rate_and_time_left(self) -> None:
        job = shoal.Job("m:f", name="digits")
        now = Progress(steps=10, samples=400, total_samples=1000, samples_per_s=1500.0, loss=0.5, staleness_max=3)
        line = self.last_line(job, [RUNNING, MetricsReported(2, 11.0, "worker-0", 5, {}, now)])
        assert line.startswith("digits running ")
        assert " 40% loss 0.5 · 1,500/s · stale 0/3 0 s" in line

    def test_shows_the_latest_and_the_best_evaluation_on_80_columns(self) -> None:
        job = shoal.Job("m:f", name="digits", evaluation=shoal.EvaluationPolicy(every_steps=5, metric="accuracy"))
        best = EvaluationEnded(2, 11.0, "worker-0", Evaluation(1, 5, {"accuracy": 0.875}), True)
        worse = EvaluationEnded(3, 12.0, "worker-0", Evaluation(2, 10, {"accuracy": 0.75}), False)
        now = Progress(steps=10, samples=10, total_samples=61_000, samples_per_s=10.0, loss=0.001234)
        line = self.last_line(job, [RUNNING, best, worse, MetricsReported(4, 13.0, "worker-0", 11, {}, now)])
        assert line.rstrip().endswith("loss 0.00123 · accuracy 0.75/0.875 · 10/s 102 min")

    def test_of_a_job_without_data_counts_steps(self) -> None:
        job = shoal.Job("m:f", name="digits", workers=2, max_steps=50)
        line = self.last_line(job, [MetricsReported(2, 11.0, "worker-0", 5, {}, Progress(steps=25))])
        assert " 25% " in line
        assert "-:--:--" in line  # no pace yet

    def test_needs_no_job_and_no_terminal(self) -> None:
        events = [
            *LIFE[:-1],
            LogLine(7, 15.0, "worker-0", "hello [b]"),
            StateChanged(8, 15.0, JobState.FAILED, "no\nTrace"),
        ]
        times = [
            time.strftime("%H:%M:%S", time.localtime(event.time))
            for event in events
            if not isinstance(event, MetricsReported)
        ]
        lines = self.shown(None, events, terminal=False).splitlines()
        assert [line[:8] for line in lines] == times
        assert [line[9:] for line in lines] == [
            "running",
            "evaluation 1: step 6, loss 0.25, the best so far",
            "checkpoint 1: step 7, 4,096 bytes in 0.5 s",
            "checkpoint failed, training continues: the disk is full",
            "worker-0: hello [b]",
            "failed",
        ]

    def test_ends_with_the_job(self) -> None:
        screen = io.StringIO()
        bar = callbacks.ProgressBar(console=Console(file=screen, force_terminal=True, width=80))
        bar(RUNNING)
        bar(ENDED)
        written = screen.getvalue()
        bar.close()
        assert screen.getvalue() == written
