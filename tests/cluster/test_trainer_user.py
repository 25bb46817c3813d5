"""Trainers of another user in a cluster of root: they train over lanes, without shared memory."""

import json

import pytest

import shoal
from shoal import errors, optim
from shoal_worker.isolation import TrainerUser
from support.clusters.local import QUICK, local_cluster

pytestmark = pytest.mark.cluster


@pytest.fixture
def nobody() -> TrainerUser:
    try:
        return TrainerUser.find("nobody")
    except errors.BadRequest as error:  # not root, or Python lies in a folder that nobody may not enter
        pytest.skip(error.message)


def test_a_trainer_of_another_user_trains_without_shared_memory(nobody: TrainerUser) -> None:
    flags = {**QUICK, "worker": ["--trainer-user", "nobody", "--trainer-memory", str(1 << 30)]}
    with local_cluster(servers=1, workers=1, flags=flags) as cluster, cluster.client() as client:
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
