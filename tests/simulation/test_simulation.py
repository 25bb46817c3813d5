"""Short form of the simulation: some seeds, a replay, planted bugs, and shrinking. `make simulate` is the long form."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal import errors
from shoal.consistency import Asynchronous
from shoal_coordinator.cluster.shards import rebalancer
from shoal_coordinator.job import GroupCopies
from simulation import __main__ as command
from simulation import campaign, messages
from simulation.__main__ import main
from simulation.clock import START, Clock
from simulation.cluster import Simulation, run
from simulation.lanes import Lane, LaneEnd
from simulation.network import Context, Network, Weather
from simulation.nodes import ServerNode
from simulation.plan import Fault, FaultKind, Plan, plan_of
from simulation.planted import PLANTED
from simulation.scheduler import Scheduler
from support.run_lengths import count_runs, long_only, size

# A seed that finds each planted bug, and the invariant that it breaks.
FOUND = {
    "dedup_off": (5, "succeeds"),
    "fencing_off": (386, "fenced"),
    "generation_check_off": (110, "generation"),
    "acknowledge_before_backup": (24, "acknowledged"),
    "split_drops_staged": (872, "consistent_cut"),
    "split_drops_answers": (219, "succeeds"),
    "old_primary_answers": (0, "acknowledged"),
}


SEEDS = size(70, 10_000)


@pytest.mark.timeout(60 + SEEDS // 5)
def test_no_seed_breaks_an_invariant() -> None:
    with count_runs("simulation", SEEDS, "seeds that broke an invariant") as counted:
        row = campaign.clean(0, SEEDS, size(1, 2), print)
        counted.passes(row.violations, row.seeds - row.violations)
        counted.metrics |= {"seeds a minute": row.seeds_per_minute, "events": row.events, "pushes": row.acknowledged}
    assert row.failed == ()
    assert row.acknowledged > 10 * row.seeds, "workers train"
    assert row.undone, "jobs restart from checkpoints"


def test_a_seed_replays_exactly() -> None:
    first, again = run(plan_of(7)), run(plan_of(7))
    assert (first.digest, first.events, first.seconds) == (again.digest, again.events, again.seconds)
    assert run(plan_of(8)).digest != first.digest


@pytest.mark.parametrize("name", FOUND)
def test_a_planted_bug_is_found(name: str) -> None:
    seed, rule = FOUND[name]
    result = run(plan_of(seed), PLANTED[name])
    assert result.rule == rule
    assert run(plan_of(seed)).rule == "", "without the bug nothing is found"


@long_only
@pytest.mark.timeout(900)
def test_every_planted_bug_is_found_soon() -> None:
    with count_runs("planted_bugs", len(PLANTED), "seeds until one was found") as counted:
        for name in PLANTED:
            row, found = campaign.planted(name, 0)
            assert found, f"{name} is not found in {campaign.PLANTED_WITHIN} seeds"
            counted.passes(row.found_after)
            counted.metrics[f"seed, {name}"] = found.plan.seed


def test_a_failing_plan_is_shrunk() -> None:
    seed, rule = FOUND["generation_check_off"]
    result = run(plan_of(seed), PLANTED["generation_check_off"])
    smallest = campaign.smallest(result, PLANTED["generation_check_off"])
    assert smallest.rule == rule
    assert len(smallest.plan.faults) <= len(result.plan.faults)
    assert smallest.plan.seed == seed
    assert smallest.plan != result.plan


def test_a_job_without_faults_is_never_undone() -> None:
    for seed in range(20):
        plan = replace(plan_of(seed), faults=(), weather=Weather())
        result = run(plan)
        assert (result.rule, result.undone) == ("", 0)


CHANGE = Fault(2.0, FaultKind.JOIN, "s2", 0.0)


def moving_plan(*faults: Fault, replicas: int = 1) -> Plan:
    """Returns a plan in which servers come and go, without bad weather."""
    plan = replace(plan_of(1), consistency=Asynchronous(), norms=False, overlap=False, weather=Weather(), samples=45)
    return replace(plan, servers=3, paces=(1.0,) * (4 + plan.workers), replicas=replicas, moves=True, faults=faults)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_that_joins_gets_its_share_of_a_running_job(replicas: int) -> None:
    simulation = Simulation(moving_plan(CHANGE, replicas=replicas))
    result = simulation.run()
    assert (result.rule, result.undone) == ("", 0)
    job = simulation.coordinator.job
    assert job
    assert Counter(shard.server for shard in job.placed.shards) == {"s0": 2, "s1": 2, "s2": 2}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [FaultKind.DRAIN, FaultKind.TERMINATE])
def test_a_server_that_drains_hands_over(kind: FaultKind, replicas: int) -> None:
    simulation = Simulation(moving_plan(Fault(3.0, kind, "s1", 1.0, grace_s=60.0), replicas=replicas))
    result = simulation.run()
    assert (result.rule, result.undone) == ("", 0)
    assert simulation.servers[1].draining.gone == (kind is FaultKind.DRAIN)
    assert result.seconds < 60.0


@pytest.mark.parametrize("change", [CHANGE, Fault(3.0, FaultKind.TERMINATE, "s1", 1.0, grace_s=60.0)])
def test_the_copies_are_in_different_zones_when_servers_have_come_or_gone(change: Fault) -> None:
    """Without s1, both servers are in one zone."""
    simulation = Simulation(replace(moving_plan(change, replicas=2), zones=2))
    assert (simulation.run().rule, simulation.places.problem()) == ("", "the job does not train")
    job = simulation.coordinator.job
    assert job
    assert all(it.backup and (it.primary.member == "s1") != (it.backup.member == "s1") for it in job.copies.groups)


def test_a_job_whose_copies_stay_in_one_zone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancer, "move_apart", lambda *_: None)
    result = run(replace(moving_plan(Fault(3.0, FaultKind.TERMINATE, "s1", 1.0, grace_s=60.0), replicas=2), zones=2))
    assert result.rule == "completes"
    assert "in zone z0" in result.what


@pytest.mark.parametrize("change", [CHANGE, Fault(3.0, FaultKind.DRAIN, "s1", 0.0)])
def test_a_hand_over_that_gives_up_the_second_copy_is_found(change: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_over = GroupCopies.handed_over
    monkeypatch.setattr(GroupCopies, "handed_over", lambda group, **_: handed_over(group, keeps=False))
    assert run(moving_plan(change, replicas=2)).rule == "two_copies"


class Stubborn(ServerNode):
    """A server that splits no lock group."""

    async def serve(self, request: Any, context: Context) -> Any:
        if isinstance(request, messages.SplitGroup):
            raise errors.Overloaded("not now")
        return await super().serve(request, context)


def test_a_run_with_moves_completes_only_when_the_shards_are_in_their_places() -> None:
    result = Simulation(moving_plan(CHANGE), Stubborn).run()
    assert result.rule == "completes"
    assert "change" in result.what


def test_a_coordinator_with_a_wrong_clock_loses_nothing() -> None:
    crash = Fault(2.0, FaultKind.CRASH, "coordinator", 0.5, offset_s=-300.0)
    result = run(replace(plan_of(1), faults=(crash,), weather=Weather()))
    assert (result.rule, result.undone) == ("", 0)


def test_a_clock_has_its_own_pace_and_offset() -> None:
    now = 10.0
    clock = Clock(lambda: now, offset_s=300.0, pace=1.5)
    steady = clock.steady()
    assert steady() == START + 310.0
    now = 12.0
    assert steady() == START + 313.0
    assert clock.wall() == START + 312.0
    assert clock.monotonic() == 18.0


def lane(weather: Weather) -> tuple[Scheduler, Network, Lane, LaneEnd, list[object], list[str]]:
    """Returns a lane from a to b, what arrives at b, and what a and b learn of its end."""
    scheduler, arrived, ends = Scheduler(0), list[object](), list[str]()
    network = Network(scheduler, weather)
    first = LaneEnd(scheduler.new_life("a"), print, lambda why: ends.append(f"a: {why}"))
    second = LaneEnd(scheduler.new_life("b"), arrived.append, lambda why: ends.append(f"b: {why}"))
    return scheduler, network, Lane(scheduler, network, first, second), second, arrived, ends


def test_a_lane_keeps_the_order_of_messages_also_over_a_short_partition() -> None:
    scheduler, network, connection, end, arrived, ends = lane(Weather(delay_s=0.05, late=0.3, late_s=1.0))
    scheduler.at(0.3, lambda: scheduler.after(2.0, network.cut(frozenset("a"), frozenset("b"))))
    for number in range(50):
        scheduler.at(0.01 * number, lambda number=number: connection.send(end, number))  # type: ignore[misc]
    scheduler.run(lambda: False, 20.0)
    assert arrived == [*range(50)]
    assert not ends


def test_both_ends_learn_that_a_lane_is_broken() -> None:
    scheduler, network, connection, end, arrived, ends = lane(Weather())
    network.cut(frozenset("a"), frozenset("b"))
    connection.send(end, "lost")
    scheduler.run(lambda: False, 20.0)
    assert (arrived, ends) == ([], ["a: no way to the other end", "b: no way to the other end"])


def test_the_end_of_a_process_ends_its_lanes() -> None:
    scheduler, _, connection, end, _, ends = lane(Weather())
    scheduler.at(1.0, end.life.end)
    scheduler.run(lambda: False, 20.0)
    assert ends == ["a: the other end has ended"]
    connection.send(end, "late")
    assert connection.closed


def test_the_command_writes_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PLANTED", {"fencing_off": PLANTED["fencing_off"]})
    latest = tmp_path / "latest.json"
    status = main(["--seeds", "3", "--processes", "1", "--first", str(FOUND["fencing_off"][0])], latest)
    rows = {row["name"]: row for row in json.loads(latest.read_text())}
    assert [*rows] == ["clean", "fencing_off"]
    assert rows["clean"]["seeds"] == 3
    assert rows["fencing_off"]["found_after"] == 1
    assert status == 0
    assert "seeds a minute" in capsys.readouterr().out


def test_the_command_replays_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "0"]) == 0
    assert "no invariant is broken" in capsys.readouterr().out
    assert main(["--seed", str(FOUND["dedup_off"][0]), "--bug", "dedup_off"]) == 1
    assert "shrunk to" in capsys.readouterr().out
