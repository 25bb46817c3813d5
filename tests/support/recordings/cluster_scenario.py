"""Scenario of the wire recordings in which users, a worker and servers call a coordinator.

The scenario gets nothing but addresses. They may belong to taps, which record and pass on calls to a real coordinator,
or to `Players`, which replay a recording.
"""

import os
from contextlib import ExitStack
from unittest import mock

from shoal import errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal._wire import Lease, NoRange
from shoal._wire.cursor import Cursor
from shoal.client import Client
from shoal.evaluation_policy import EvaluationPolicy
from shoal.status import Evaluation
from shoal.v1 import coordinator_pb2
from support.recordings.cluster_members import (
    Worker,
    beat_of_server,
    job_of,
    register_server,
    report_of,
    take_checkpoint,
)
from support.recordings.mixed_variables import GIVEN, MIXED, TRAINED, updates, whole_numbers
from support.recordings.pinned_cluster import pinned_draws
from support.recordings.wire import Wire, refused


def a_cluster(wire: Wire) -> None:
    """Runs a job with data, evaluations and checkpoints, another that continues it and fails, and a cancelled one."""
    with ExitStack() as stack, mock.patch.dict(os.environ, SHOAL_TRANSPORT="grpc"):
        client = stack.enter_context(Client(wire.addresses["coordinator"], retry_for_s=0.0))
        coordinator = CoordinatorClient(wire.addresses["coordinator"], retry_for_s=0.0)
        stack.callback(coordinator.close)
        lives = {}
        for name in ("server-0", "server-1"):
            lives[name] = register_server(coordinator, name, wire.addresses[name])
            beat_of_server(coordinator, name, lives[name])
        worker = stack.enter_context(Worker(coordinator, "w0"))
        _first_job(wire, client, coordinator, worker)
        _later_jobs(wire, client, worker)
        request = coordinator_pb2.DrainRequest(member="server-1", incarnation=lives["server-1"])
        coordinator.call(coordinator.members.Drain, request)
        client.status()


def _first_job(wire: Wire, client: Client, coordinator: CoordinatorClient, worker: Worker) -> None:
    evaluation = EvaluationPolicy(every_steps=2, at_end=False, metric="loss", patience=3)
    with pinned_draws():
        job = client.submit(job_of("first", evaluation=evaluation))
        client.submit(job_of("first", evaluation=evaluation))  # the token is the same: the first one's answer
    with pinned_draws("6b"), refused(errors.JobExists):
        client.submit(job_of("first"))
    with refused(errors.NotPlaced):
        take_checkpoint(coordinator, "first")
    part = worker.part("first")
    assert part.spec.seed == 5
    part.describe({**MIXED, **GIVEN}, samples=64)
    wire.advance(2.0)
    with part.enter() as training:
        for step in range(3):
            leased = part.lease(done=step)
            assert isinstance(leased, Lease)
            values = training.pull()
            assert (step, values["kernel"].shape) == (step, (6, 4))
            cursor = Cursor(leased.number, 8)
            training.push(whole_numbers(TRAINED, step + 1), updates=updates(step), weight=8.0, cursor=cursor)
            wire.mark()
            wire.advance(0.5)
            part.report(report_of(step + 1, log=(f"step {step} is done",)))
            turn = part.claim_evaluation(step + 1)
            if turn.number:
                found = Evaluation(turn.number, step + 1, {"loss": 0.25, "accuracy": 0.75}, samples=16, seconds=1.5)
                part.report_evaluation(found)
            if step == 1:
                take_checkpoint(coordinator, "first")
        beat_of_server(coordinator, "server-0", 1)
        job.status(), client.jobs(), job.data(), job.timings(last=2), client.status()
        with refused(errors.JobRunning):
            job.drop()
        more: Lease | NoRange = leased
        while isinstance(more, Lease):
            more = part.lease(done=more.number)
    part.finish()
    wire.advance(1.0)
    job.result()
    list(job.events(follow=False))


def _later_jobs(wire: Wire, client: Client, worker: Worker) -> None:
    with pinned_draws():
        again = client.submit(job_of("again", restore="first/1"))
    part = worker.part("again")
    part.describe({**MIXED, **GIVEN}, samples=64)
    with part.enter() as training:
        training.pull()
        wire.mark()
    part.finish("Traceback: the program has failed")
    assert part.ended()
    list(again.events(follow=False))
    with pinned_draws():
        waiting = client.submit(job_of("waiting", workers=2, min_workers=2))
    waiting.cancel()
    list(waiting.events(follow=False))
    waiting.drop()
    again.drop()
    with refused(errors.UnknownJob):
        client.job("nobody").status()
