"""Parts of the page: events for late watchers, HTTP statuses of errors, allowed hosts, rates, threads, addresses."""

import asyncio
import itertools
import json
import math
import socket
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import errors
from shoal._cli import cluster as cluster_commands
from shoal._cli.app import app
from shoal._limits import Limit
from shoal._role import flags
from shoal.events import EvaluationEnded, LogLine, MetricsReported, StateChanged
from shoal.status import Evaluation, JobState, MemberStatus, Progress, Role, ServerLoad
from shoal_coordinator.page.history import downsampled
from shoal_coordinator.page.rates import Rates, ServerRates
from shoal_coordinator.page.reader import EventPosition
from shoal_coordinator.page.responses import encode, status_of
from shoal_coordinator.page.server import rules_for
from shoal_coordinator.page.threads import BoundedThreadPool


def limit_of(requests: int) -> Limit:
    """A limit of requests, with those that wait."""
    return Limit(name="PAGE_REQUESTS", default=requests, unit="requests", of="the page", error=errors.Overloaded)


def reported(sequence: int, worker: str = "w0") -> MetricsReported:
    return MetricsReported(sequence, 0.0, worker, sequence, {"loss": 1.0}, Progress())


class TestThinned:
    def test_few_events_are_all_returned(self) -> None:
        events = [StateChanged(1, 0.0, JobState.RUNNING, ""), reported(2), LogLine(3, 0.0, "w0", "x")]
        assert downsampled(events) == events

    def test_metrics_are_thinned_evenly_and_every_workers_last_one_is_kept(self) -> None:
        events = [reported(number, f"w{number % 4}") for number in range(1, 4_001)]
        picked = downsampled(events, points=40)
        assert [event.sequence for event in picked] == sorted(event.sequence for event in picked)
        for worker in range(4):
            own = [it.sequence for it in picked if isinstance(it, MetricsReported) and it.worker == f"w{worker}"]
            assert len(own) == 10
            assert own[-1] > 3_996
            assert {b - a for a, b in itertools.pairwise(own)} == {400}

    def test_more_workers_than_points(self) -> None:
        events = [reported(number, f"w{number}") for number in range(1, 100)]
        assert downsampled(events, points=10) == events, "the last one of each"

    def test_evaluations_are_thinned_over_all_workers_together(self) -> None:
        events = [
            EvaluationEnded(number, 0.0, f"w{number % 2}", Evaluation(number, number, {}), False)
            for number in range(1, 101)
        ]
        assert [event.sequence for event in downsampled(events, points=5)] == [20, 40, 60, 80, 100]

    def test_of_lines_the_latest(self) -> None:
        events = [LogLine(number, 0.0, "w0", "x") for number in range(1, 101)]
        assert [event.sequence for event in downsampled(events, latest=2)] == [99, 100]


@pytest.mark.parametrize("kind", errors.ShoalError.catalogue.values(), ids=lambda kind: kind.__name__)
def test_every_error_has_an_http_status(kind: type[errors.ShoalError]) -> None:
    assert 400 <= status_of(kind("x")) <= 504


def test_values_that_json_lacks_become_null() -> None:
    record = {"a": [math.nan, (1.0, math.inf)], "b": "\u2028\ud800", "c": -math.inf}
    text = encode(record)
    assert json.loads(text) == {"a": [None, [1.0, None]], "b": "\u2028\ud800", "c": None}
    assert text.isascii()


@pytest.mark.parametrize("mark", [EventPosition(), EventPosition(12, 5), EventPosition(10**15, 10**9)])
def test_a_mark_comes_back(mark: EventPosition) -> None:
    assert EventPosition.parse(str(mark)) == mark


class TestRules:
    def test_on_loopback_only_loopback(self) -> None:
        rules = rules_for("127.0.0.1", ["watch.example"])
        for host in ("localhost", "a.localhost", "127.0.0.1", "127.9.9.9", "[::1]", "watch.example"):
            assert rules.knows(host), host
        for host in (
            "10.0.0.1",
            "localhost.evil.example",
            "evil.example",
            "127.0.0.1.nip.io",
            "",
            "0.0.0.0",
            "[fe80::1]",
        ):
            assert not rules.knows(host), host

    def test_elsewhere_any_address_and_the_name_listened_at(self) -> None:
        for rules in (rules_for("0.0.0.0"), rules_for("10.0.0.1"), rules_for("[::]")):
            assert rules.knows("10.0.0.1")
            assert rules.knows("[2001:db8::1]")
            assert not rules.knows("evil.example")
        assert rules_for("coordinator").knows("coordinator")

    def test_the_case_and_the_port_of_a_host_do_not_matter(self) -> None:
        rules = rules_for("127.0.0.1")
        for host in ("LOCALHOST:80", "localhost.:80", "[::1]:80"):
            rules.check("GET", "/", {"host": host})
        with pytest.raises(errors.Forbidden, match="--page-host"):
            rules.check("GET", "/", {"host": "evil.example:80"})

    @pytest.mark.parametrize("name", ["watch.example:7080", "http://watch.example", "::1", "a.example/x", "a.example."])
    def test_hosts_that_never_match_are_refused(self, name: str) -> None:
        with pytest.raises(errors.BadRequest, match="names without http:// and port"):
            rules_for("127.0.0.1", [name])

    def test_addresses_are_names_too(self) -> None:
        assert rules_for("127.0.0.1", ["[2001:db8::1]", "10.0.0.1"]).knows("[2001:db8::1]")


def server(
    name: str = "s0", updates: int = 0, silent_s: float = 0.0, incarnation: int = 1, **fields: Any
) -> MemberStatus:
    load = ServerLoad(updates, 100 * updates, 10 * updates, 0)
    fields = {"alive": True, "role": Role.SERVER, **fields}
    return MemberStatus(
        member=name,
        incarnation=incarnation,
        address="",
        device="",
        metrics_address="",
        silent_s=silent_s,
        shards=1,
        bytes=0,
        job="",
        load=load,
        **fields,
    )


class TestRates:
    def test_of_two_heartbeats_a_second_apart(self) -> None:
        rates = Rates()
        assert rates.update([server(updates=5)], 100.0) == {}
        assert rates.update([server(updates=9, silent_s=0.5)], 101.0) == {}, "half a second says little"
        found = rates.update([server(updates=25, silent_s=0.5)], 102.5)
        assert found == {"s0": ServerRates(10.0, 1000.0, 100.0)}
        assert rates.update([server(updates=30)], 102.5) == found, "as before, until there is enough"

    def test_they_fall_to_0_when_the_load_ends(self) -> None:
        rates = Rates()
        for now, updates in ((0.0, 0), (1.0, 50)):
            found = rates.update([server(updates=updates)], now)
        assert found["s0"].updates == 50
        assert rates.update([server(updates=50)], 2.0) == {"s0": ServerRates(0.0, 0.0, 0.0)}

    @pytest.mark.parametrize(
        "later",
        [
            {"incarnation": 2, "updates": 70},
            {"updates": 20},
            {"alive": False, "updates": 50},
            {"updates": 60, "silent_s": -10.0},
        ],
        ids=["another life", "counts again", "dead", "nobody looked for long"],
    )
    def test_no_rate_without_two_comparable_heartbeats(self, later: Mapping[str, Any]) -> None:
        rates = Rates()
        for now, updates in ((0.0, 0), (1.0, 50)):
            rates.update([server(updates=updates)], now)
        assert rates.update([server(**later)], 2.0) == {}

    def test_of_servers_alone_and_only_of_those_that_are_there(self) -> None:
        rates = Rates()
        there = [server("s0", 1), server("s1", 1), server("w0", 1, role=Role.WORKER)]
        rates.update(there, 0.0)
        assert set(rates.update(there, 1.0)) == {"s0", "s1"}
        assert set(rates.update(there[:1], 1.1)) == {"s0"}
        assert set(rates.update(there, 1.2)) == {"s0"}, "who comes back begins again"


class TestThreads:
    def test_a_call_that_hangs_times_out_and_keeps_its_thread(self) -> None:
        hangs, began = threading.Event(), threading.Event()

        def hang() -> None:
            began.set()
            hangs.wait(20)

        async def check() -> None:
            threads = BoundedThreadPool("the folder", most=1, limit=limit_of(2), timeout_s=0.1)
            for _ in range(2):
                with pytest.raises(errors.DeadlineExceeded, match=r"the folder did not answer within 0\.1 s"):
                    await threads.run(hang)
            assert began.is_set()
            count = sum(thread.name == "page call" for thread in threading.enumerate())
            assert count == 1, "the second one has had no thread"
            hangs.set()
            patient = BoundedThreadPool("the folder", most=1, limit=limit_of(2), timeout_s=20)
            assert await patient.run(lambda: 7) == 7

        asyncio.run(check())

    def test_a_thread_that_came_back_is_there_for_the_next(self) -> None:
        async def check() -> None:
            threads = BoundedThreadPool("the folder", most=1, limit=limit_of(11), timeout_s=20)
            assert await asyncio.gather(*(threads.run(lambda it: it + 1, number) for number in range(10))) == [
                *range(1, 11)
            ]
            with pytest.raises(ZeroDivisionError):
                await threads.run(lambda: 1 / 0)
            assert await threads.run(lambda: 7) == 7

        asyncio.run(check())

    def test_too_many_wait(self) -> None:
        hangs = threading.Event()

        async def check() -> None:
            threads = BoundedThreadPool("the folder", most=1, limit=limit_of(2), timeout_s=20)
            waiting = [asyncio.create_task(threads.run(hangs.wait, 20)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(
                errors.Overloaded, match=r"2 requests wait for the folder; the limit PAGE_REQUESTS is 2"
            ):
                await threads.run(lambda: 7)
            hangs.set()
            assert await asyncio.gather(*waiting) == [True, True]

        asyncio.run(check())


class TestWhereItListens:
    def test_an_empty_variable_turns_the_page_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SHOAL_PAGE_LISTEN", "")
        assert flags.page_listen(None) == ""
        for given in ("127.0.0.1:1", flags.DEFAULT_PAGE):
            assert flags.page_listen(given) == given, "a flag wins over its variable"
        monkeypatch.delenv("SHOAL_PAGE_LISTEN")
        assert flags.page_listen(None) == flags.DEFAULT_PAGE

    def test_a_cluster_on_this_machine_checks_the_page_port_only_if_it_was_given(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the default port is in use, the coordinator takes another one."""
        asked: list[object] = []
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            monkeypatch.setattr(flags, "DEFAULT_PAGE", address)
            monkeypatch.delenv("SHOAL_PAGE_LISTEN", raising=False)

            class NoCluster:
                def __init__(self, *_counts: int, **options: Any) -> None:
                    asked.append(options["page_listen"])
                    raise KeyboardInterrupt

            monkeypatch.setattr(cluster_commands, "LocalCluster", NoCluster)
            refused = CliRunner().invoke(app, ["up", "--listen", "127.0.0.1:0", "--page-listen", address])
            assert refused.exit_code == 3
            assert "with --page-listen" in refused.stderr
            assert asked == []
            CliRunner().invoke(app, ["up", "--listen", "127.0.0.1:0"])
            assert asked == [address]

    @pytest.mark.parametrize(
        ("said", "told"),
        [
            (["--page-listen", ""], []),
            ([], ["--page-or-any"]),
            (["--page-host", "a.example,b.example"], ["--page-host", "a.example,b.example", "--page-or-any"]),
            (["--page-listen", "", "--page-read-only"], ["--page-read-only"]),
        ],
    )
    def test_a_local_cluster_passes_on_the_page_options(
        self, monkeypatch: pytest.MonkeyPatch, said: list[str], told: list[str]
    ) -> None:
        made: list[dict[str, object]] = []

        class NoCluster:
            def __init__(self, *_counts: int, **options: Any) -> None:
                made.append(options)

            def __enter__(self) -> None:
                raise KeyboardInterrupt

            def __exit__(self, *_: object) -> None:
                pass

        monkeypatch.delenv("SHOAL_PAGE_LISTEN", raising=False)
        monkeypatch.setattr(cluster_commands, "LocalCluster", NoCluster)
        result = CliRunner().invoke(app, ["up", "--listen", "127.0.0.1:0", *said], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        assert made[0]["flags"] == {"coordinator": told}
