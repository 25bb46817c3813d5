"""The coordinator's page over HTTP on loopback: its contents, its event streams, and the requests that it refuses."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import prometheus_client
import pytest
from structlog.testing import capture_logs

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import Manifest
from shoal._display import records
from shoal._limits import refusals
from shoal.checkpoints import Checkpoint, Checkpoints
from shoal.status import JobStatus, StepTiming
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import group_pb2
from shoal_coordinator.job import JobMachine
from shoal_coordinator.page.app import STATIC
from shoal_coordinator.page.reader import EventPosition, JobUpdate, Reader
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from support.clusters.coordinator_rig import Rig, job
from support.waiting import wait_until

HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>\u2028'
ACTION = {"sec-fetch-site": "same-origin", "x-shoal-page": "1"}
WATCHERS = 2


@contextmanager
def running(**options: Any) -> Iterator[Rig]:
    rig = Rig(page_listen="127.0.0.1:0", max_page_watchers=WATCHERS, **options)
    try:
        for name in ("w0", "w1"):
            rig.register(members.WORKER, name, device="cpu")
        yield rig
    finally:
        rig.stop()


def test_a_page_whose_port_was_taken_meanwhile_takes_another_one() -> None:
    """As by a second `shoal up`, after both have found the port free."""
    with running() as first:
        taken = first.process.page.removeprefix("http://")
        second = Rig(page_listen=taken, page_or_any=True)
        try:
            assert second.process.page != first.process.page
            assert httpx.get(second.process.page, timeout=10).status_code == 200
        finally:
            second.stop()
        with pytest.raises(errors.PortInUse, match=f"cannot serve the page: cannot listen on {taken}"):
            Rig(page_listen=taken)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with running() as rig:
        yield rig


@pytest.fixture(scope="module")
def page(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.process.page, timeout=10) as page:
        yield page


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Rig, httpx.Client]]:
    """Yields a page for one test alone, of a cluster with a folder of checkpoints."""
    (tmp_path / "checkpoints").mkdir()
    with (
        running(checkpoints=str(tmp_path / "checkpoints")) as rig,
        httpx.Client(base_url=rig.process.page, timeout=10) as page,
    ):
        yield rig, page


@pytest.fixture(scope="module")
def trained(rig: Rig) -> str:
    """Returns the name of a running job that has metrics, staleness and log lines."""
    rig.run(job("trained", workers=1, settings={"hidden": 8}), "w0")
    rig.job("Lease", job="trained", worker="w0")
    report(rig, "trained", step=1, values={"loss": 0.5}, staleness={0: 2, 3: 1}, log=["hello", HOSTILE])
    return "trained"


def connected(rig: Rig) -> socket.socket:
    host, port = rig.process.page.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    raw.settimeout(10)
    return raw


def report(rig: Rig, name: str, *, step: int, worker: str = "w0", **fields: Any) -> None:
    rig.job("Report", job=name, worker=worker, step=step, accepted=step, samples=8 * step, **fields)


JsonField = tuple[str, str, Any]  # kind, id, data


def told(response: httpx.Response) -> Iterator[JsonField]:
    """Yields the events of a stream."""
    kind = mark = text = ""
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        match name:
            case "event":
                kind = value
            case "id":
                mark = value
            case "data":
                text = value
            case "" if text:
                yield kind, mark, json.loads(text)
                kind = mark = text = ""


def until(stream: Iterator[JsonField], wanted: str) -> list[JsonField]:
    """Reads events up to the first one of a kind."""
    found = []
    for event in stream:
        found.append(event)
        if event[0] == wanted:
            return found
    raise AssertionError(f"the stream ended without {wanted}: {found}")


def events_in(stream: list[JsonField]) -> list[dict[str, Any]]:
    return [event for kind, _, data in stream if kind == "events" for event in data]


class TestWhatItSays:
    def test_the_cluster(self, page: httpx.Client) -> None:
        cluster = page.get("/api/cluster").json()
        by_name = {member["member"]: member for member in cluster["members"]}
        assert {"s0", "s1", "w0", "w1"} <= set(by_name)
        assert by_name["w0"]["device"] == "cpu"
        assert by_name["s0"]["load"]["updates"] == 0
        assert (cluster["heartbeat_interval_s"], cluster["read_only"]) == (0.1, False)

    def test_an_ended_job_as_the_command_line_does(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.run(job("over", workers=1), "w0")
        rig.job("Lease", job="over", worker="w0")
        report(rig, "over", step=1, worker="w0", values={"loss": 0.5})
        rig.job("Cancel", job="over")
        status = JobStatus.from_proto(rig.job("Get", job="over").status)
        found = page.get("/api/jobs/over").json()
        assert found["progress"] == records.progress(status.progress)
        assert (found["progress"]["ended"], found["progress"]["seconds_left"]) == (True, 0)
        [listed] = [each for each in page.get("/api/jobs").json()["jobs"] if each["name"] == "over"]
        assert listed["progress"] == found["progress"]

    def test_jobs(self, page: httpx.Client, trained: str) -> None:
        [found] = [job for job in page.get("/api/jobs").json()["jobs"] if job["name"] == trained]
        one = page.get(f"/api/jobs/{trained}").json()
        assert {"label": "Optimizer", "value": "sgd"} in one.pop("specification"), "which the page of one job shows"
        assert (found["state"], one.pop("settings")) == ("running", {"hidden": 8})
        assert found == {**one, "progress": found["progress"]}, "all but the settings"

    def test_a_page_token_that_is_not_one(self, page: httpx.Client) -> None:
        for path in ("/api/jobs", "/api/cluster"):
            assert page.get(path).json()["next_page_token"] == ""
            refused = page.get(path, params={"page_token": "nonsense"})
            assert (refused.status_code, refused.json()["code"]) == (400, "BAD_REQUEST")

    def test_data(self, page: httpx.Client, trained: str) -> None:
        data = page.get(f"/api/jobs/{trained}/data").json()
        assert (data["name"], data["samples"], data["held"][0]["worker"]) == (trained, 64, "w0")
        assert data["in_progress"][0]["leased"] == data["total"]["leased"] > 0

    def test_timings(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.run(job("timed", workers=1), "w0")
        timing = StepTiming(7, 1.5, compute=0.25)
        report(rig, "timed", step=1, timings=[timing.to_proto()], staleness={0: 2, 3: 1})
        timings = page.get("/api/jobs/timed/timings").json()
        [worker] = timings["workers"]
        [step] = worker["steps"]
        assert worker["worker"] == "w0"
        assert (step["step"], step["began"], step["compute"], step["pull"], step["own"]) == (7, 1.5, 0.25, 0.0, 0.25)
        assert timings["staleness"] == {"0": 2, "3": 1}

    def test_elastic_groups(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        assert page.get("/api/groups").json() == {"groups": []}
        own: dict[str, Any] = {"group": "g", "process_id": "p", "address": "h:1", "ranks": 1, "min_ranks": 1}
        rig.client.call(rig.client.groups.Join, group_pb2.JoinGroupRequest(**own))
        stage = group_pb2.StageTimes(stage=1, stages=2, micro_batches=4, seconds=50.0, wait=5.0)
        times = group_pb2.RankTimes(seconds=60.0, wait=9.0, stage=stage)
        beat = group_pb2.HeartbeatGroupRequest(**own, generation=1, size=1, lost_rank=-1, times=times)
        rig.client.call(rig.client.groups.Heartbeat, beat)
        [group] = page.get("/api/groups").json()["groups"]
        assert (group["name"], group["generation"], group["straggler"]) == ("g", 1, None)
        assert [(it["address"], it["wait"], it["bubble"]) for it in group["ranks"]] == [("h:1", 9.0, 0.1)]
        assert group["bubble"] == {"measured": 0.1, "stages": 2, "micro_batches": 4, "ideal": 0.2}

    def test_staleness_as_the_coordinator_counts_it(self, page: httpx.Client, trained: str) -> None:
        assert page.get(f"/api/jobs/{trained}/timings").json()["staleness"] == {"0": 2, "3": 1}

    def test_checkpoints_newest_first_with_the_best_and_the_damaged(
        self, alone: tuple[Rig, httpx.Client], tmp_path: Path
    ) -> None:
        rig, page = alone
        rig.submit(job("a", workers=1))
        catalogue = Catalogue(LocalStorage(tmp_path / "checkpoints"))
        for number in (1, 2):
            evaluation = {"values": {"accuracy": 0.5}} if number == 1 else {}
            catalogue.publish(
                Manifest("a", number, 12.0, 10 * number, 5, spec={}, variables=(), files=(), evaluation=evaluation)
            )
        (tmp_path / "checkpoints" / "a" / "00000003").mkdir()
        (tmp_path / "checkpoints" / "a" / "00000003" / "manifest.json").write_text("{")
        answer = page.get("/api/jobs/a/checkpoints").json()
        damaged, second, first = answer["checkpoints"]
        assert damaged["error"]["code"] == "CORRUPT_CHECKPOINT"
        assert (second["number"], second["step"], second["created_at"], second["evaluation"]) == (2, 20, 12.0, None)
        assert first["evaluation"]["values"] == {"accuracy": 0.5}
        listed = [it for it in Checkpoints(tmp_path / "checkpoints").list("a") if isinstance(it, Checkpoint)]
        told = [records.stored_checkpoint(it, variables=False) for it in listed]
        assert told == [second, first], "as the command line says it, but for the variables"
        assert answer["folder"].endswith("checkpoints")

    def test_a_cluster_without_a_folder_has_no_checkpoints(self, page: httpx.Client, trained: str) -> None:
        answer = page.get(f"/api/jobs/{trained}/checkpoints").json()
        assert answer == {"name": trained, "folder": "", "checkpoints": []}

    def test_health(self, page: httpx.Client) -> None:
        answer = page.get("/healthz")
        assert (answer.status_code, answer.text) == (200, "ok\n")

    def test_a_loss_that_is_no_number_is_null(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.run(job("a", workers=1), "w0")
        report(rig, "a", step=1, values={"loss": float("nan")})
        assert page.get("/api/jobs/a").json()["progress"]["loss"] is None

    def test_unknown_jobs(self, page: httpx.Client) -> None:
        for what in ("", "/data", "/timings", "/checkpoints", "/events"):
            answer = page.get(f"/api/jobs/nobody{what}")
            assert (answer.status_code, answer.json()["code"]) == (404, "UNKNOWN_JOB")
            assert "nobody" in answer.json()["message"]
        answer = page.get("/jobs/nobody")
        assert answer.status_code == 404, "the page is told that there is none"
        assert "app.js" in answer.text, "and shows it"

    def test_pages_of_jobs_and_of_nothing(self, page: httpx.Client, trained: str) -> None:
        assert page.get(f"/jobs/{trained}").status_code == page.get("/").status_code == 200
        assert "app.js" in page.get("/no/such").text
        assert page.get("/api/no/such").json()["code"] == "NOT_FOUND"
        assert page.get(f"/api/jobs/{trained}/cancel").status_code == 405, "nothing changes by GET"

    def test_every_file_of_the_page(self, page: httpx.Client) -> None:
        files = [path for path in STATIC.rglob("*") if path.suffix in {".js", ".css", ".svg"}]
        assert len(files) > 15
        for path in files:
            answer = page.get(f"/static/{path.relative_to(STATIC)}")
            assert answer.status_code == 200
            kind = {".js": "javascript", ".css": "text/css", ".svg": "image/svg"}[path.suffix]
            assert kind in answer.headers["content-type"], "nosniff has browsers refuse others"

    @pytest.mark.parametrize(
        "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"]
    )
    def test_files_elsewhere_are_not_shown(self, rig: Rig, path: str) -> None:
        """The paths are sent as written here. A client library would resolve `..` first."""
        with connected(rig) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: raw.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 404 "), answer
        assert b"make_app" not in answer
        assert b"root:" not in answer

    def test_a_folder_that_hangs_is_said_in_time(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        hangs = threading.Event()
        monkeypatch.setattr("shoal_coordinator.page.app.ANSWER_S", 0.5)
        monkeypatch.setattr(Catalogue, "numbers", lambda self, name: hangs.wait(20) and [])
        with running(checkpoints=str(tmp_path)) as rig:
            rig.submit(job("a"))
            try:
                answer = httpx.get(f"{rig.process.page}/api/jobs/a/checkpoints", timeout=10)
                assert httpx.get(f"{rig.process.page}/api/cluster", timeout=10).status_code == 200
            finally:
                hangs.set()
        assert (answer.status_code, answer.json()["code"]) == (504, "DEADLINE_EXCEEDED")
        assert "the checkpoint storage did not answer" in answer.json()["message"]

    def test_defect_is_reported_and_logged(
        self, page: httpx.Client, trained: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(JobMachine, "data", lambda self: 1 / 0)
        with capture_logs() as logs:
            answer = page.get(f"/api/jobs/{trained}/data")
        assert (answer.status_code, answer.json()["code"]) == (500, "INTERNAL")
        assert "division" not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
        [logged] = [it for it in logs if it["log_level"] == "error"]
        assert logged["path"].endswith("/data")
        assert isinstance(logged["exc_info"], ZeroDivisionError)

    def test_counts_are_of_all_though_few_are_shown(
        self, alone: tuple[Rig, httpx.Client], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, _ = alone
        for name in ("MAX_JOBS", "MAX_MEMBERS"):
            monkeypatch.setattr(f"shoal_coordinator.page.reader.{name}", 1)
        rig.run(job("a", workers=1), "w0")
        rig.submit(job("b", workers=9))
        rig.submit(job("c"))
        rig.job("Cancel", job="c")
        overview = json.loads(Reader(rig.process.coordinator, None, {}).overview().text)
        assert (len(overview["jobs"]), len(overview["cluster"]["members"])) == (1, 1)
        assert overview["cluster"]["counts"] == {
            "members": 4,
            "members_by_state": {"server": {"alive": 2}, "worker": {"alive": 2}},
            "jobs": 3,
            "jobs_by_state": {"cancelled": 1, "pending": 1, "running": 1},
        }


class TestStreams:
    def test_the_cluster_as_it_changes(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        with page.stream("GET", "/api/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            stream = told(response)
            _, _, first = next(stream)
            assert first["jobs"] == []
            assert all(member["alive"] for member in first["cluster"]["members"])
            rig.submit(job("a"))
            while not (now := next(stream)[2])["jobs"]:
                pass
            assert now["jobs"][0]["name"] == "a"
            rig.silent.add("w1")
            states: list[str] = []
            while (w1 := {it["member"]: it for it in next(stream)[2]["cluster"]["members"]}["w1"])["alive"]:
                states.append(w1["state"])
            assert states[-1] == "late", "that it is silent is news before it is declared lost"
            assert w1["state"] == "lost"

    def test_unchanged_cluster_is_sent_once(self, alone: tuple[Rig, httpx.Client]) -> None:
        reader = Reader(alone[0].process.coordinator, None, {})
        wait_until(lambda: b'"rates":{' in reader.overview().text, what="two heartbeats a second apart")
        assert reader.overview().key == reader.overview().key

    def test_rates_fall_to_0_when_the_load_ends(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone

        def rates() -> dict[str, float] | None:
            found: dict[str, float] | None = {it["member"]: it for it in next(stream)[2]["cluster"]["members"]}["s0"][
                "rates"
            ]
            return found

        with page.stream("GET", "/api/events") as response:
            stream = told(response)
            while not (rates() or {}).get("updates"):
                rig.updates += 100
            while found := rates():
                if not any(found.values()):
                    break

    def test_unchanged_job_is_sent_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is sent once although the times of its workers' last heartbeats change."""
        monkeypatch.setattr("shoal._display.records.LATE_BY_CHANCE_S", 60.0)  # a busy machine is no news here
        looks: list[None] = []
        look = Reader.overview

        def counted(reader: Reader) -> Any:
            looks.append(None)
            return look(reader)

        monkeypatch.setattr(Reader, "overview", counted)
        with running() as rig:
            rig.run(job("a", workers=1), "w0")
            with httpx.stream("GET", f"{rig.process.page}/api/jobs/a/events", timeout=10) as response:
                stream = told(response)
                until(stream, "job")
                seen = len(looks)
                wait_until(lambda: len(looks) >= seen + 3, what="three more looks at the cluster")
                report(rig, "a", step=1, log=["hello"])
                assert [kind for kind, _, _ in until(stream, "events")] == ["events"]

    def test_a_job_from_its_beginning_to_its_end(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.run(job("a", workers=1), "w0")
        report(rig, "a", step=1, values={"loss": 0.5}, log=[HOSTILE])
        with page.stream("GET", "/api/jobs/a/events") as response:
            stream = told(response)
            begun = until(stream, "job")
            assert begun[0] == ("begin", "", {"fresh": True})
            kinds = [event["event"] for event in events_in(begun)]
            assert {"state", "metrics", "log"} <= set(kinds)
            assert [it["text"] for it in events_in(begun) if it["event"] == "log"] == [HOSTILE]
            assert begun[-1][2]["job"]["state"] == "running"
            assert [worker["member"] for worker in begun[-1][2]["workers"]] == ["w0"]
            report(rig, "a", step=2, values={"loss": 0.25})
            [metrics] = events_in(until(stream, "events"))
            assert (metrics["worker"], metrics["step"], metrics["values"]) == ("w0", 2, {"loss": 0.25})
            rig.job("Cancel", job="a")
            assert until(stream, "end")[-2][2]["job"]["state"] == "cancelled"
            assert list(stream) == []

    def test_it_goes_on_where_it_was(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.run(job("a", workers=1), "w0")
        report(rig, "a", step=1, values={"loss": 0.5})
        with page.stream("GET", "/api/jobs/a/events") as response:
            mark = until(told(response), "events")[-1][1]
        report(rig, "a", step=2, values={"loss": 0.25})
        with page.stream("GET", "/api/jobs/a/events", headers={"last-event-id": mark}) as response:
            again = until(told(response), "job")
        assert again[0][2] == {"fresh": False}
        assert [event["step"] for event in events_in(again)] == [2], "each event once"

    @pytest.mark.parametrize("mark", ["1-5", "x", "9" * 99, "7"], ids=["another job's", "text", "long", "short"])
    def test_foreign_event_position_gets_all_events(self, alone: tuple[Rig, httpx.Client], mark: str) -> None:
        rig, page = alone
        rig.submit(job("a"))
        with page.stream("GET", "/api/jobs/a/events", headers={"last-event-id": mark}) as response:
            begun = until(told(response), "events")
        assert begun[0][2] == {"fresh": True}
        assert events_in(begun)[0]["sequence"] == 1

    def test_defect_ends_a_stream_and_is_reported(
        self, alone: tuple[Rig, httpx.Client], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig, page = alone
        rig.submit(job("a"))
        with capture_logs() as logs, page.stream("GET", "/api/jobs/a/events") as response:
            stream = told(response)
            until(stream, "job")
            monkeypatch.setattr("shoal_coordinator.page.reader.downsampled", lambda events: 1 / 0)
            failure = until(stream, "failure")[-1][2]
        assert failure["code"] == "INTERNAL"
        assert "division" not in failure["message"]
        assert [it["event"] for it in logs if it["log_level"] == "error"] == ["a stream of the page has failed"]

    def test_a_job_that_is_dropped_meanwhile(
        self, alone: tuple[Rig, httpx.Client], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The stream looks for changes only after the job was cancelled and dropped."""
        rig, page = alone
        rig.submit(job("a"))
        update, dropped, looks = Reader.update, threading.Event(), []

        def waits(reader: Reader, name: str, mark: EventPosition) -> JobUpdate:
            looks.append(name)
            if len(looks) > 1:
                assert dropped.wait(10)
            return update(reader, name, mark)

        monkeypatch.setattr(Reader, "update", waits)
        with page.stream("GET", "/api/jobs/a/events") as response:
            stream = told(response)
            until(stream, "job")
            rig.job("Cancel", job="a")
            rig.job("Drop", job="a")
            dropped.set()
            assert until(stream, "failure")[-1][2]["code"] == "UNKNOWN_JOB"

    def test_number_of_watchers_is_limited(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.submit(job("a"))
        with page.stream("GET", "/api/events") as one, page.stream("GET", "/api/jobs/a/events") as two:
            streams = [told(one), told(two)]
            for stream in streams:
                next(stream)
            for path in ("/api/events", "/api/jobs/a/events"):
                refused = page.get(path)
                assert (refused.status_code, refused.json()["code"]) == (503, "OVERLOADED")
                assert "2 pages are open; the limit PAGE_STREAMS is 2" in refused.json()["message"]
            assert page.get("/api/cluster").status_code == 200, "who only asks is answered"

        def room() -> bool:
            with page.stream("GET", "/api/events") as again:
                return again.status_code == 200

        wait_until(room, what="the end of a stream whose page is closed")

    def test_the_end_of_the_coordinator_ends_streams_at_once(self) -> None:
        with running() as rig, httpx.stream("GET", f"{rig.process.page}/api/events", timeout=10) as response:
            stream = told(response)
            next(stream)
            rig.process.stop()
            assert [kind for kind, _, _ in stream] in ([], ["failure"])


class TestActions:
    def test_cancel(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.submit(job("a"))
        answer = page.post("/api/jobs/a/cancel", json={}, headers=ACTION)
        assert answer.status_code == 200
        assert answer.json()["state"] == "cancelled"
        assert rig.state("a").value == "cancelled"

    def test_checkpoint(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.run(job("a", workers=1), "w0")
        assert page.post("/api/jobs/a/checkpoint", json={}, headers=ACTION).json()["attempt"] == 1

    def test_refusal_of_the_cluster_is_passed_on(self, page: httpx.Client, trained: str) -> None:
        answer = page.post(f"/api/jobs/{trained}/checkpoint", json={}, headers=ACTION)
        assert answer.status_code == 503
        assert "no checkpoint storage" in answer.json()["message"]
        assert page.post("/api/jobs/nobody/cancel", json={}, headers=ACTION).status_code == 404

    @pytest.mark.parametrize(
        ("headers", "reason"),
        [
            ({"x-shoal-page": "1"}, "in a script, send the headers Sec-Fetch-Site: same-origin, x-shoal-page: 1 and"),
            ({}, "in a script, send the headers"),
            ({**ACTION, "sec-fetch-site": "cross-site"}, "Sec-Fetch-Site or Origin names another site"),
            ({**ACTION, "sec-fetch-site": "same-site"}, "must come from this page"),
            ({"x-shoal-page": "1", "origin": "http://evil.example"}, "must come from this page"),
            ({**ACTION, "origin": "http://evil.example"}, "must come from this page"),
            ({"x-shoal-page": "1", "origin": "null"}, "must come from this page"),
            ({"sec-fetch-site": "same-origin"}, "needs the header"),
            ({**ACTION, "content-type": "text/plain"}, "application/json"),
            ({**ACTION, "content-type": "application/x-www-form-urlencoded"}, "application/json"),
        ],
    )
    def test_other_sites_do_nothing(
        self, rig: Rig, page: httpx.Client, trained: str, headers: Mapping[str, str], reason: str
    ) -> None:
        headers = {"content-type": "application/json", **headers}
        answer = page.post(f"/api/jobs/{trained}/cancel", content="{}", headers=headers)
        assert answer.status_code in {400, 403}
        assert reason in answer.json()["message"]
        assert rig.state(trained).value == "running"

    def test_its_own_origin_will_do(self, alone: tuple[Rig, httpx.Client]) -> None:
        rig, page = alone
        rig.submit(job("a"))
        headers = {"x-shoal-page": "1", "origin": rig.process.page}
        assert page.post("/api/jobs/a/cancel", json={}, headers=headers).status_code == 200

    @pytest.mark.parametrize(
        ("body", "status"),
        [(b"", 400), (b"{", 400), (b"[]", 400), (b'{"force":true}', 400), (b"[" * 4000, 400), (b" " * 9000, 413)],
    )
    def test_a_body_that_makes_no_sense(
        self, rig: Rig, page: httpx.Client, trained: str, body: bytes, status: int
    ) -> None:
        headers = {"content-type": "application/json", **ACTION}
        answer = page.post(f"/api/jobs/{trained}/cancel", content=body, headers=headers)
        assert answer.status_code == status
        assert "send {}" in answer.json()["message"]
        assert rig.state(trained).value == "running"

    def test_a_page_for_reading_alone(self) -> None:
        with running(page_read_only=True) as rig:
            rig.submit(job("a"))
            answer = httpx.post(f"{rig.process.page}/api/jobs/a/cancel", json={}, headers=ACTION)
            assert (answer.status_code, answer.json()["code"]) == (403, "FORBIDDEN")
            assert rig.state("a").value == "starting"
            assert httpx.get(f"{rig.process.page}/api/cluster").json()["read_only"]


class TestSafety:
    @pytest.mark.parametrize("path", ["/", "/static/app.js", "/api/cluster", "/api/nothing", "/healthz"])
    def test_headers_of_every_answer(self, page: httpx.Client, path: str) -> None:
        headers = page.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "trusted-types 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == ("no-store" if path.startswith(("/api", "/healthz")) else "no-cache")
        assert "access-control-allow-origin" not in headers

    def test_a_name_that_leads_here_is_not_enough(self, page: httpx.Client) -> None:
        for host in ("evil.example", "evil.example:7080", "127.0.0.1.evil.example", "10.0.0.1", ""):
            answer = page.get("/api/cluster", headers={"host": host})
            assert answer.status_code in {400, 403}, host
            assert "members" not in answer.text
        for host in ("localhost:9999", "127.0.0.1", "[::1]:80", "shoal.localhost"):
            assert page.get("/api/cluster", headers={"host": host}).status_code == 200

    def test_names_that_were_given(self) -> None:
        with running(page_hosts=("Watch.example",)) as rig:
            answer = httpx.get(f"{rig.process.page}/api/cluster", headers={"host": "watch.example:443"})
            assert answer.status_code == 200

    def test_other_sites_cannot_ask(self, page: httpx.Client) -> None:
        for site in ("cross-site", "same-site"):
            assert page.get("/api/cluster", headers={"sec-fetch-site": site}).status_code == 403
        assert page.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200, "a link leads here"

    def test_no_html_is_made_of_text(self) -> None:
        """The scripts put no string or markup into the DOM as HTML. The policy above also makes browsers refuse it."""
        for path in STATIC.glob("*.js"):
            text = path.read_text()
            for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
                assert way not in text, path
            assert "dangerouslySet" not in text, path
        shell = (STATIC / "index.html").read_text()
        assert "style=" not in shell
        assert "<style" not in shell
        assert shell.count("<script") == shell.count('src="/static/app.js"') == 1

    def test_nothing_comes_from_elsewhere(self) -> None:
        for path in [*STATIC.glob("*.js"), *STATIC.glob("*.css"), STATIC / "index.html"]:
            assert not re.search(r"""https?:|["'(]//""", path.read_text()), path


class TestItsPort:
    def test_it_is_in_use(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            config = CoordinatorConfig(listen="127.0.0.1:0", page_listen=address)
            with pytest.raises(errors.PortInUse, match=f"page: cannot listen on {address}: .*--page-listen"):
                start_coordinator(config, prometheus_client.CollectorRegistry())

    def test_there_is_none_unless_it_is_wanted(self) -> None:
        process = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), prometheus_client.CollectorRegistry())
        try:
            assert process.page == ""
        finally:
            process.stop()

    def test_it_is_free_again(self) -> None:
        with running() as rig:
            host, port = rig.process.page.removeprefix("http://").split(":")
        socket.create_server((host, int(port))).close()

    def test_silent_client_is_disconnected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal_coordinator.page.server.PATIENCE_S", 0.1)
        with running() as rig, connected(rig) as silent:
            assert silent.recv(1) == b""

    def test_client_with_unfinished_second_request_is_disconnected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal_coordinator.page.server.PATIENCE_S", 0.5)
        with running() as rig, connected(rig) as slow:
            first = time.monotonic()
            while time.monotonic() < first + 1:  # who asks again and again stays for longer than that
                slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = b""
                while not answer.endswith(b"\r\n\r\nok\n"):
                    answer += (got := slow.recv(4096))
                    assert got
            slow.sendall(b"G")
            assert slow.recv(4096) == b""

    def test_client_that_waits_for_an_answer_is_not_disconnected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal_coordinator.page.server.PATIENCE_S", 0.2)
        with running() as rig, httpx.stream("GET", f"{rig.process.page}/api/events", timeout=10) as response:
            stream = told(response)
            for number in range(3):
                next(stream)
                rig.submit(job(f"a{number}"))

    @pytest.mark.parametrize("limit", ["PAGE_CONNECTIONS", "HOST_PAGE_CONNECTIONS"])
    def test_a_bound_on_connections(self, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(f"shoal_coordinator.page.server.{limit.replace('PAGE_', '')}", 1)
        before = refusals("coordinator")[limit]
        with running() as rig, httpx.Client(base_url=rig.process.page, timeout=10) as first:
            with first.stream("GET", "/api/events") as response:
                stream = told(response)
                next(stream)
                with pytest.raises(httpx.TransportError):
                    httpx.get(f"{rig.process.page}/healthz", timeout=10)
                assert refusals("coordinator")[limit] == before + 1
            first.close()
            wait_until(lambda: answers(rig), what="room for one more")


def answers(rig: Rig) -> bool:
    try:
        return httpx.get(f"{rig.process.page}/healthz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
