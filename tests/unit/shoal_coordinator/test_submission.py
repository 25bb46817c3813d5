"""Submit: a storage that hangs does not stop it, and a job whose source does not exist is refused."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from shoal import errors
from shoal._checkpoint import Catalogue
from shoal._checkpoint.storage_urls import open_storage
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.v1 import job_pb2 as pb
from shoal_coordinator.api.submission import SubmitHandler
from shoal_coordinator.cluster import ClusterPolicy
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.effects import StorageReads
from shoal_coordinator.persistence.store import MemoryStore


class Call:
    """The context of a call by gRPC, which records its error."""

    code: Any = None
    text = ""

    def peer(self) -> str:
        return "ipv4:10.0.0.5:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def set_code(self, code: Any) -> None:
        self.code = code

    def set_details(self, text: str) -> None:
        self.text = text

    def set_trailing_metadata(self, _: object) -> None: ...

    def abort(self, _code: Any, text: str) -> None:
        raise errors.ShoalError(text)


@pytest.fixture
def handler(tmp_path: Path) -> Iterator[SubmitHandler]:
    coordinator = Coordinator(MemoryStore(), "reef", ClusterPolicy(heartbeat_timeout_s=60.0, checkpoints=True))
    coordinator.start()
    handler = SubmitHandler(coordinator, open_storage(str(tmp_path)), StorageReads(0.01))
    yield handler
    coordinator.stop()
    handler.close()


def submit(handler: SubmitHandler, name: str) -> pb.SubmitReply:
    spec = Job("m:f", name=name, consistency=Asynchronous(), restore="earlier/3").to_proto()
    reply: pb.SubmitReply = handler.handler(pb.SubmitRequest(spec=spec), cast(Any, Call()))
    return reply


def test_a_storage_that_hangs_does_not_stop_submissions(
    handler: SubmitHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(Catalogue, "numbers", lambda *_: [3] if answers.wait(20) else [])
    with capture_logs() as logs:
        for number in range(40):  # more than there are threads for the storage
            assert submit(handler, f"job-{number}").status.spec.name == f"job-{number}"
    answers.set()
    assert [entry["event"] for entry in logs if "checkpoints" in entry["event"]] == ["cannot look for checkpoints"] * 40


def test_a_source_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    coordinator = Coordinator(MemoryStore(), "reef", ClusterPolicy(heartbeat_timeout_s=60.0, checkpoints=True))
    coordinator.start()
    handler = SubmitHandler(coordinator, open_storage(str(tmp_path)))
    with pytest.raises(errors.ShoalError, match="there is no checkpoint earlier/3"):
        submit(handler, "job")
    coordinator.stop()
    handler.close()
