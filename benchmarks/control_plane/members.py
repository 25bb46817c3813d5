"""Simulated members of a cluster, many in one process: python members.py KIND ADDRESS FIRST COUNT.

`scale` starts this script. The members use the real protocol, through the same clients as real members, but they send
no values. KIND is `server` or `worker`. The COUNT simulated servers accept every call of the coordinator. The COUNT
simulated workers enter the job that they are assigned to, and then report a few steps as often as the coordinator asks.
Each line on standard input is a command, which the process answers with one JSON line. At the end of its input, it
leaves the cluster.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from shoal import _rpc, errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._training.participant import Participant, Report
from shoal._wire import ReportAck
from shoal.status import ServerLoad, StepTiming
from shoal.v1 import coordinator_pb2, job_pb2, parameter_server_pb2, parameter_server_pb2_grpc
from shoal.variables import Variable

# Threads of one process that send reports, each for its part of the workers.
REPORTERS = 8
# Seconds after which a thread checks again whether a report is due.
LOOK_S = 0.02
# Seconds between two rounds of Join.
JOIN_S = 0.5
# Steps in one report: a worker in a small cluster that takes ten steps a second reports as many.
STEPS = 5


class Worker:
    """A simulated worker.

    Attributes:
        heartbeats, reports: numbers of answered heartbeats and reports.
        lives: number of its incarnations.
        learned_at: when it learned that its job had ended, by the monotonic clock. 0 if it has not learned this.
    """

    def __init__(self, client: CoordinatorClient, name: str) -> None:
        self._client = client
        self.heartbeats = self.reports = self.lives = self.step = 0
        self.learned_at = 0.0
        self._participant: Participant | None = None
        self._assigned = threading.Event()
        self._job = ("", 0)
        request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member=name)
        self.membership = MembershipClient(
            client, request, on_reply=self._on_reply, on_incarnation=lambda _: self._on_incarnation()
        )

    def describe(self) -> None:
        """Describes the job that the coordinator assigns."""
        if not self._assigned.wait(60):
            raise SystemExit("a worker got no assignment in 60 s")
        job, assignment = self._job
        life = self.membership.incarnation
        self._participant = Participant(self._client, job, self.membership.member, life, assignment)
        self._participant.describe({"w": Variable((4,))}, samples=0)

    def join(self) -> bool:
        """Asks to be admitted, and returns whether it is admitted."""
        job, assignment = self._job
        life = self.membership.incarnation
        request = job_pb2.JoinRequest(job=job, worker=self.membership.member, incarnation=life, assignment=assignment)
        return self._client.call(self._client.jobs.Join, request).ready

    def report_when_due(self) -> None:
        """Reports some steps if the coordinator's pace asks for it."""
        pace, participant = self.membership.pace, self._participant
        if participant is None or self.learned_at or pace.report_due_s > 0:
            return
        first, self.step = self.step, self.step + STEPS
        timings = tuple(StepTiming(step, time.time(), 0.01, 0.0, 0.08, 0.01) for step in range(first, self.step))
        report = Report(
            self.step, STEPS, samples=32 * STEPS, values={"loss": 0.5}, staleness={1: STEPS}, timings=timings
        )
        try:
            ack = participant.report(report, pace)
        except errors.ShoalError:  # the heartbeat tells why
            return
        self.reports += 1
        if ack is ReportAck.DONE:
            self._learn()

    def _on_reply(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        self.heartbeats += 1
        if reply.job:
            self._job = reply.job, reply.assignment
            self._assigned.set()
        elif self._participant:
            self._learn()

    def _on_incarnation(self) -> None:
        self.lives += 1

    def _learn(self) -> None:
        self.learned_at = self.learned_at or time.monotonic()


class Agreeing:
    """A parameter server that admits and fences all workers, and answers other unary calls with an empty reply."""

    def AdmitWorkers(self, request: Any, _: Any) -> Any:
        return parameter_server_pb2.AdmitWorkersReply(
            results=[parameter_server_pb2.AdmissionResult() for _ in request.workers]
        )

    def FenceWorkers(self, request: Any, _: Any) -> Any:
        return parameter_server_pb2.FenceWorkersReply(committed_steps=[0 for _ in request.workers])

    def __getattr__(self, name: str) -> Any:
        methods = parameter_server_pb2.DESCRIPTOR.services_by_name["ParameterServer"].methods_by_name
        if name not in methods:
            raise AttributeError(name)
        reply = getattr(parameter_server_pb2, methods[name].output_type.name)
        return lambda _request, _context: reply()


def serve(address: str, first: int, count: int) -> None:
    """Runs simulated servers until the end of the input."""
    with ExitStack() as stack:
        for number in range(first, first + count):
            add = parameter_server_pb2_grpc.add_ParameterServerServicer_to_server
            server = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.ParameterServer", add, Agreeing())], threads=2)
            stack.callback(server.stop, 0.1)
            server.start()
            client = CoordinatorClient(address)
            stack.callback(client.close)
            request = coordinator_pb2.RegisterRequest(
                role=coordinator_pb2.SERVER, member=f"server-{number}", address=server.address
            )
            membership = MembershipClient(client, request, load=lambda: (0, 0, ServerLoad()))
            stack.enter_context(membership).start()
        for _ in commands():
            answer({"servers": count})


def work(address: str, first: int, count: int) -> None:
    """Runs simulated workers until the end of the input."""
    stopped = threading.Event()
    with ExitStack() as stack:
        client = CoordinatorClient(address)
        stack.callback(client.close)
        workers = [Worker(client, f"worker-{number}") for number in range(first, first + count)]
        for worker in workers:
            stack.enter_context(worker.membership).start()

        def report(some: list[Worker]) -> None:
            while not stopped.wait(LOOK_S):
                for worker in some:
                    worker.report_when_due()

        reporters = [threading.Thread(target=report, args=(workers[part::REPORTERS],)) for part in range(REPORTERS)]
        for thread in reporters:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stopped.set)  # the last callback runs first
        for command in commands():
            if command == "enter":
                enter(workers)
            answer(
                {
                    "workers": count,
                    "heartbeats": sum(worker.heartbeats for worker in workers),
                    "reports": sum(worker.reports for worker in workers),
                    "lives": sum(worker.lives for worker in workers),
                    "steps": sum(worker.step for worker in workers),
                    "interval_s": max(worker.membership.pace.interval_s for worker in workers),
                    "learned": sum(worker.learned_at > 0 for worker in workers),
                    "learned_at": max(worker.learned_at for worker in workers),
                }
            )


def enter(workers: list[Worker]) -> None:
    """Brings workers into the job that they are assigned to."""
    for worker in workers:
        worker.describe()
    while workers:
        workers = [worker for worker in workers if not worker.join()]
        time.sleep(JOIN_S if workers else 0.0)


def commands() -> Iterator[str]:
    """Yields the lines of the input. The first answer says that all members are registered."""
    yield ""
    for line in sys.stdin:
        yield line.strip()


def answer(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    {"server": serve, "worker": work}[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
