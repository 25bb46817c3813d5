"""Step timings: a worker measures them, the coordinator keeps them, and a client compares them."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal._training.participant import Report
from shoal._training.step_clock import StepClock
from shoal._wire.limits import TIMINGS
from shoal.status import GroupTimings, RankTimes, StepTiming, Straggler, Timings
from shoal_coordinator.job import step_timings
from shoal_coordinator.job.step_timings import StepTimings


def steps(numbers: list[int] | range = range(20), began: float = 1_000.0, **phases: Any) -> tuple[StepTiming, ...]:
    """Timings of steps that follow each other."""
    one = StepTiming(0, 0.0, **phases)
    return tuple(
        dataclasses.replace(one, step=number, began=began + place * one.seconds) for place, number in enumerate(numbers)
    )


def straggling_worker(timings: Timings) -> str | None:
    found = timings.straggler()
    return found.worker if found else None


class TestAStepClock:
    def test_notes_each_step_by_itself(self) -> None:
        now = iter([100.0, 103.0, 104.0, 109.0])
        clock = StepClock(lambda: next(now))
        clock.observe("pull", 0.5)
        clock.observe("compute", 2.0)
        clock.observe("compute", 0.25)
        clock.stepped(7)
        clock.observe("wait", 1.0)
        clock.stepped(8)
        clock.observe("read", 0.125)
        assert clock.take() == (
            StepTiming(7, 100.0, pull=0.5, compute=2.25),
            StepTiming(8, 103.0, wait=1.0),
        )
        assert clock.take() == ()
        clock.observe("push", 0.25)
        clock.stepped(9)
        assert clock.take() == (StepTiming(9, 104.0, read=0.125, push=0.25),), "it was under way as they were taken"

    def test_keeps_the_latest(self) -> None:
        clock = StepClock(lambda: 0.0)
        for step in range(TIMINGS + 10):
            clock.stepped(step)
        assert [timing.step for timing in clock.take()] == [*range(10, TIMINGS + 10)]


class TestAReport:
    def test_joins_timings_and_keeps_the_latest(self) -> None:
        early, late = Report(timings=steps(range(60))), Report(timings=steps(range(60, 70)))
        assert [timing.step for timing in early.merged_with(late).timings] == [*range(6, 70)]

    def test_has_the_latest_times_of_the_ranks(self) -> None:
        early, late = Report(ranks=(RankTimes(1.0),)), Report(ranks=(RankTimes(2.0),))
        assert early.merged_with(late).ranks == late.ranks
        assert late.merged_with(Report()).ranks == late.ranks

    def test_brings_timings_in_order_each_step_once(self) -> None:
        last = StepTiming(3, 0.0, compute=2.0)
        assert Report(timings=(StepTiming(3, 0.0), StepTiming(1, 0.0), last)).timings == (StepTiming(1, 0.0), last)


class TestTimingsOfTheCoordinator:
    def test_is_the_latest_of_each_worker(self) -> None:
        kept = StepTimings()
        for start in range(0, 320, 64):
            kept.add("w1", steps(range(start, start + 64)), 10.0)
        kept.add("w0", steps([5]), 10.0)
        assert [*kept.kept] == ["w0", "w1"]
        assert [timing.step for timing in kept.kept["w1"]] == [*range(64, 320)]

    def test_counts_a_report_once_that_came_twice(self) -> None:
        kept, report = StepTimings(), steps(range(10, 14))
        kept.add("w0", report, 10.0)
        kept.add("w0", (*report, *steps([14])), 10.0)
        assert [timing.step for timing in kept.kept["w0"]] == [10, 11, 12, 13, 14]

    def test_are_replaced_by_an_incarnation_that_starts_earlier(self) -> None:
        kept = StepTimings()
        kept.add("w0", steps(range(10, 14), compute=1.0), 10.0)
        kept.add("w0", steps([12], compute=2.0), 11.0)
        assert [(timing.step, timing.compute) for timing in kept.kept["w0"]] == [(10, 1.0), (11, 1.0), (12, 2.0)]

    def test_stay_within_the_reply_for_any_number_of_workers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_timings, "WORKERS", 3)
        monkeypatch.setattr(step_timings, "STEPS", 8)
        monkeypatch.setattr(step_timings, "IN_ALL", 16)
        kept = StepTimings()
        for worker in ("w0", "w1"):
            kept.add(worker, steps(range(9)), 10.0)
        assert [len(timings) for timings in kept.kept.values()] == [8, 8]
        kept.add("w2", steps(range(9)), 10.0)
        assert {worker: [timing.step for timing in timings] for worker, timings in kept.kept.items()} == {
            worker: [5, 6, 7, 8] for worker in ("w0", "w1", "w2")
        }
        kept.add("w0", steps([9]), 11.0)
        kept.add("w3", steps([0], compute=0.1), 12.0)
        assert [*kept.kept] == ["w0", "w2", "w3"], "w1 has been silent for the longest"
        kept.validate()

    def test_have_the_ranks_of_hybrid_groups_up_to_a_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_timings, "RANKS", 4)
        monkeypatch.setattr(step_timings, "WORKERS", 3)
        kept, pair = StepTimings(), (RankTimes(60.0, 1), RankTimes(60.0, 2))
        for worker in ("g1", "g0", "g1"):
            kept.add(worker, steps([0]), 10.0, pair)
        assert kept.groups == {"g0": GroupTimings(pair), "g1": GroupTimings(pair)}
        kept.add("g2", steps([0]), 10.0, pair)
        assert [*kept.groups] == ["g1", "g2"], "g0 has reported before the others"
        for worker in ("w0", "w1"):
            kept.add(worker, steps([0]), 10.0)
        assert [*kept.groups] == ["g2"], "its steps are not kept either"
        kept.validate()
        kept.add("g2", steps([1]), 11.0)
        assert kept.groups == {}, "it shares its session no more"
        kept.validate()

    def test_are_scanned_only_when_the_share_of_a_worker_is_halved(self) -> None:
        kept = StepTimings()
        lines, counts, outer = 0, [], sys.gettrace()

        def count(*_: Any) -> Any:
            nonlocal lines
            lines += 1
            return count

        for worker in range(step_timings.WORKERS):
            report, lines = steps([0]), 0
            sys.settrace(count)
            try:
                kept.add(f"w{worker}", report, 10.0)
            finally:
                sys.settrace(outer)
            counts.append(lines)
        assert [worker for worker, lines in enumerate(counts) if lines > 64] == [64, 128, 256, 512]
        kept.validate()

    def test_have_the_time_of_the_last_reported_training_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(step_timings, "WORKERS", 2)
        kept = StepTimings()
        kept.add("w0", steps([0], compute=0.1), 10.0)
        kept.add("w1", steps([0], wait=0.1), 11.0)
        kept.add("w0", steps([1], wait=0.1), 12.0)
        assert kept.last_reported_at == {"w0": 10.0}
        kept.add("w1", steps([1], compute=0.1), 13.0)
        kept.add("w2", steps([1], compute=0.1), 14.0)
        assert kept.last_reported_at == {"w1": 13.0, "w2": 14.0}

    @given(
        st.lists(
            st.tuples(st.integers(0, 5), st.sets(st.integers(0, 50), max_size=8)),
            max_size=30,
        )
    )
    def test_are_bounded_and_in_order_for_any_reports(self, reports: Sequence[tuple[int, set[int]]]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_timings, "STEPS", 6)
            patch.setattr(step_timings, "WORKERS", 4)
            patch.setattr(step_timings, "IN_ALL", 16)
            kept = StepTimings()
            for worker, numbers in reports:
                timings = steps(sorted(numbers))
                kept.add(f"w{worker}", timings, 10.0)
                kept.validate()
                if timings:
                    latest = timings[-(6 if len(kept.kept) < 3 else 3) :]
                    assert kept.kept[f"w{worker}"][-len(latest) :] == latest


class TestTheStraggler:
    def test_is_the_worker_with_the_longest_own_time_and_names_its_phase(self) -> None:
        timings = Timings(
            {
                "w0": steps(pull=0.25, compute=0.1, push=0.025),
                "w1": steps(compute=0.1, read=0.225, push=0.05),
                "w2": steps(pull=0.25, compute=0.1, push=0.025),
            }
        )
        found = timings.straggler()
        assert found
        assert (found.worker, found.phase) == ("w1", "read")
        assert [found.ratio, found.seconds] == pytest.approx([3.0, 0.25])
        assert str(found) == "w1 takes 3.0 times as long as the others: 250 ms more a step, most of it in read"
        assert "w1 takes 3.0 times as long as the others: 1.5 s more a step" in str(Straggler("w1", 3.0, 1.5, "read"))
        assert timings.compared().slowest == {"w0": 0.0, "w1": 1.0, "w2": 0.0}

    def test_is_none_among_equal_workers(self) -> None:
        assert Timings({"w0": steps(compute=0.1), "w1": steps(compute=0.11)}).straggler() is None

    def test_is_none_for_one_worker_or_without_steps(self) -> None:
        assert Timings().straggler() is None
        assert Timings({"w0": steps(compute=0.1)}).straggler() is None

    def test_is_none_before_five_steps(self) -> None:
        few = range(4)
        assert Timings({"w0": steps(few, compute=0.1), "w1": steps(few, compute=0.9)}).straggler() is None

    def test_is_not_a_worker_that_was_slow_in_some_steps_only(self) -> None:
        slow = (*steps(range(9), compute=5.0), *steps(range(9, 20), compute=0.1))
        timings = Timings({"w0": steps(compute=0.1), "w1": slow})
        assert timings.straggler() is None

    def test_is_not_a_worker_that_was_slow_long_ago(self) -> None:
        numbers = range(200)
        slow_once = (*steps(range(136), compute=9.0), *steps(range(136, 200), began=1_000 + 136 * 9.0, compute=0.1))
        others = steps(numbers, began=2_200.0, compute=0.1)
        assert Timings({"w0": slow_once, "w1": others}).straggler() is None

    def test_is_not_a_worker_whose_peers_have_no_data(self) -> None:
        """An idle worker passes its steps by, which takes it no time of its own."""
        assert Timings({"w0": steps(compute=0.1), "w1": steps(wait=0.1)}).straggler() is None

    def test_is_not_a_worker_that_is_gone(self) -> None:
        slow = steps(range(20), compute=0.9)
        others = {name: steps(range(20), compute=0.2, pull=0.7) for name in ("w0", "w1")}
        reported = {"w0": 1_100.0, "w1": 1_100.5}
        gone = Timings({**others, "w2": slow}, last_reported_at={**reported, "w2": 1_090.0})
        assert gone.straggler() is None
        assert [*gone.compared().typical] == ["w0", "w1"]
        silent_briefly = Timings({**others, "w2": slow}, last_reported_at={**reported, "w2": 1_091.0})
        assert straggling_worker(silent_briefly) == "w2"
        long = steps(range(20), compute=4.0)
        in_a_step = Timings({**others, "w2": long}, last_reported_at={**reported, "w2": 1_089.0})
        assert straggling_worker(in_a_step) == "w2"

    @pytest.mark.parametrize("off_s", [-3_600, 3_600])
    def test_does_not_depend_on_the_clock_of_its_host(self, off_s: int) -> None:
        others = {name: steps(compute=0.2) for name in ("w0", "w1")}
        timings = Timings({**others, "w2": steps(began=1_000.0 + off_s, compute=0.9)})
        assert straggling_worker(timings) == "w2"
        assert [*timings.compared().typical] == ["w0", "w1", "w2"]

    def test_is_found_by_medians_without_common_steps(self) -> None:
        fast = {name: steps(range(800, 1_056), began=1_000.0, compute=0.02) for name in ("w0", "w1")}
        slow = steps(range(20), began=1_000.0, compute=0.25, push=0.01)
        timings = Timings({**fast, "w2": slow})
        assert "w2" not in timings.compared().slowest, "it has no step in common with the others"
        found = timings.straggler()
        assert found
        assert (found.worker, found.phase) == ("w2", "compute")
        assert [found.ratio, found.seconds] == pytest.approx([13.0, 0.24])

    def test_is_not_misled_by_a_single_long_step(self) -> None:
        odd = (StepTiming(0, 1_000.0, compute=60.0), *steps(range(1, 20), began=1_060.0, compute=0.1))
        waiting = (StepTiming(0, 1_000.0, compute=0.1), *steps(range(1, 20), began=1_060.0, compute=0.1))
        assert Timings({"w0": waiting, "w1": odd}).straggler() is None

    @given(
        st.dictionaries(
            st.sampled_from(["w0", "w1", "w2"]),
            st.dictionaries(
                st.integers(0, 12),
                st.tuples(st.floats(0, 1e300), *[st.floats(0, 1e6)] * 6),
                max_size=12,
            ),
        )
    )
    def test_is_one_of_the_workers_or_none_for_any_timings(
        self, found: Mapping[str, Mapping[int, tuple[float, ...]]]
    ) -> None:
        timings = Timings(
            {
                worker: tuple(StepTiming(step, *phases) for step, phases in sorted(rows.items()))
                for worker, rows in found.items()
            }
        )
        compared = timings.compared()
        assert compared.typical.keys() <= timings.steps.keys()
        if compared.straggler:
            its = compared.typical[compared.straggler.worker].own
            trained = {worker: sum(step.own > 0 for step in steps) for worker, steps in timings.steps.items()}
            # Of whom a step or two are known, little is known.
            assert its == max(step.own for worker, step in compared.typical.items() if trained[worker] >= 5)
            assert compared.straggler.seconds > 0
