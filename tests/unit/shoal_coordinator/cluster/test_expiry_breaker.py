"""Circuit breaker of member expiry, with a fake clock: when silent members are declared lost, and when it waits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import errors
from shoal.status import Role
from shoal_coordinator.cluster.expiry_breaker import HOLD_TIMEOUTS, QUEUED_PART, SHARE_OF_AT_LEAST
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.messages import Registration, events
from support.clusters.cluster_rig import Rig
from support.run_lengths import draws

TIMEOUT_S, TICK_S = 5.0, 0.5


class Sea:
    """Members that send heartbeats until they fall silent, and a tick every half second."""

    def __init__(self, count: int) -> None:
        self.members = Membership(TIMEOUT_S)
        self.now = 0.0
        self.beating: dict[str, int] = {}
        self.add(Role.WORKER, count, "w")
        self.died: dict[str, float] = {}

    def add(self, role: Role, count: int, prefix: str, holder: str = "") -> None:
        """Registers members."""
        for name in (f"{prefix}{number:02}" for number in range(count)):
            registration = Registration(role, name, f"p-{name}", f"{name}:1", holder=holder)
            self.beating[name] = self.members.register(registration, self.now).incarnation

    def silence(self, count: int) -> set[str]:
        """Lets that many members fall silent."""
        silent = set(sorted(self.beating)[:count])
        for name in silent:
            del self.beating[name]
        return silent

    def run(self, seconds: float, *, wait_s: float = 0.0, refused: int = 0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += TICK_S
            for name, incarnation in self.beating.items():
                self.members.heartbeat(name, incarnation, 0, 0, self.now)
            self.members.breaker.heartbeats_delayed(wait_s, refused, self.now)
            for member in self.members.expire(self.now):
                self.died[member.id] = self.now


def test_a_death_is_declared_after_the_timeout() -> None:
    sea = Sea(20)
    silent = sea.silence(4)  # a fifth, and no more
    sea.run(TIMEOUT_S + 2 * TICK_S)
    assert sea.died.keys() == silent


def test_many_that_fall_silent_at_once_are_not_declared_lost_and_come_back() -> None:
    sea = Sea(20)
    everyone = dict(sea.beating)
    sea.silence(15)
    sea.run(2 * TIMEOUT_S)
    hold = sea.members.breaker.hold
    assert hold
    assert hold.why == "15 of 20 live members fell silent at once"
    assert hold.silent == 15
    sea.beating = everyone
    sea.run(2 * TIMEOUT_S)
    assert sea.died == {}
    assert sea.members.breaker.hold is None


def test_a_hold_ends_and_lost_members_are_declared_lost_then() -> None:
    sea = Sea(20)
    silent = sea.silence(15)
    sea.run((1 + HOLD_TIMEOUTS) * TIMEOUT_S)
    assert sea.died == {}
    sea.run(2 * TICK_S)
    assert sea.died.keys() == silent
    assert sea.members.breaker.hold is None


def test_members_that_fall_silent_one_after_the_other_within_a_timeout_count_as_at_once() -> None:
    sea = Sea(20)
    for _ in range(5):
        sea.silence(1)
        sea.run(TICK_S)
    sea.run(TIMEOUT_S)
    assert sea.died == {}
    assert sea.members.breaker.hold


def test_a_small_cluster_believes_its_eyes() -> None:
    sea = Sea(SHARE_OF_AT_LEAST - 1)
    silent = sea.silence(SHARE_OF_AT_LEAST - 2)
    sea.run(TIMEOUT_S + 2 * TICK_S)
    assert sea.died.keys() == silent


def test_silent_sessions_of_one_holder_delay_only_their_own_expiry() -> None:
    """ "a.." are the sessions of ann, which fall silent first."""
    sea = Sea(2)
    for holder in ("ann", "bob"):
        sea.add(Role.SESSION, 20, holder[0], holder)
    silent = sea.silence(20)
    assert all(name.startswith("a") for name in silent)
    lost = {"b00", "w00"}
    for name in lost:
        del sea.beating[name]
    sea.run(TIMEOUT_S + 2 * TICK_S)
    assert sea.died.keys() == lost
    hold = sea.members.breaker.hold
    assert hold
    assert (hold.silent, hold.why) == (20, "20 of 20 live sessions of ann fell silent at once")
    sea.run(HOLD_TIMEOUTS * TIMEOUT_S + 2 * TICK_S)
    assert sea.died.keys() == silent | lost
    assert sea.members.breaker.hold is None


@pytest.mark.parametrize(
    ("delays", "why"),
    [
        ({"refused": 3}, "3 heartbeats or registrations were refused"),
        ({"wait_s": 2.0}, "a heartbeat waited 2.0 s for a thread"),
    ],
)
def test_heartbeats_that_could_not_be_heard_are_no_deaths_for_a_while(delays: dict[str, float], why: str) -> None:
    sea = Sea(2)
    sea.silence(1)
    sea.run(2 * TIMEOUT_S, **delays)  # type: ignore[arg-type]  # each value fits its name
    assert sea.died == {}
    assert sea.members.breaker.hold
    assert sea.members.breaker.hold.why == why
    sea.run((HOLD_TIMEOUTS - 1) * TIMEOUT_S + 2 * TICK_S, **delays)  # type: ignore[arg-type]
    assert list(sea.died) == ["w00"]


def test_a_short_wait_is_no_doubt_and_an_old_one_is_none_either() -> None:
    sea = Sea(2)
    sea.run(TICK_S, refused=1)
    sea.silence(1)
    sea.run(TIMEOUT_S + 2 * TICK_S, wait_s=QUEUED_PART * TIMEOUT_S)
    assert list(sea.died) == ["w00"]


def test_a_process_that_registers_again_does_not_wait_for_a_hold() -> None:
    sea = Sea(20)
    sea.silence(15)
    sea.run(TIMEOUT_S + 2 * TICK_S)
    assert sea.members.breaker.hold
    with pytest.raises(errors.DuplicateMember):
        sea.members.register(Registration(Role.WORKER, "w00", "new"), sea.now)
    assert [member.id for member in sea.members.expire(sea.now, "w00")] == ["w00"]
    sea.members.register(Registration(Role.WORKER, "w00", "new"), sea.now)
    assert sea.members.expire(sea.now, "w19") == []  # alive and well


def test_a_server_that_does_not_answer_is_lost_at_once_unless_many_are_silent() -> None:
    sea = Sea(count=2 * SHARE_OF_AT_LEAST)
    sea.add(Role.SERVER, 3, "s")
    lives = dict(sea.beating)
    sea.silence(count=0)
    assert sea.members.lose_silent("s00", lives["s00"] + 1, sea.now, sea.now) is None, "another incarnation"
    assert sea.members.lose_silent("s00", lives["s00"], sea.now - 1.0, sea.now) is None, "a later heartbeat"
    lost = sea.members.lose_silent("s00", lives["s00"], sea.now, sea.now)
    assert lost
    assert not lost.alive
    assert sea.members.lose_silent("s01", lives["s01"], sea.now, sea.now) is None, "one within a heartbeat timeout"
    later = sea.now + TIMEOUT_S + 1.0  # all members are silent
    assert sea.members.lose_silent("s01", lives["s01"], later, later) is None
    sea.members.validate()


def test_the_machine_holds_and_says_so() -> None:
    rig = Rig().servers("s0").workers("w0")
    for _ in range(12):
        rig.now += TICK_S
        rig.beat("s0")
        assert rig.handle(events.TimePassed(refused_heartbeats=1)) == {}
    assert rig.machine.members.breaker.hold
    assert rig.machine.members.breaker.hold.silent == 1
    rig.workers("w0")  # another process of that name takes its place at once
    assert rig.handle(events.TimePassed()) == {"w0": Role.WORKER}
    assert rig.machine.members.breaker.hold is None


@settings(max_examples=draws(60))
@given(
    count=st.integers(1, 30),
    waves=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12)), max_size=8),
    delays=st.lists(st.sampled_from([(0.0, 0), (9.0, 0), (0.0, 2)]), min_size=1, max_size=8),
)
def test_every_death_is_declared_in_bounded_time_and_no_living_member_dies(
    count: int, waves: list[tuple[int, int]], delays: list[tuple[float, int]]
) -> None:
    sea = Sea(count)
    fell: dict[str, float] = {}
    for number, (fall, ticks) in enumerate(waves):
        fell |= dict.fromkeys(sea.silence(fall), sea.now)
        wait_s, refused = delays[number % len(delays)]
        sea.run(ticks * TICK_S, wait_s=wait_s, refused=refused)
    sea.run((1 + HOLD_TIMEOUTS) * TIMEOUT_S + 2 * TICK_S, refused=1)
    assert sea.died.keys() == fell.keys()
    for name, when in sea.died.items():
        took_s = when - fell[name]
        assert TIMEOUT_S < took_s <= (1 + HOLD_TIMEOUTS) * TIMEOUT_S + 2 * TICK_S
