"""Tokens in a real cluster that logs at DEBUG: programs by submitter, replaced tokens, and no secret in a log."""

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._security import AccessFile, AccessRole, Credentials, TokenSource
from shoal.v1 import token_pb2
from support.clusters.local import QUICK, local_cluster
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

# What a token or a ticket looks like: three parts in base64, the first of which is a JSON object.
A_TOKEN = re.compile(r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}")
STORAGE_KEY = "sesame-of-the-object-store"

PROGRAM = """
import pathlib
import numpy as np
pathlib.Path(__file__).with_suffix(".imported").touch()

class Line:
    dataset = None
    def variables(self):
        return {"w": np.zeros(2, np.float32)}
    def loss_and_gradients(self, values, batch):
        return 0.0, {"w": np.ones(2, np.float32)}
"""


@dataclass
class Guarded:
    """A cluster, its logs, and the folder of the programs of ann and bob."""

    cluster: shoal.LocalCluster
    logs: Path
    programs: Path

    def create(self, admin: CoordinatorClient, name: str) -> str:
        """Makes a submitter's token."""
        request = token_pb2.CreateTokenRequest(name=name, role=AccessRole.SUBMITTER.value, valid_s=600)
        return str(admin.call(admin.tokens.CreateToken, request).secret)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    programs, logs = tmp_path_factory.mktemp("programs"), tmp_path_factory.mktemp("logs")
    for name in ("anns", "bobs"):
        (programs / f"{name}.py").write_text(PROGRAM)
    allowed = ["ann=anns:*", "bob=bobs:*"]
    flags = {**QUICK, "worker": [flag for pattern in allowed for flag in ("--allow-program", pattern)]}
    environment = {"PYTHONPATH": str(programs), "AWS_SECRET_ACCESS_KEY": STORAGE_KEY}
    with local_cluster(servers=1, workers=1, flags=flags, log_level="debug", log_dir=logs, env=environment) as cluster:
        yield Guarded(cluster, logs, programs)


@pytest.fixture
def admin(guarded: Guarded) -> Iterator[CoordinatorClient]:
    address = guarded.cluster.address
    client = CoordinatorClient(address, credentials=Credentials().for_coordinator(address, AccessRole.ADMIN))
    yield client
    client.close()


def presenting(token: str) -> Credentials:
    return Credentials(token=lambda: token)


@pytest.mark.parametrize(("name", "other"), [("ann", "bob"), ("bob", "ann")])
def test_each_submitter_runs_its_own_programs_only(
    guarded: Guarded, admin: CoordinatorClient, name: str, other: str
) -> None:
    imported = guarded.programs / f"{other}s.imported"
    imported.unlink(missing_ok=True)
    credentials = presenting(guarded.create(admin, name))
    with shoal.Client(guarded.cluster.address, credentials=credentials) as client:
        client.submit(shoal.Job(f"{name}s:Line", name=f"{name}-own", max_steps=3)).wait(timeout_s=60)
        refused = client.submit(shoal.Job(f"{other}s:Line", name=f"{name}-other", max_steps=3))
        with pytest.raises(errors.JobFailed, match="PROGRAM_NOT_ALLOWED"):
            refused.wait(timeout_s=60)
    assert not imported.exists(), f"the worker imported {other}'s program for {name}"


def test_a_token_is_replaced_while_its_holder_calls(
    guarded: Guarded, admin: CoordinatorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session pushes, and a client pulls, while the token in their file is replaced, and the earlier one revoked."""
    file = tmp_path / "carol.token"

    def replace() -> str:
        """Replaces the file, as an operator does."""
        made = admin.call(
            admin.tokens.CreateToken,
            token_pb2.CreateTokenRequest(name="carol", role=AccessRole.SUBMITTER.value, valid_s=600),
        )
        unfinished = tmp_path / "unfinished"
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT, 0o600), "w") as new:
            new.write(made.secret)
        unfinished.rename(file)
        return str(made.token.id)

    current = replace()
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
    address = guarded.cluster.address
    credentials = Credentials(token=TokenSource(address, AccessRole.SUBMITTER))
    steps, failures, ended = [0, 0], [], threading.Event()

    def push() -> None:
        try:
            with (
                shoal.Client(address, credentials=credentials) as client,
                client.session("carols", variables={"w": np.zeros(8, np.float32)}) as session,
            ):
                while not ended.is_set():
                    session.pull()
                    session.push({"w": np.ones(8, np.float32)})
                    steps[0] += 1
        except Exception as error:
            failures.append(error)

    def read() -> None:
        try:
            wait_until(lambda: steps[0] > 0 or failures, what="the job")
            with shoal.Client(address, credentials=credentials) as client:
                while not ended.is_set():
                    client.pull("carols")
                    client.status()
                    steps[1] += 1
        except Exception as error:
            failures.append(error)

    def go_on(count: int) -> None:
        """Waits until each thread has made some more calls."""
        before = list(steps)
        wait_until(lambda: failures or min(map(int.__sub__, steps, before)) > count, what=f"{count} calls")

    threads = [threading.Thread(target=run) for run in (push, read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            go_on(5)
            earlier, current = current, replace()
            admin.call(admin.tokens.RevokeToken, token_pb2.RevokeTokenRequest(token=earlier))
            go_on(
                50
            )  # meanwhile servers learn of the revocation with a heartbeat, and refuse the tickets of this token
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_no_log_has_a_secret(guarded: Guarded, admin: CoordinatorClient) -> None:
    """Searches what the roles and a trainer have logged at DEBUG, for a submitter's job and for refused calls."""
    address = guarded.cluster.address
    made = guarded.create(admin, "ann")
    with shoal.Client(address, credentials=presenting(made)) as client:
        client.submit(shoal.Job("anns:Line", name="logged", max_steps=3)).wait(timeout_s=60)
    with pytest.raises(errors.Unauthenticated), shoal.Client(address, credentials=presenting(made + "x")) as client:
        client.status()
    link = admin.call(admin.tokens.GetLoginLink, token_pb2.GetLoginLinkRequest()).link
    secrets = {STORAGE_KEY, made, link.rpartition("=")[2], *AccessFile(address).read().values()}
    logs = [file for file in guarded.logs.rglob("*") if file.is_file()]
    assert len(logs) == len(guarded.cluster.processes)
    found = []
    for file in logs:
        text = file.read_text()
        assert "logged" in text or file.name.startswith("server"), f"{file.name} has no line of the job"
        assert "debug" in text or file.name.startswith("worker"), f"{file.name} has no line of level DEBUG"
        found += [f"{file.name}: {secret[:12]}..." for secret in secrets if secret in text]
        found += [f"{file.name}: {token[:12]}..." for token in A_TOKEN.findall(text)]
    assert found == []
