"""Ranks that meet: those that do not come, are not who they say, or belong to another group."""

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal._transport import TokenSecurity
from shoal._transport.connection import ByteStream
from shoal._wire import Buffer
from shoal_distribute.collectives import Group
from shoal_distribute.collectives.watch import Watch
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


def test_a_rank_that_stops_before_its_first_heartbeat_is_lost_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    start, lost, said = Watch.start, threading.Event(), list[str]()

    def start_late(watch: Watch) -> None:
        assert watch.rank == 0 or lost.wait(30)
        start(watch)

    monkeypatch.setattr(Watch, "start", start_late)
    listening = sockets(2)
    at = addresses(listening)

    def run(rank: int) -> None:
        with Group.open(
            rank, at, security=SECURITY, listening=listening[rank], within_s=1.0, silent_s=0.2, share=False
        ) as group:
            try:
                group.barrier()
            except errors.RankLost as error:
                said.append(error.message)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(10)
    found = list(said)
    lost.set()
    for thread in threads:
        thread.join(30)
    assert [it.split(" for ")[0] for it in found] == ["rank 1 of 2 has sent no heartbeat"]


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


class SlowStream:
    """A socket that sends so slowly that a second thread, if there is one, sends at the same time."""

    def __init__(self, connection: ByteStream, clashes: list[str]) -> None:
        self._connection, self._clashes = connection, clashes
        self._sending, self._second = threading.Lock(), threading.Event()

    def sendmsg(self, buffers: Iterable[Buffer], /) -> int:
        if not self._sending.acquire(blocking=False):
            self._clashes.append(threading.current_thread().name)
            self._second.set()
            return self._connection.sendmsg(buffers)
        try:
            self._second.wait(0.02)
            return self._connection.sendmsg(buffers)
        finally:
            self._sending.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_one_thread_at_a_time_sends_on_a_connection() -> None:
    """An encrypted connection breaks if two threads use it."""
    listening, clashes = sockets(2), list[str]()
    at = addresses(listening)

    class Slow(TokenSecurity):
        def protect(self, stream: ByteStream, peer: str, *, accepted: bool) -> ByteStream:
            return SlowStream(stream, clashes) if accepted else stream

    def run(rank: int) -> None:
        with Group.open(rank, at, security=Slow(b"a token"), listening=listening[rank], share=False) as group:
            group.barrier()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not clashes
