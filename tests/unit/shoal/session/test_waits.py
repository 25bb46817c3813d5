"""Notices about the waits of sessions and jobs."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal._session.job_waits import StartWait, start_notice
from shoal._session.step_times import StepTimes
from shoal._session.waits import entry_words, ranks_behind
from shoal._system.waits import Wait
from shoal.events import LogLine, StateChanged
from shoal.status import JobMember, JobState, JobStatus
from support.waiting import wait_until

JOB = shoal.Job(name="a", workers=2)
MEMBERS = (
    JobMember("me", 0, "present", 5),
    JobMember("quick", 1, "present", 5),
    JobMember("slow", 2, "present", 4),
    JobMember("gone", 3, "left", reason="is gone"),
)


def test_ranks_that_are_behind_are_named_with_their_steps() -> None:
    assert ranks_behind(MEMBERS, 0, 5) == "rank 2 (slow, at step 4)"
    assert ranks_behind(MEMBERS, 0, 4) == ""
    assert ranks_behind(MEMBERS, 0, 6) == "rank 2 (slow, at step 4), rank 1 (quick, at step 5)"
    many = [JobMember(f"w{rank}", rank, "present") for rank in range(9)]
    assert ranks_behind(many, 0, 1).endswith("rank 5 (w5, at step 0) and 3 more")


def test_an_entry_waits_for_more_sessions_or_for_servers() -> None:
    waiting = JobStatus(JOB, JobState.STARTING, "waiting for sessions: 1 of 2", members=MEMBERS[:1])
    assert entry_words(waiting) == "for 1 more session of 2 (open: me, rank 0)"
    assert entry_words(JobStatus(JOB, JobState.PENDING)) == "for 2 more sessions of 2 (open: none)"
    job = shoal.Job("digits:Digits", name="a", workers=2)
    assert entry_words(JobStatus(job, JobState.PENDING, "waiting for workers: 0 of 2")) == "for workers: 0 of 2"
    assert entry_words(JobStatus(job, JobState.PENDING, "no server")) == "to run (no server)"
    assert entry_words(JobStatus(JOB, JobState.PLACING, members=MEMBERS[:2])) == "for the servers (the job is placing)"


def test_a_program_that_is_loaded_is_waited_for_at_its_workers() -> None:
    loading = JobStatus(shoal.Job("digits:mlp", name="a", workers=2), JobState.STARTING, members=MEMBERS[:2])
    assert entry_words(loading) == "for its workers to load the program: me, rank 0; quick, rank 1"


def test_an_entry_into_a_full_job_waits_for_a_place() -> None:
    full = JobStatus(JOB, JobState.RUNNING, members=MEMBERS[:2])
    assert entry_words(full, "new") == (
        "for the place of a session that has died, if one has (the job is full; open: me, rank 0; quick, rank 1)"
    )
    assert "place" not in entry_words(full, "me")


def test_a_job_waits_until_it_runs() -> None:
    now = 1.0
    started = StartWait("a", lambda: now)
    started.observe(LogLine(1, 0.0, "w", "text"))
    assert started.wait is None
    started.observe(StateChanged(2, 0.0, JobState.PENDING, ""))
    now = 2.0
    started.observe(StateChanged(3, 0.0, JobState.PLACING, ""))
    assert started.wait == Wait("job a", 1.0)
    ended = StartWait("a", lambda: now)
    ended.observe(StateChanged(3, 0.0, JobState.PLACING, ""))
    ended.observe(StateChanged(4, 0.0, JobState.CANCELLED, ""))
    assert ended.wait == Wait("job a", 2.0), "a job that ends without a run does not go on"
    started.observe(StateChanged(4, 0.0, JobState.RUNNING, ""))
    assert started.wait is None


def test_a_wait_for_a_job_names_a_coordinator_that_does_not_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        jobs = SimpleNamespace(Get=None)

        def call(self, *_: object, **__: object) -> None:
            raise errors.Unreachable("gone")

    monkeypatch.setattr("shoal._system.waits.NOTICE_AFTER_S", 0.0)
    coordinator: Any = Silent()

    def wait_for_it() -> None:
        with start_notice(coordinator, "a") as started:
            started.observe(StateChanged(1, 0.0, JobState.PENDING, ""))
            wait_until(lambda: caplog.messages)
            raise errors.Unreachable("the coordinator did not answer")

    with pytest.raises(errors.Unreachable):
        wait_for_it()
    [line] = caplog.messages
    assert line.startswith("job a waits for the coordinator, since ")


def test_a_session_waits_in_calls_but_not_while_its_user_computes() -> None:
    now = 1.0
    times = StepTimes(lambda: now)

    def gradients() -> Iterator[int]:
        assert times.waiting is None, "the user computes"
        yield 1

    assert times.waiting is None
    with times.timed("push"):
        assert times.waiting == ("push", 1.0)
        generated = times.generated(gradients())
        next(generated)
        now = 3.0
        assert times.waiting == ("push", 1.0), "as of the end of the generator's part"
        assert next(generated, None) is None
        assert times.waiting == ("push", 3.0)
    assert times.waiting is None


def test_repeated_requests_for_a_range_are_one_wait() -> None:
    now = 1.0
    times = StepTimes(lambda: now)
    for _ in range(3):
        with times.timed("wait"):
            times.await_range(True)
        now += 1.0
    assert times.waiting == ("batches", 1.0)
    times.await_range(False)
    assert times.waiting is None


def test_modes_say_how_far_a_worker_may_be_ahead() -> None:
    modes = (shoal.Synchronous(), shoal.BoundedStaleness(4), shoal.Asynchronous())
    assert [mode.lead for mode in modes] == [0, 4, None]
