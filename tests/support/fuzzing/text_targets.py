"""Fuzz targets of texts: TF_CONFIG, specifications of jobs, URLs, options, settings and requests to the page."""

import asyncio
import json
import random
from typing import Any

import prometheus_client
from google.protobuf.message import DecodeError

from shoal import checkpoint_policy, consistency, errors, optim
from shoal._checkpoint import open_shared_storage
from shoal._job import settings
from shoal._rpc import parse_address
from shoal._system import tf_config
from shoal._wire import check_address, check_text
from shoal.job import Job
from shoal.optim import _text as optimizer_text
from shoal.v1 import job_pb2
from shoal_coordinator.api.checks import check_submission
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_distribute.resolver import TFConfigClusterResolver, ranked_tasks
from support.fuzzing.campaign import BadStatus, SimpleTarget, Target
from support.fuzzing.messages import Drawer

TF_SEEDS = [
    b'{"cluster": {"chief": ["a:7070"], "ps": ["b:7070", "c:7070"], "worker": ["[fd00::5]:7070"]}, '
    b'"task": {"type": "ps", "index": 1}}',
    b'{"cluster": {"worker": ["d:1"]}, "task": {"type": "worker", "index": "0"}, "environment": "cloud"}',
]
RANK_SEEDS = [TF_SEEDS[0].replace(b'"type": "ps", "index": 1', b'"type": "worker", "index": 0'), TF_SEEDS[1]]
URL_SEEDS = [b"/tmp/x", b"file:///tmp/x", b"memory://a/b", b"s3://bucket/prefix/x", b"local://x", b"gs://bucket"]
OPTION_SEEDS = [b"adam:learning_rate=0.1,beta1=0.9", b"ssp:3", b"a/best", b"key=[1, {}]", b"127.0.0.1:70", b"sync:2"]


def _text(data: bytes) -> str:
    """Returns the text of an input, as Python gets it from the environment or the command line."""
    return data.decode(errors="surrogateescape")


def _find_ranks(text: str) -> None:
    tasks = ranked_tasks(TFConfigClusterResolver(environment={"TF_CONFIG": text}))
    assert tasks is None or 0 <= tasks.rank < len(tasks.addresses)


def _open_url(data: bytes) -> None:
    url = _text(data)
    # Only the parser: other schemes would read this machine's configuration, or the network.
    if url.partition("://")[0] in ("", "memory", "file", "local") or "://" not in url:
        open_shared_storage(url)


def _read_options(data: bytes) -> None:
    text = _text(data)
    readers = (
        optimizer_text.parse,
        consistency.parse,
        checkpoint_policy.CheckpointChoice.parse,
        lambda it: settings.dumped(settings.parse([it])),
        settings.loaded,
        parse_address,
        lambda it: check_address("it", it),
        lambda it: check_text("it", it),
    )
    for read in readers:
        try:
            read(text)
        except errors.ShoalError:
            continue


class Jobs:
    """Specifications of jobs."""

    name = "jobs"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        job = Job("a.b:c", name="job", optimizer=optim.Adam(1e-3), settings={"x": [1.5, {"y": None}]})
        self._seeds = [job.to_proto().SerializeToString(), Job("", name="s").to_proto().SerializeToString()]
        self._drawer = Drawer(
            {
                "name": ["job", "adam", "sgd", "fixed_shards"],
                "program": ["a.b:c"],
                "settings_json": ["{}", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000, '{"a": "\\ud800"}'],
                "workers": [1, 2],
            }
        )

    def draw(self, draw: random.Random) -> bytes:
        return self._drawer.encoded(draw, job_pb2.JobSpec, self._seeds)

    def run(self, data: bytes) -> None:
        try:
            message = job_pb2.JobSpec.FromString(data)
        except DecodeError:
            return
        job = Job.from_proto(message)
        check_submission(job, "")
        assert Job.from_proto(job.to_proto()) == job

    def stop(self) -> None:
        """Nothing to free."""


_ACTION = b"x-shoal-page: 1\ncontent-type: application/json\n\n{}"
PAGE_SEEDS = [
    b"GET\n/api/jobs\nhost: localhost\n\n",
    b"GET\n/api/jobs/job\nhost: localhost:8080\nsec-fetch-site: same-origin\n\n",
    b"GET\n/api/jobs/job/data\nhost: [::1]:80\n\n",
    b"GET\n/api/cluster?page_token=abc\nhost: 127.0.0.1\n\n",
    b"GET\n/api/jobs?page_token=MTIz\nhost: 127.0.0.1\n\n",
    b"GET\n/static/app.js\nhost: localhost\nif-none-match: x\nrange: bytes=0-5\n\n",
    b"GET\n/jobs/job\nhost: a.localhost\nlast-event-id: 1-2\n\n",
    b"POST\n/api/jobs/job/cancel\nhost: localhost\norigin: http://localhost\n" + _ACTION,
    b"POST\n/api/jobs/x/checkpoint\nhost: localhost\nsec-fetch-site: same-origin\n" + _ACTION,
    b"GET\n/api/jobs/job/timings\nhost: localhost\n\n",
    b"GET\n/static/../app.py\nhost: localhost\n\n",
    b"GET\n/api/jobs/job/checkpoints\nhost: localhost\n\n",
]


class PageRequests:
    """Requests to the page, behind the HTTP parser: method, path, headers and body."""

    name = "page"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        from shoal_coordinator.page.app import make_app  # noqa: PLC0415
        from shoal_coordinator.page.guard import RequestRules  # noqa: PLC0415
        from shoal_coordinator.page.reader import Reader  # noqa: PLC0415

        self._process = start_coordinator(
            CoordinatorConfig(listen="127.0.0.1:0"), prometheus_client.CollectorRegistry()
        )
        self._loop = asyncio.new_event_loop()
        reader = Reader(self._process.coordinator, None, {})
        self._app = make_app(reader, RequestRules(), asyncio.Event(), 8)

    def draw(self, draw: random.Random) -> bytes:
        from support.fuzzing.mutator import mutated  # noqa: PLC0415

        return mutated(draw, PAGE_SEEDS)

    def run(self, data: bytes) -> None:
        head, _, body = data.partition(b"\n\n")
        method, target, *fields = [*head.split(b"\n"), b"", b""]
        # The HTTP parser refuses other bytes before the page sees them.
        path, _, query = bytes(it for it in target if 0x20 < it < 0x7F).partition(b"?")
        headers = [(name.strip().lower(), value.strip()) for name, _, value in (it.partition(b":") for it in fields)]
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method.decode("latin-1") or "GET",
            "path": path.decode(errors="replace") or "/",
            "raw_path": path,
            "query_string": query,
            "headers": headers,
            "scheme": "http",
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        status: list[int] = []
        self._loop.run_until_complete(self._serve(scope, body, status))
        if status and status[0] == 500:
            raise BadStatus(f"status 500 for {data!r:.200}")

    async def _serve(self, scope: dict[str, Any], body: bytes, status: list[int]) -> None:
        sent = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return sent.pop() if sent else {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])

        await asyncio.wait_for(self._app(scope, receive, send), 15.0)  # type: ignore[arg-type]

    def stop(self) -> None:
        self._process.stop()
        self._loop.close()


def _event_json(data: bytes) -> None:
    json.loads(settings.dumped(settings.loaded(_text(data))))


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [
        SimpleTarget("tf_config", lambda: TF_SEEDS, lambda data: tf_config.read(_text(data))),
        SimpleTarget("tf_config_ranks", lambda: RANK_SEEDS, lambda data: _find_ranks(_text(data))),
        SimpleTarget(
            "urls", lambda: [it for it in URL_SEEDS if not it.startswith((b"s3", b"gs", b"memory"))], _open_url
        ),
        SimpleTarget("options", lambda: OPTION_SEEDS, _read_options),
        SimpleTarget("settings", lambda: [b'{"a": [1, 2.5, null, "\\u00e9"]}'], _event_json),
        Jobs(),
        PageRequests(),
    ]
