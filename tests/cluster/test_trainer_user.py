"""Trainers of another user in a cluster of root: they have neither shared memory nor their worker's key."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal import errors, optim
from shoal._security.certificates import issue_certificate, make_certificates
from shoal_worker.isolation import TrainerUser, trainer_tls
from support.certificates import credentials
from support.clusters.local import QUICK, local_cluster

pytestmark = pytest.mark.cluster


@pytest.fixture
def nobody() -> TrainerUser:
    try:
        return TrainerUser.find("nobody")
    except errors.BadRequest as error:  # not root, or Python lies in a folder that nobody may not enter
        pytest.skip(error.message)


@pytest.fixture
def certificates(nobody: TrainerUser) -> Iterator[Path]:
    """A folder that all users may enter, with the key of trainers for `nobody`, and the other keys for root."""
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        issue_certificate("up", "up", ca=Path(folder))
        os.chown(f"{folder}/trainer-key.pem", nobody.uid, -1)
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_key_that_the_user_of_trainers_cannot_read_stops_the_start(nobody: TrainerUser, certificates: Path) -> None:
    key = certificates / "trainer-key.pem"
    os.chown(key, 0, -1)
    with pytest.raises(errors.BadRequest, match=r"Permission denied.* \(chown nobody .*trainer-key.pem\)"):
        trainer_tls(credentials(certificates, "worker"), str(certificates / "trainer.pem"), str(key), nobody)


def test_a_trainer_of_another_user_trains_with_a_certificate_of_its_own(
    nobody: TrainerUser, certificates: Path
) -> None:
    names = {"CA": "ca.pem", "CERT": "up.pem", "KEY": "up-key.pem"}
    environment = {f"SHOAL_TLS_{variable}": str(certificates / name) for variable, name in names.items()}
    trainers = {"CERT": "trainer.pem", "KEY": "trainer-key.pem"}
    environment |= {f"SHOAL_TRAINER_TLS_{variable}": str(certificates / name) for variable, name in trainers.items()}
    flags = {**QUICK, "worker": ["--trainer-user", "nobody", "--trainer-memory", str(1 << 30)]}
    with (
        local_cluster(servers=1, workers=1, flags=flags, env=environment) as cluster,
        cluster.client() as client,
    ):
        job = client.submit(
            shoal.Job(
                "support.transport_observer:TransportObserver",
                settings={"transport": "auto", "hidden": 4096},
                optimizer=optim.SGD(0.1),
                max_steps=20,
            )
        )
        job.wait(timeout_s=60)
        lines = [line.partition(": ")[2] for line in job.logs()]
    assert any(f"belongs to user {nobody.uid}" in line for line in lines), "the server refused its shared memory"
    seen = [json.loads(line) for line in lines if line.startswith("{")]
    assert {(each["user"], each["segments"]) for each in seen} == {(nobody.uid, 0)}
