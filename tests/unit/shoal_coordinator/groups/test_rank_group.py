"""Generations of a group of ranks: who is in them, when they end, and whom the next one waits for."""

import random

import pytest

from shoal import errors
from shoal._limits import catalogue
from shoal.status import RankTimes, StragglerRank
from shoal_coordinator.groups import GroupRegistry, RankCandidate, RankGeneration, RankGroup, RankHeartbeat
from shoal_coordinator.groups.rank_group import SILENT_S


def candidate(name: str, progress: int = -1, attempt: int = 1) -> RankCandidate:
    return RankCandidate(name, f"host-{name}:{attempt}", progress)


def formed(group: RankGroup, names: str, now: float = 0.0, generation: int = 0, attempt: int = 1) -> RankGeneration:
    """Makes processes join until they are a generation."""
    for name in names:
        group.join(now, candidate(name, attempt=attempt), generation)
    found = [group.join(now, candidate(name, attempt=attempt), generation) for name in names]
    assert found[0] is not None
    assert found == [found[0]] * len(names)
    return found[0]


def heartbeat(
    group: RankGroup, now: float, generation: RankGeneration, name: str, lost: int = -1, **more: object
) -> str:
    names = [it.process_id for it in generation.ranks]
    rank = names.index(name)
    told = RankHeartbeat(generation.ranks[rank], generation.generation, rank, len(names), lost, **more)  # type: ignore[arg-type]
    return group.heartbeat(now, told)


def members(generation: RankGeneration) -> str:
    return "".join(it.process_id for it in generation.ranks)


def test_the_first_generation_has_all_ranks_in_the_order_in_which_they_came() -> None:
    group = RankGroup(3, 1)
    assert group.join(0, candidate("a")) is None
    assert group.waits_for == "2 more of 3 processes"
    assert group.join(1, candidate("b")) is None
    found = group.join(2, candidate("c"))
    assert found == RankGeneration(1, (candidate("a"), candidate("b"), candidate("c")))
    assert group.join(3, candidate("a")) == found  # it asks again
    assert [heartbeat(group, 4, found, name) for name in "abc"] == ["", "", ""]


def test_a_process_that_dies_before_the_first_generation_is_replaced() -> None:
    group = RankGroup(2, 1)
    group.join(0, candidate("a"))
    assert members(formed(group, "bc", now=SILENT_S + 1)) == "bc"


def test_survivors_form_the_next_generation_without_the_lost_rank() -> None:
    group = RankGroup(4, 1)
    first = formed(group, "abcd")
    assert heartbeat(group, 1, first, "c", lost=1, reason="rank 1 of 4 has ended") == "rank 1 of 4 has ended"
    assert heartbeat(group, 1, first, "a") == "rank 1 of 4 has ended"
    assert group.join(1, candidate("d", 7, 2), 1) is None
    assert group.waits_for == "rank 0 (host-a:1), rank 2 (host-c:1)"
    assert group.join(1, candidate("c", 8, 2), 1) is None
    second = group.join(1, candidate("a", 7, 2), 1)
    assert second == RankGeneration(2, (candidate("a", 7, 2), candidate("c", 8, 2), candidate("d", 7, 2)))
    assert heartbeat(group, 2, first, "b") == "generation 2 of the group has begun without it"


def test_a_rank_that_computes_is_waited_for_and_a_silent_one_is_not() -> None:
    group = RankGroup(3, 1)
    first = formed(group, "abc")
    assert group.join(1, candidate("a", attempt=2), 1) is None  # it has lost a connection
    now = 1.0
    while now < 3 * SILENT_S:
        now += 1
        assert "rank 0 of 3 has left it, and joins again" in heartbeat(group, now, first, "b")
        if now < SILENT_S:
            heartbeat(group, now, first, "c")
        assert group.join(now, candidate("a", attempt=2), 1) is None
    assert group.join(now, candidate("b", attempt=2), 1) is not None
    assert members(formed(group, "ab", now, attempt=2)) == "ab"


def test_a_silent_rank_ends_the_generation() -> None:
    group = RankGroup(2, 1)
    first = formed(group, "ab")
    assert heartbeat(group, SILENT_S / 2, first, "a") == ""
    assert heartbeat(group, SILENT_S + 1, first, "a") == "rank 1 of 2 has told the coordinator nothing for 8 s"
    assert members(formed(group, "a", SILENT_S + 1, generation=1, attempt=2)) == "a"


def test_a_new_process_takes_a_free_place_and_a_spare_one_waits() -> None:
    group = RankGroup(2, 1)
    first = formed(group, "ab")
    assert group.join(1, candidate("c")) is None
    assert group.waits_for == "a free place: generation 1 has all of its 2 ranks"
    assert heartbeat(group, 1, first, "a") == ""
    heartbeat(group, 2, first, "a", lost=1, reason="rank 1 has ended")
    assert members(formed(group, "a", 2, generation=1, attempt=2)) == "ac"
    alone = RankGroup(2, 1)
    pair = formed(alone, "ab")
    heartbeat(alone, 1, pair, "a", lost=1, reason="rank 1 has ended")
    rest = formed(alone, "a", 1, generation=1, attempt=2)
    assert alone.join(2, candidate("d")) is None
    assert heartbeat(alone, 2, rest, "a") == "another process joins"
    assert members(formed(alone, "a", 2, generation=2, attempt=3)) == "ad"


def test_too_few_survivors_wait_for_another_process() -> None:
    group = RankGroup(3, 2)
    first = formed(group, "abc")
    for name, rank in (("a", 2), ("a", 1)):
        heartbeat(group, 1, first, name, lost=rank, reason="they have ended")
    assert heartbeat(group, SILENT_S + 1, first, "a") == "they have ended"  # b is silent
    assert group.join(SILENT_S + 1, candidate("a", attempt=2), 1) is None
    assert group.waits_for == "2 processes or more"
    group.join(SILENT_S + 2, candidate("d"))
    assert members(formed(group, "a", SILENT_S + 2, attempt=2)) == "ad"


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    group = RankGroup(3, 1)
    first = formed(group, "abc")
    assert heartbeat(group, 1, first, "c", leaves=True) == "it has left"
    assert heartbeat(group, 1, first, "a") == ""
    group.join(2, candidate("b", attempt=2), 1)
    assert members(formed(group, "a", 2, generation=1, attempt=2)) == "ab"
    for name in "ab":
        heartbeat(group, 3, RankGeneration(2, (candidate("a"), candidate("b"))), name, leaves=True)
    assert group.is_empty


def test_after_a_restart_the_ranks_tell_their_generation() -> None:
    first = formed(RankGroup(3, 1), "abc")
    group = RankGroup(3, 1)
    running = RankGeneration(5, first.ranks)
    assert [heartbeat(group, 1, running, name) for name in "bac"] == ["", "", ""]
    heartbeat(group, 2, running, "a", lost=1, reason="rank 1 has ended")
    group.join(2, candidate("c", attempt=2), 5)
    assert group.join(2, candidate("a", attempt=2), 5) is None  # others may not have called yet
    later = SILENT_S + 2
    for name in "ac":
        group.join(later - 1, candidate(name, attempt=2), 5)
    assert group.join(later, candidate("a", attempt=2), 5) == RankGeneration(
        6, (candidate("a", attempt=2), candidate("c", attempt=2))
    )


@pytest.mark.parametrize("full", [True, False])
def test_after_a_restart_a_new_process_ends_no_generation_that_may_be_full(full: bool) -> None:
    first = formed(RankGroup(3, 1), "abc")
    group = RankGroup(3, 1)
    running = RankGeneration(5, first.ranks)
    assert heartbeat(group, 1, running, "a") == ""
    assert group.join(1, candidate("d")) is None  # b and c have not called yet
    names = "abc" if full else "ab"
    assert [heartbeat(group, 2, running, name) for name in names] == [""] * len(names)
    group.join(SILENT_S, candidate("d"))
    assert [heartbeat(group, SILENT_S, running, name) for name in names] == [""] * len(names)
    group.join(SILENT_S + 1, candidate("d"))
    told = "" if full else "another process joins"
    assert [heartbeat(group, SILENT_S + 1, running, name) for name in names] == [told] * len(names)


def test_after_a_restart_survivors_of_an_ended_generation_find_each_other() -> None:
    group = RankGroup(3, 1)
    assert group.join(0, candidate("c", 4), 7) is None
    assert group.join(1, candidate("a", 5), 7) is None
    for now in (4, 6):
        for name, progress in (("a", 5), ("c", 4)):
            group.join(now, candidate(name, progress), 7)
    assert group.join(SILENT_S, candidate("a", 5), 7) == RankGeneration(8, (candidate("c", 4), candidate("a", 5)))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_live_processes_are_together_soon(seed: int) -> None:
    """Processes that die, join and are accused at random: those that are left form one generation in bounded time."""
    draw, group, now = random.Random(seed), RankGroup(4, 1), 0.0
    places: dict[str, RankGeneration | None] = dict.fromkeys("abcd")
    attempts = dict.fromkeys("abcdefgh", 1)
    names = iter("efgh")

    def turn() -> None:
        for name, place in list(places.items()):
            if place is None:
                known = max((it.generation for it in places.values() if it), default=0)
                places[name] = group.join(now, candidate(name, attempt=attempts[name]), known)
            elif heartbeat(group, now, place, name):
                places[name], attempts[name] = None, attempts[name] + 1

    for _ in range(60):
        now += 1
        turn()
        if draw.random() < 0.1 and len(places) > 1:
            del places[draw.choice(list(places))]
        if draw.random() < 0.1 and (new := next(names, None)):
            places[new] = None
        living = [name for name, it in places.items() if it]
        if living and draw.random() < 0.1:
            name = draw.choice(living)
            place = places[name]
            assert place
            heartbeat(group, now, place, name, lost=draw.randrange(len(place.ranks)), reason="it seems so")
    for _ in range(int(3 * SILENT_S)):
        now += 1
        turn()
    together = {it for it in places.values() if it}
    assert len(together) == 1
    assert {it.process_id for it in together.pop().ranks} == {name for name, it in places.items() if it}
    assert sum(it is not None for it in places.values()) == min(4, len(places))


class TestRegistry:
    def test_a_group_is_forgotten_when_all_have_left(self) -> None:
        now = [0.0]
        registry = GroupRegistry(lambda: now[0])
        for number in range(catalogue.MAX_GROUPS.default):
            submitter = f"user-{number % 2}"
            assert registry.join(f"g{number}", candidate("a"), ranks=2, min_ranks=1, submitter=submitter)[0] is None
        with pytest.raises(errors.Overloaded, match="the limit MAX_GROUPS is 1000"):
            registry.join("one more", candidate("a"), ranks=2, min_ranks=1)
        now[0] = SILENT_S + 1
        made, waits_for = registry.join("one more", candidate("a"), ranks=1, min_ranks=1)
        assert made == RankGeneration(1, (candidate("a"),))
        assert waits_for == ""

    def test_a_submitter_has_a_share_of_the_groups(self) -> None:
        now = [0.0]
        registry = GroupRegistry(lambda: now[0])
        for number in range(catalogue.SUBMITTER_GROUPS.default):
            registry.join(f"g{number}", candidate("a"), ranks=2, min_ranks=1, submitter="ann")
        with pytest.raises(errors.Overloaded, match="ann has 500 groups of ranks; the limit SUBMITTER_GROUPS is 500"):
            registry.join("more", candidate("a"), ranks=2, min_ranks=1, submitter="ann")
        registry.join("more", candidate("a"), ranks=2, min_ranks=1, submitter="bob")
        now[0] = SILENT_S + 1
        registry.join("later", candidate("a"), ranks=2, min_ranks=1, submitter="ann")

    def test_a_group_has_one_submitter_and_one_size(self) -> None:
        registry = GroupRegistry(lambda: 0.0)
        registry.join("g", candidate("a"), ranks=2, min_ranks=1, submitter="ann")
        with pytest.raises(errors.Forbidden, match="ann has made group g"):
            registry.join("g", candidate("b"), ranks=2, min_ranks=1, submitter="bob")
        with pytest.raises(
            errors.BadRequest, match="this process wants 3 ranks, at least 1, but group g has 2, at least 1"
        ):
            registry.join("g", candidate("b"), ranks=3, min_ranks=1, submitter="ann")
        with pytest.raises(errors.BadRequest, match="wants 2 ranks, at least 2, but group g has 2, at least 1"):
            registry.join("g", candidate("b"), ranks=2, min_ranks=2, submitter="ann")
        for number in range(catalogue.GROUP_WAITING.default - 1):
            registry.join("h", candidate(str(number)), ranks=1000, min_ranks=1)
        registry.join("h", candidate("last"), ranks=1000, min_ranks=1)
        with pytest.raises(errors.Overloaded, match="the limit GROUP_WAITING is 512"):
            registry.join("h", candidate("one more"), ranks=1000, min_ranks=1)

    def test_a_run_after_the_end_of_all_processes_waits_for_all_again(self) -> None:
        now = [0.0]
        registry = GroupRegistry(lambda: now[0])
        for name in "ab":
            registry.join("g", candidate(name), ranks=2, min_ranks=1)
        now[0] = SILENT_S + 1  # both were killed
        assert registry.join("g", candidate("c"), ranks=3, min_ranks=1) == (None, "2 more of 3 processes")


def times(wait: float) -> RankTimes:
    return RankTimes(60.0, 50, 100, 0.5, wait, 1.0)


def test_the_status_has_the_times_of_the_ranks_and_names_the_straggler() -> None:
    group = RankGroup(3, 1, "ann")
    group.join(0, candidate("a"))
    waiting = group.status("train", members=True)
    assert (waiting.generation, waiting.size, waiting.waits_for) == (0, 0, "2 more of 3 processes")
    found = formed(group, "abc")
    assert group.status("train", members=True).members[2].times == RankTimes(), "it has told none yet"
    for name, wait in zip("abc", (9.0, 1.0, 8.0), strict=True):
        heartbeat(group, 1, found, name, times=times(wait))
    heartbeat(group, 1, found, "a")  # as the heartbeat that tells of a failure
    status = group.status("train", members=True)
    assert (status.name, status.submitter, status.generation, status.size) == ("train", "ann", 1, 3)
    assert (status.ranks, status.min_ranks, status.waits_for) == (3, 1, "")
    assert status.straggler == StragglerRank(1, 0.075)
    assert [(it.rank, it.address, it.times.wait) for it in status.members] == [
        (0, "host-a:1", 9.0),
        (1, "host-b:1", 1.0),
        (2, "host-c:1", 8.0),
    ]
    assert group.status("train", members=False).members == ()

    heartbeat(group, 2, found, "c", leaves=True)
    status = group.status("train", members=True)
    assert (status.straggler, [it.rank for it in status.members]) == (None, [0, 1]), "one has none any more"
    heartbeat(group, 2, found, "a", lost=1, reason="rank 1 of 3 has ended")
    status = group.status("train", members=True)
    assert (status.straggler, status.waits_for) == (None, "rank 0 (host-a:1)")
    second = formed(group, "a", 3, 1, attempt=2)
    assert group.status("train", members=True).members[0].times == RankTimes(), "those of another generation"
    heartbeat(group, 3, found, "b", times=times(1.0))
    assert group.status("train", members=True).members[0].times == RankTimes(), "nobody else counts as its rank"
    heartbeat(group, 3, second, "a", times=times(2.0))
    assert group.status("train", members=True).members[0].times == times(2.0)


def test_a_registry_lists_its_groups_and_some_of_their_ranks() -> None:
    now = [0.0]
    groups = GroupRegistry(lambda: now[0])
    for name in ("b", "a", "c"):
        for process in "xy":
            groups.join(name, candidate(process), ranks=2, min_ranks=1)
    assert [(it.name, it.size, len(it.members)) for it in groups.statuses()] == [("a", 2, 0), ("b", 2, 0), ("c", 2, 0)]
    assert [len(it.members) for it in groups.statuses(ranks=4)] == [2, 2, 0]
    assert len(groups.status("c").members) == 2
    with pytest.raises(errors.UnknownGroup, match=r"there is no elastic group 'd'; .* `shoal groups` lists all"):
        groups.status("d")
    now[0] += SILENT_S + 1
    assert groups.statuses() == []
    with pytest.raises(errors.UnknownGroup):
        groups.status("c")
