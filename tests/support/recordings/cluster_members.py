"""Members of a cluster, as real clients of the coordinator with fixed names, and the jobs that they run."""

import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from shoal._rpc.coordinator import CoordinatorClient
from shoal._rpc.membership import MembershipClient
from shoal._training.participant import Participant, Report
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.status import StepTiming
from shoal.v1 import coordinator_pb2, job_pb2
from support.recordings.mixed_variables import MOMENTUM
from support.recordings.pinned_cluster import BEGINNING, pinned_draws


class Worker:
    """A worker of the cluster that is daemon and trainer in one. It leaves at the end of the `with` block."""

    def __init__(self, coordinator: CoordinatorClient, name: str) -> None:
        self._replies: list[coordinator_pb2.HeartbeatReply] = []
        self._answered = threading.Semaphore(0)
        self._coordinator = coordinator
        self.name = name
        request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member=name, device="cpu")
        with pinned_draws():
            self.membership = MembershipClient(coordinator, request, on_reply=self._take)

    def _take(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        self._replies.append(reply)
        self._answered.release()

    def _wait(self) -> coordinator_pb2.HeartbeatReply:
        assert self._answered.acquire(timeout=20), "no heartbeat was answered"
        return self._replies[-1]

    def beat(self) -> coordinator_pb2.HeartbeatReply:
        """Sends one heartbeat."""
        self.membership.heartbeat_now()
        return self._wait()

    def part(self, job: str) -> Participant:
        """The number of the assignment that the coordinator has given this worker."""
        reply = self.beat()
        assert reply.job == job, f"{self.name} is to work on {reply.job!r}"
        incarnation = self.membership.incarnation
        return Participant(self._coordinator, job, self.name, incarnation, reply.assignment, sleep=lambda _: None)

    def __enter__(self) -> "Worker":
        self.membership.start()
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.membership.stop()


def register_server(coordinator: CoordinatorClient, name: str, address: str) -> int:
    """Registers a server, and returns its incarnation."""
    request = coordinator_pb2.RegisterRequest(
        role=coordinator_pb2.SERVER,
        member=name,
        address=address,
        process=f"process-of-{name}",
        metrics_address="127.0.0.1:9",
        version=version("shoal"),
    )
    return coordinator.call(coordinator.members.Register, request).incarnation


def register_worker(coordinator: CoordinatorClient, name: str) -> int:
    """Registers a worker without a heartbeat thread, and returns its incarnation."""
    request = coordinator_pb2.RegisterRequest(
        role=coordinator_pb2.WORKER, member=name, device="cpu", process=f"process-of-{name}"
    )
    return coordinator.call(coordinator.members.Register, request).incarnation


def part_of(coordinator: CoordinatorClient, name: str, incarnation: int, sleep: Callable[[], object]) -> Participant:
    """Returns the number of the assignment that the coordinator has given a worker."""
    request = coordinator_pb2.HeartbeatRequest(member=name, incarnation=incarnation)
    reply = coordinator.call(coordinator.members.Heartbeat, request)
    assert reply.job, f"{name} has no part in a job"
    return Participant(coordinator, reply.job, name, incarnation, reply.assignment, sleep=lambda _: sleep())


def beat_of_server(coordinator: CoordinatorClient, name: str, incarnation: int) -> None:
    """Returns a heartbeat with the contents and the load of a server."""
    load = coordinator_pb2.ServerLoad(updates=3, received_bytes=1 << 20, sent_bytes=1 << 33, waiting_pulls=1)
    request = coordinator_pb2.HeartbeatRequest(member=name, incarnation=incarnation, shards=2, bytes=480, load=load)
    coordinator.call(coordinator.members.Heartbeat, request)


def job_of(name: str, **options: Any) -> Job:
    """Returns a job of one worker that computes with exact numbers."""
    fixed: dict[str, Any] = {
        "consistency": Asynchronous(),
        "optimizer": MOMENTUM,
        "settings": {"hidden": 64},
        "epochs": 2,
        "batch_size": 8,
        "range_size": 16,
        "shards": 3,
        "seed": 5,
        "overlap": False,
        "checkpoints": CheckpointPolicy(every_s=0.0, at_end=False, keep_last=3),
    }
    return Job("programs:linear", name=name, **{**fixed, **options})


def report_of(step: int, *, log: tuple[str, ...] = ()) -> Report:
    """Returns a report of one step."""
    timing = StepTiming(step, BEGINNING + step, pull=0.25, read=0.125, compute=0.5, push=0.0625)
    return Report(
        step=step,
        accepted=1,
        samples=8,
        values={"loss": 1.0 / (1 << step), "accuracy": 0.5},
        staleness={0: 1},
        log=log,
        timings=(timing,),
    )


def take_checkpoint(coordinator: CoordinatorClient, job: str) -> None:
    """Requests a checkpoint."""
    coordinator.call(coordinator.jobs.TakeCheckpoint, job_pb2.TakeCheckpointRequest(job=job))
