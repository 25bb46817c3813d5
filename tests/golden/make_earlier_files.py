"""Generator of earlier_files/: a metadata store and checkpoints as this tree writes them, and what they hold.

    .venv/bin/python tests/golden/make_earlier_files.py

`tests/contract/test_earlier_files.py` opens the files with the present tree. If that test fails, do not write the files
again: the files of users cannot be read either. Keep them, and add a second folder for the files of a later version.

- coordinator.db: the store of a cluster at work. Job "done" has succeeded, "failed" has failed, "cancelled" was
  cancelled, and "waiting" lacks workers. Job "running" is at work: one worker holds a range, and another has left half
  of its range. It has an evaluation and checkpoints. One of the three servers is draining.
- checkpoints/: "running" has three, the first at its best evaluation; "done" has one. Each checkpoint has several
  shards on two servers, all dtypes and aggregations, and optimizer slots.
- answers.jsonl: the answers of a coordinator that was started again on the store.
- values.json: the variables of each checkpoint, and those of "running" one step after its newest checkpoint.

The script fixes the coordinator's clock and id, and the names of members and jobs. The system chooses the ports. The
ports and the times of the cuts stay in the files; no test calls those ports or compares those times with the present.
"""

import json
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from shoal._rpc.coordinator import CoordinatorClient
from shoal._training.participant import Participant
from shoal._wire.cursor import Cursor
from shoal._wire.leases import Lease
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.client import Client
from shoal.evaluation_policy import EvaluationPolicy
from shoal.optim import Adam
from shoal.status import Evaluation
from shoal.v1 import coordinator_pb2, job_pb2
from support.recordings.cluster_members import (
    job_of,
    part_of,
    register_server,
    register_worker,
    report_of,
    take_checkpoint,
)
from support.recordings.conversation import write
from support.recordings.mixed_variables import GIVEN, MIXED, TRAINED, updates, whole_numbers
from support.recordings.pinned_cluster import Clock, PinnedCoordinator, pinned_cluster
from support.recordings.raw_calls import make_calls

FOLDER = Path(__file__).parent / "earlier_files"
JOBS = ("done", "failed", "cancelled", "waiting", "running")


class Cluster:
    """A coordinator on a store, two servers, a third that is draining, and calls to them; `with` ends it."""

    def __init__(self, folder: Path, store: Path) -> None:
        self.stack = ExitStack()
        self.rig, self.servers, self.clock = self.stack.enter_context(pinned_cluster(folder, str(store)))
        self.coordinator = self.stack.enter_context(closing(CoordinatorClient(self.rig.address)))
        self.client = self.stack.enter_context(Client(self.rig.address))
        for index, address in enumerate(self.servers.addresses):
            register_server(self.coordinator, f"server-{index}", address)
        incarnation = register_server(self.coordinator, "server-2", "127.0.0.1:9")
        request = coordinator_pb2.DrainRequest(member="server-2", incarnation=incarnation)
        self.coordinator.call(self.coordinator.members.Drain, request)
        self.lives = {name: register_worker(self.coordinator, name) for name in ("w0", "w1")}
        self.values: dict[str, dict[str, list[Any]]] = {}

    def part(self, worker: str) -> Participant:
        self.rig.settle()
        return part_of(self.coordinator, worker, self.lives[worker], self.rig.settle)

    def keep(self, name: str, values: dict[str, np.ndarray]) -> None:
        """Keeps values as plain numbers."""
        self.values[name] = {key: np.asarray(value, np.float64).tolist() for key, value in values.items()}

    def checkpoint(self, job: str) -> None:
        """Takes a checkpoint, and keeps its values."""
        take_checkpoint(self.coordinator, job)
        self.rig.settle()
        saved = self.client.job(job).status().checkpoint
        assert saved
        self.keep(f"{job}/{saved.number}", self.client.pull(job))

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


def lease_of(part: Participant, done: int = 0) -> Lease:
    """A lease, where there is a range to lease."""
    leased = part.lease(done)
    assert isinstance(leased, Lease)
    return leased


def done(cluster: Cluster) -> None:
    """A job that has come to its end, with a checkpoint there."""
    policy = CheckpointPolicy(every_s=0.0, at_end=True)
    cluster.client.submit(job_of("done", epochs=1, checkpoints=policy, optimizer=Adam(0.5)))
    part = cluster.part("w0")
    part.describe({**MIXED, **GIVEN}, samples=32)
    with part.enter() as training:
        leased = lease_of(part)
        for step in range(2):
            training.pull()
            training.push(whole_numbers(TRAINED, step + 1), updates=updates(1), cursor=Cursor(leased.number, 8))
            cluster.clock.advance(0.5)
            part.report(report_of(step + 1, log=(f"step {step} is done",)))
        part.lease(done=lease_of(part, done=leased.number).number)
    part.finish()
    cluster.rig.settle()
    cluster.keep("done/1", cluster.client.pull("done"))


def failed(cluster: Cluster) -> None:
    """A job whose program has failed."""
    cluster.client.submit(job_of("failed"))
    part = cluster.part("w0")
    part.describe(MIXED, samples=32)
    part.enter().close()
    part.finish("Traceback: the program has failed")
    cluster.rig.settle()


def running(cluster: Cluster) -> None:
    """A job at work: see above."""
    policy = EvaluationPolicy(every_steps=2, at_end=False, metric="loss", checkpoint_best=True)
    cluster.client.submit(job_of("running", workers=2, min_workers=1, evaluation=policy))
    parts = {name: cluster.part(name) for name in ("w0", "w1")}
    for part in parts.values():
        part.describe({**MIXED, **GIVEN}, samples=64)
    cluster.rig.settle()
    with ThreadPoolExecutor(2) as pool:  # each waits for the other
        entering = [pool.submit(part.enter) for part in parts.values()]
        trainings = [it.result(timeout=20) for it in entering]
    with trainings[0] as first, trainings[1] as second:
        cluster.rig.settle()
        leases = {name: lease_of(part) for name, part in parts.items()}
        for step in range(2):
            for name, training in (("w0", first), ("w1", second)):
                training.pull()
                cursor = Cursor(leases[name].number, 4 * (step + 1))
                training.push(whole_numbers(TRAINED, step + 1), updates=updates(step), cursor=cursor)
                cluster.clock.advance(0.5)
                parts[name].report(report_of(step + 1))
        turn = parts["w0"].claim_evaluation(2)
        found = Evaluation(turn.number, 2, {"loss": 0.25, "accuracy": 0.75}, samples=16, seconds=1.5)
        while parts["w0"].report_evaluation(found).wait:
            cluster.rig.settle()
        cluster.keep("running/1", cluster.client.pull("running"))
        request = coordinator_pb2.LeaveRequest(
            member="w1", incarnation=cluster.lives["w1"], cursor=Cursor(leases["w1"].number, 8).to_proto()
        )
        cluster.coordinator.call(cluster.coordinator.members.Leave, request)
        cluster.rig.settle()
        cluster.checkpoint("running")
        first.pull()
        first.push(whole_numbers(TRAINED, 7), updates=updates(3), cursor=Cursor(leases["w0"].number, 12))
        cluster.clock.advance(0.5)
        cluster.checkpoint("running")
        first.pull()
        first.push(whole_numbers(TRAINED, 2), updates=updates(5), cursor=Cursor(leases["w0"].number, 16))
        cluster.keep("one step after running/3", cluster.client.pull("running"))
        parts["w0"].report(report_of(4, log=("all is well",)))


QUESTIONS = [
    ("/shoal.v1.Coordinator/GetStatus", coordinator_pb2.GetStatusRequest()),
    ("/shoal.v1.Jobs/List", job_pb2.ListRequest()),
    *(
        (f"/shoal.v1.Jobs/{method}", getattr(job_pb2, f"{method}Request")(job=job))
        for job in JOBS
        for method in ("Get", "GetData", "GetPlacement")
    ),
    *(("/shoal.v1.Jobs/Watch", job_pb2.WatchRequest(job=job, no_wait=True)) for job in JOBS),
]


def main() -> None:
    os.environ["SHOAL_TRANSPORT"] = "grpc"
    with tempfile.TemporaryDirectory() as temporary:
        store, checkpoints = Path(temporary, "coordinator.db"), Path(temporary, "checkpoints")
        checkpoints.mkdir()
        with Cluster(checkpoints, store) as cluster:
            done(cluster)
            failed(cluster)
            cluster.client.submit(job_of("cancelled", workers=5, min_workers=5)).cancel()
            cluster.client.submit(job_of("waiting", workers=5, min_workers=5))
            running(cluster)
            cluster.rig.settle()
            values, now = cluster.values, cluster.clock.now
            cluster.rig.__exit__()
            shutil.rmtree(FOLDER, ignore_errors=True)
            FOLDER.mkdir()
            shutil.copy(store, FOLDER)
            shutil.copytree(checkpoints, FOLDER / "checkpoints")
        assert not Path(f"{store}-wal").exists(), "the store was not closed"
        with PinnedCoordinator(str(store), checkpoints, Clock(now)) as again:
            requests = [(method, message.SerializeToString()) for method, message in QUESTIONS]
            write(FOLDER / "answers.jsonl", make_calls(again.address, requests))
    text = json.dumps({"now": now, "values": values}, indent=None, separators=(",", ":"))
    (FOLDER / "values.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
