"""Outbox of reports to the coordinator: its size is bounded, and it sends nothing twice and drops nothing silently."""

from shoal._training.outbox import Outbox
from shoal._training.participant import Report
from shoal._wire.limits import LOG_BYTES, LOG_LINE_BYTES
from shoal.status import StepTiming


def test_empty_outbox_has_no_report() -> None:
    assert Outbox().take() is None


def test_metrics_add_up_and_go_with_the_lines() -> None:
    outbox = Outbox()
    outbox.add_metrics(Report(step=1, accepted=1, samples=4))
    outbox.add_line("hello")
    outbox.add_metrics(Report(step=2, accepted=1, samples=4))
    assert outbox.take() == Report(step=2, accepted=2, samples=8, log=("hello",))
    assert outbox.take() is None


def test_lines_wait_until_they_are_taken() -> None:
    outbox = Outbox(kept_lines=2)
    for line in ("one", "two", "three"):
        outbox.add_line(line)
    assert (outbox.lines_waiting, outbox.lines_lost) == (2, 1)
    outbox.take()
    assert outbox.lines_waiting == 0


def test_lines_that_were_not_sent_go_first_the_next_time() -> None:
    outbox = Outbox()
    outbox.add_line("one")
    outbox.add_metrics(Report(step=1, accepted=1))
    taken = outbox.take()
    assert taken
    outbox.add_line("two")
    outbox.add_metrics(Report(step=2, accepted=1))
    outbox.put_back(taken)
    assert outbox.take() == Report(step=2, accepted=2, log=("one", "two"))


def test_unsent_timings_go_with_the_next_report_as_far_as_they_fit() -> None:
    outbox = Outbox()
    outbox.add_metrics(Report(timings=tuple(StepTiming(step, 0.0) for step in range(60))))
    taken = outbox.take()
    assert taken
    outbox.add_metrics(Report(timings=tuple(StepTiming(step, 0.0) for step in range(60, 70))))
    outbox.put_back(taken)
    again = outbox.take()
    assert again
    assert [timing.step for timing in again.timings] == [*range(6, 70)]


def test_a_report_carries_a_thousand_lines_and_a_mebibyte() -> None:
    outbox = Outbox()
    for number in range(1_500):
        outbox.add_line(str(number))
    first, second = outbox.take(), outbox.take()
    assert first
    assert second
    assert (len(first.log), len(second.log)) == (1_000, 500)
    for _ in range(500):
        outbox.add_line("é" * 4_096)
    large = outbox.take()
    assert large
    assert sum(len(line.encode()) for line in large.log) == LOG_BYTES


def test_long_line_is_split_between_characters() -> None:
    outbox = Outbox()
    line = "a" + "é" * 8_000 + "漢" * 3_000
    outbox.add_line(line)
    taken = outbox.take()
    assert taken
    assert len(taken.log) == 4
    assert "".join(taken.log) == line
    assert max(len(piece.encode()) for piece in taken.log) <= LOG_LINE_BYTES


def test_surrogates_in_a_line_are_replaced() -> None:
    outbox = Outbox()
    outbox.add_line("half \ud800 a character")
    outbox.add_line("")
    taken = outbox.take()
    assert taken
    assert taken.log == ("half ? a character", "")


def test_oldest_lines_are_dropped_and_counted() -> None:
    outbox = Outbox(kept_lines=3)
    for number in range(5):
        outbox.add_line(str(number))
    taken = outbox.take()
    assert taken
    assert taken.log == ("[2 earlier lines were dropped]", "2", "3", "4")
    assert outbox.lines_lost == 2
