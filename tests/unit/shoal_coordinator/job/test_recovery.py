"""Recovery of a job that lost shards: whether it restarts, from which checkpoint, and which servers it waits for."""

from collections.abc import Set
from dataclasses import replace
from typing import Any

import pytest

from shoal._wire import Lease
from shoal.checkpoint_policy import CheckpointChoice, CheckpointPolicy
from shoal.initializers import Given
from shoal.job import Job
from shoal.status import RestartPoint, SavedCheckpoint
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.job.checkpoints.schedule import CheckpointSchedule
from shoal_coordinator.job.ledger import Ledger
from shoal_coordinator.job.recovery import MAX_FAILED_RESTARTS, Recovery, ResumePlan
from shoal_coordinator.messages import ProgramDescription, RestoredCheckpoint

START = 1_000.0
GONE = "server s0 is gone"
SAMPLES, RANGE = 100, 10
PROGRAM = ProgramDescription({"w": Variable((8, 4)), "b": Variable(4)}, SAMPLES)


def checkpoints(*numbers: int, possible: bool = True) -> CheckpointSchedule:
    saves = CheckpointSchedule(CheckpointPolicy(), START, possible=possible)
    for number in numbers:
        saves.begin(START, 0)
        saves.committed(SavedCheckpoint(number, 0, 100, START), ())
    return saves


def recovery(*numbers: int, possible: bool = True, **options: Any) -> Recovery:
    """Returns the recovery of a job that has taken checkpoints with these numbers."""
    return Recovery(Job("m:f", name="a", **options), checkpoints(*numbers, possible=possible))


def lose(machine: Recovery, servers: int = 2) -> tuple[bool, str]:
    answer = machine.lose(GONE, servers, 10, START)
    machine.validate()
    return answer


def data(done: int = 0, samples: int = SAMPLES) -> state_pb2.LedgerRecord:
    """Where the data of a job with one epoch had come."""
    ledger = Ledger(samples, 1, RANGE)
    for _ in range(done // RANGE):
        lease = ledger.lease("w0", 0, 1)
        assert isinstance(lease, Lease)
        ledger.complete("w0", lease.number)
    return ledger.settled({}, {})


def restored(source: str = "a/2", variables: str | tuple[str, ...] = ("b", "w"), **options: Any) -> RestoredCheckpoint:
    tally = state_pb2.ProgressRecord()
    return RestoredCheckpoint(
        CheckpointChoice.parse(source), 7, frozenset(variables), **{"data": None, "progress_totals": tally} | options
    )


def resume(machine: Recovery, checkpoint: RestoredCheckpoint, program: ProgramDescription = PROGRAM) -> ResumePlan:
    return machine.resume(checkpoint, program, lambda _: None)


class TestLosing:
    def test_it_goes_back_to_the_newest_checkpoint(self) -> None:
        machine = recovery(1, 2)
        assert lose(machine) == (True, f"{GONE}; the job continues from checkpoint 2")
        assert machine.restarts == 1

    def test_or_to_its_beginning(self) -> None:
        assert lose(recovery()) == (True, f"{GONE}; the job continues from its beginning")

    @pytest.mark.parametrize(
        "machine", [recovery(possible=False), Recovery(Job(name="s"), checkpoints(1))], ids=["no folder", "session"]
    )
    def test_not_without_a_folder_nor_a_session(self, machine: Recovery) -> None:
        assert not machine.possible
        assert lose(machine) == (False, GONE)
        assert machine.restarts == 0

    def test_a_session_is_told_how_to_go_on_or_how_to_be_saved_the_next_time(self) -> None:
        unsaved = Recovery(Job(name="s"), checkpoints(possible=False)).advice
        assert unsaved.startswith(
            "; the cluster has no checkpoint storage, so the work is lost: open the session again."
        )
        assert "start the cluster with --checkpoints (from Python: LocalCluster(checkpoints=...))" in unsaved
        assert Recovery(Job(name="s"), checkpoints()).advice.endswith(
            "no checkpoint yet, so the work is lost: open the session again"
        )
        assert Recovery(Job(name="s"), checkpoints(1)).advice == (
            "; it was saved as s/1: open the session again with restore='s/1', or with restore='auto' in every run"
        )
        assert recovery(1).advice == ""

    def test_not_without_end(self) -> None:
        machine = recovery(1)
        for _ in range(MAX_FAILED_RESTARTS):
            assert lose(machine)[0]
        assert lose(machine) == (False, f"{GONE} (11 times in a row without a new checkpoint in between)")

    def test_but_as_often_as_there_are_new_checkpoints(self) -> None:
        machine = recovery(1)
        for _ in range(2 * MAX_FAILED_RESTARTS):
            assert lose(machine)[0]
            machine.checkpointed()
        assert machine.restarts == 2 * MAX_FAILED_RESTARTS

    def test_a_server_that_said_so_before_does_not_count_towards_the_end(self) -> None:
        machine = recovery(1)
        for _ in range(MAX_FAILED_RESTARTS):
            lose(machine)
        assert machine.lose(GONE, 2, 0, START, announced=True) == (True, f"{GONE}; the job continues from checkpoint 1")
        machine.validate()
        assert not lose(machine)[0]


class TestWaiting:
    def test_for_as_many_servers_as_there_were_and_for_so_long(self) -> None:
        machine = recovery()
        lose(machine, servers=2)
        assert machine.waits_for_servers(1, START + 9.9)
        assert not machine.waits_for_servers(2, START)
        assert not machine.waits_for_servers(1, START + 10), "who is there must do"

    def test_for_servers_that_are_expected_as_long_as_they_are(self) -> None:
        machine = recovery()
        lose(machine, servers=2)
        assert machine.waits_for_servers(1, START + 40, expected=True)
        assert not machine.waits_for_servers(2, START + 40, expected=True)
        assert not recovery().waits_for_servers(0, START, expected=True), "it never had any"

    def test_for_no_server_before_a_loss(self) -> None:
        assert not recovery().waits_for_servers(0, START)


class TestSources:
    def test_its_own_newest_first(self) -> None:
        assert [str(it) for it in recovery(1, 2, restore="b/9").sources] == ["a/2", "a/1"]

    def test_the_users_choice_if_it_has_no_checkpoint(self) -> None:
        machine = recovery(restore="b/9", partial_restore=True)
        assert machine.sources == (CheckpointChoice("b", 9, partial=True),)

    def test_the_one_that_it_began_with_whatever_is_the_newest_by_then(self) -> None:
        machine = recovery(restore="b", partial_restore=True)
        assert machine.sources == (CheckpointChoice("b", 0, partial=True),)
        began = CheckpointChoice("b", 7, partial=True)
        resume(machine, replace(restored(), source=began))
        assert machine.sources == (began,)
        assert lose(machine) == (True, f"{GONE}; the job continues from its beginning, b/7")

    def test_none(self) -> None:
        assert recovery().sources == ()


class TestTheRestartPoint:
    def test_is_known_from_the_restore_on_until_the_next_loss(self) -> None:
        machine = recovery(1, 2, restore="b/9")
        resume(machine, restored("b/9"))
        assert machine.restart_point is None, "it has begun with a checkpoint, but has not restarted"
        lose(machine)
        assert machine.restart_point is None
        resume(machine, restored("a/2"))
        assert machine.restart_point == RestartPoint("a", 2, 7)
        record, again = state_pb2.JobRecord(), recovery(1, 2)
        machine.write_to(record)
        again.restore_from(record, START)
        assert again.restart_point == RestartPoint("a", 2, 7)
        lose(again)
        assert again.restart_point is None


class TestAStorageThatIsAway:
    def test_is_tried_again_after_ever_longer_pauses(self) -> None:
        machine, now, delays = recovery(1), START, []
        assert not machine.waits_for_storage(now)
        for _ in range(7):
            machine.defer_restore("503", now)
            machine.validate()
            begun = now
            while machine.waits_for_storage(now):
                now += 1
            delays.append(now - begun)
        assert delays == [2, 4, 8, 16, 32, 60, 60]
        assert machine.waiting_for == "waiting for the storage of its checkpoints: 503"

    def test_is_forgotten_when_it_is_back(self) -> None:
        machine = recovery(1)
        machine.defer_restore("503", START)
        resume(machine, restored("a/1"))
        machine.validate()
        assert (machine.waiting_for, machine.waits_for_storage(START)) == ("", False)


class TestGoingOn:
    def test_where_the_data_had_come(self) -> None:
        resumption = resume(recovery(1, 2, seed=5), restored(data=data(done=30), seed=5))
        assert resumption.ledger
        assert resumption.ledger.account().total.done == 30
        assert (resumption.problem, resumption.note) == ("", "continues from a/2, step 7")
        assert resumption.assigned

    def test_data_starts_from_the_beginning_if_its_order_differs(self) -> None:
        for checkpoint in (restored(data=data(), seed=6), restored(data=data(samples=99), seed=5)):
            resumption = resume(recovery(2, seed=5), checkpoint)
            assert resumption.ledger is None
            assert resumption.note == (
                "continues from a/2, step 7 "
                "(its data starts from the beginning: the seed or the number of samples differs)"
            )

    def test_without_a_ledger_if_the_checkpoint_has_none(self) -> None:
        resumption = resume(recovery(2), restored())
        assert (resumption.ledger, resumption.note) == (None, "continues from a/2, step 7")

    def test_the_note_says_all_that_one_might_not_expect(self) -> None:
        checkpoint = restored(variables=("old", "w"), data=data(), seed=1, skipped=("a/3: it is damaged",))
        assert resume(recovery(2), checkpoint).note == (
            "continues from a/2, step 7 (not restored: b; left out: old; skipped: a/3: it is damaged; "
            "its data starts from the beginning: the seed or the number of samples differs)"
        )

    def test_other_arguments_of_the_optimizer_are_in_the_note_and_in_the_record(self) -> None:
        changes = ("learning_rate is 0.1, and was 0.05",)
        machine, again = recovery(restore="b/2"), recovery(restore="b/2")
        note = resume(machine, restored("b/2", optimizer_changes=changes)).note
        assert note == (
            "continues from b/2, step 7 (the optimizer's arguments differ from the checkpoint's, and the job's count: "
            "learning_rate is 0.1, and was 0.05)"
        )
        record = state_pb2.JobRecord()
        machine.write_to(record)
        again.restore_from(record, START)
        assert machine.restore_note == again.restore_note == note

    def test_a_rate_that_was_set_at_run_time_is_no_difference_to_the_jobs_own_checkpoint(self) -> None:
        machine = recovery(2)
        resume(machine, restored("a/2", optimizer_changes=("learning_rate is 0.1, and was 0.05",)))
        assert machine.restore_note == ""

    def test_the_note_is_bounded(self) -> None:
        names = [f"v{number:03}" for number in range(200)]
        note = resume(recovery(2), restored(variables=("b", "w", *names))).note
        assert "v049" in note
        assert "v050" not in note

    def test_a_finished_checkpoint_of_another_job_is_refused_but_not_its_own(self) -> None:
        done = data(done=SAMPLES)
        assert resume(recovery(2), restored("a/2", data=done, seed=0)).problem == ""
        problem = resume(recovery(restore="b/2"), restored("b/2", data=done, seed=0)).problem
        assert problem == "nothing is left to do: 1 epoch is done in b/2; ask for at least 2 epochs"
        long = data(done=SAMPLES)
        long.epochs, long.epoch = 200, 200
        long.done.clear()
        problem = resume(recovery(restore="b/2"), restored("b/2", data=long, seed=0)).problem
        assert problem == "nothing is left to do: 200 epochs are done in b/2; ask for at least 201 epochs"
        assert resume(recovery(restore="b/2", epochs=2), restored("b/2", data=done, seed=0)).problem == ""

    def test_given_values_that_are_not_restored_are_to_be_sent(self) -> None:
        sent = Variable((8, 4), initializer=Given())
        program = ProgramDescription({"w": sent, "v": sent, "b": Variable(4)}, SAMPLES)
        cases: list[tuple[str, Set[str], bool]] = [("wvb", {"w", "v"}, True), ("wb", {"w"}, False), ("b", set(), False)]
        for variables, given, assigned in cases:
            resumption = resume(recovery(2), restored(variables=variables), program)
            assert (resumption.problem, resumption.given, resumption.assigned) == ("", given, assigned)


@pytest.mark.parametrize(("stored", "longest_s"), [(True, 10), (False, 600)])
def test_a_clock_that_goes_back_prolongs_the_wait_for_servers_at_most_by_itself(stored: bool, longest_s: int) -> None:
    """An earlier version has not stored how long a job waits."""
    machine, other, record = recovery(1), recovery(1), state_pb2.JobRecord()
    lose(machine)
    machine.write_to(record)
    if not stored:
        record.ClearField("server_return_patience_s")
    restarted_at = START - 86_400
    other.restore_from(record, restarted_at)
    assert other.waits_for_servers(1, restarted_at + longest_s - 1)
    assert not other.waits_for_servers(1, restarted_at + longest_s)


def test_a_job_that_waits_for_no_server_does_not_begin_to_when_the_clock_goes_back() -> None:
    machine, other, record = recovery(1), recovery(1), state_pb2.JobRecord()
    machine.lose(GONE, 2, 0, START, announced=True)
    machine.write_to(record)
    other.restore_from(record, START - 300)
    assert not other.waits_for_servers(1, START - 300)


def test_a_record_is_all_that_there_is() -> None:
    machine, other = recovery(1), recovery(1)
    lose(machine)
    lose(machine)
    resume(machine, restored("b/7"))
    machine.defer_restore("503", START)
    record, again = state_pb2.JobRecord(), state_pb2.JobRecord()
    machine.write_to(record)
    other.restore_from(record, START)
    other.write_to(again)
    assert (again, other.restarts) == (record, 2)
    assert other.waits_for_servers(1, START)
    assert (other.waiting_for, other.waits_for_storage(START + 1)) == (machine.waiting_for, True)
    fresh = recovery()
    fresh.restore_from(record, START)
    assert fresh.sources == (CheckpointChoice("b", 7),)
