"""Outcomes that a trainer reports at its end. The cluster tests run whole trainers."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from shoal import errors
from shoal._wire.cursor import Cursor
from shoal_worker import trainer
from shoal_worker.messages import LEAVE, Instructions, TicketReply, TrainerOutcome, decode, encode
from shoal_worker.trainer import log_failure, outcome_of, read_line


def raising(error: Exception) -> Callable[[], TrainerOutcome]:
    def run() -> TrainerOutcome:
        raise error

    return run


def test_a_failure_is_in_the_log_with_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    log_failure(outcome_of(raising(errors.ProgramError("program a:b raised\nTraceback: \ud800"))))
    assert capfd.readouterr().err == "PROGRAM_ERROR: program a:b raised\nTraceback: ?\n"


@pytest.mark.parametrize("outcome", [TrainerOutcome(), TrainerOutcome("another life goes on", fenced=True)])
def test_other_outcomes_are_not_logged(capfd: pytest.CaptureFixture[str], outcome: TrainerOutcome) -> None:
    log_failure(outcome)
    assert capfd.readouterr().err == ""


def test_a_refused_ticket_ends_the_incarnation_and_not_the_job() -> None:
    assert outcome_of(raising(errors.Unauthenticated("the token was revoked"))).fenced


@pytest.mark.parametrize("error", [errors.Moved("the backup has not confirmed the call"), errors.Overloaded("busy")])
def test_a_trainer_that_the_cluster_cannot_serve_has_not_failed(error: errors.ShoalError) -> None:
    assert outcome_of(raising(error)).fenced


def test_an_outcome_survives_the_way_to_the_daemon() -> None:
    for outcome in (
        TrainerOutcome(),
        TrainerOutcome("no", fenced=True),
        TrainerOutcome(left=True),
        TrainerOutcome(left=True, cursor=Cursor(3, 8)),
    ):
        assert decode(encode(outcome)) == outcome


def test_a_trainer_takes_the_device_and_limit_of_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(*wish: Any) -> None:
        asked.append(wish)
        raise errors.DeviceUnavailable("not here")

    monkeypatch.setattr(trainer, "choose_device", choose)
    told = Instructions("a:1", "job", "worker-1", 1, 1, "cuda:1", 0.5, ("/programs",), ("shoal_nn",), 1.0, 3)
    with pytest.raises(errors.DeviceUnavailable):
        trainer.train(Instructions.from_line(told.to_line()), lambda _: None, trainer.DaemonMessages())
    assert asked == [("cuda:1", 0.5)]


def test_a_command_that_comes_with_the_instructions_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"{}\n" + LEAVE)
    assert read_line(reading) == (b"{}", LEAVE)
    os.close(reading)
    os.close(writing)


def test_commands_of_the_daemon_may_come_in_pieces() -> None:
    words = trainer.DaemonMessages()
    for piece in (b"stop_af", b"ter_batch\nle", b"ave"):
        words.take(piece)
    assert (words.stop_after_batch.is_set(), words.leave_requested.is_set()) == (True, False)
    words.take(b"\n")
    assert words.leave_requested.is_set()


def test_a_ticket_that_is_cut_off_is_left_out() -> None:
    words, reply = trainer.DaemonMessages(), TicketReply("t", 600.0)
    words.take(reply.to_line()[:20] + b"\n" + reply.to_line() + LEAVE)
    assert (words.tickets.get_nowait(), words.tickets.empty(), words.leave_requested.is_set()) == (reply, True, True)
