"""Ranks that meet: those that do not come, are not who they say, or belong to another group."""

import threading

import numpy as np
import pytest

from shoal import errors
from shoal._transport import TokenSecurity
from shoal_distribute.collectives import Group
from support.ranks import SECURITY, addresses, sockets


def test_a_rank_that_does_not_come_is_named() -> None:
    listening = sockets(3)
    at = addresses(listening)
    listening[2].close()
    listening[1].close()
    with pytest.raises(errors.RankLost, match=rf"rank 1 at {at[1]} did not answer"):
        Group.open(0, at, security=SECURITY, listening=listening[0], within_s=0.2)


def test_a_person_is_told_which_ranks_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shoal._system.waits.NOTICE_AFTER_S", 0.05)
    monkeypatch.setattr("shoal._system.waits.LOOK_S", 0.02)
    listening = sockets(2)
    at = addresses(listening)
    listening[1].close()
    with pytest.raises(errors.RankLost):
        Group.open(0, at, security=SECURITY, listening=listening[0], within_s=0.3)
    assert f"rank 0 of 2 waits for rank 1 ({at[1]})" in caplog.text


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(errors.BadRequest, match="rank 3 of 2 ranks"):
        Group.open(3, ["127.0.0.1:1", "127.0.0.1:2"], security=SECURITY)


@pytest.mark.parametrize("other", ["generation", "token"])
def test_a_rank_of_another_group_is_refused(other: str) -> None:
    listening = sockets(2)
    at = addresses(listening)
    found: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        security = TokenSecurity(b"another") if other == "token" and rank else SECURITY
        generation = 7 if other == "generation" and rank else 0
        try:
            with Group.open(
                rank, at, security=security, listening=listening[rank], generation=generation, within_s=5.0
            ) as group:
                group.all_reduce(np.zeros(3))
        except errors.ShoalError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found.keys() == {0, 1}
    wanted = errors.RanksDisagree if other == "generation" else errors.Unauthenticated
    assert any(isinstance(it, wanted) for it in found.values()), found
