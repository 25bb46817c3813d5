"""Simulated workers: they speak the real protocol, and move no values.

A worker registers, sends heartbeats when they are due, enters the job that it is assigned to, and then reports a few
steps as often as the coordinator asks. It leases ranges of samples, and asks for the next one when its steps have used
all samples of the last one.
"""

import asyncio
import random
import time
from functools import cache
from typing import Any

import grpc
from members import CONCURRENT, MembersLine, PresentingChannel, answered, channel, obey

import shoal
from shoal._rpc import HeartbeatPace
from shoal._security import AccessRole
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, job_pb2, job_pb2_grpc

# Seconds for which one Join waits, and the shape of a variable.
JOIN_WAIT_S = 20.0
SHAPE = (64, 64)
# Steps in one report, as of a worker that makes ten a second in a small cluster, and samples of a step.
STEPS, BATCH = 5, 32
# Samples of an epoch. By default, each of a thousand workers then leases a range for 13 reports.
SAMPLES = 1 << 24


@cache
def described(variables: int) -> list[Any]:
    """Returns the description of the variables, which all workers send."""
    return [shoal.Variable(SHAPE).to_proto(f"layer-{number}") for number in range(variables)]


class Worker:
    """A simulated worker.

    Args:
        name: its id.
        variables: number of variables that it describes.

    Attributes:
        heartbeats, reports, leases: numbers of those that were answered.
        lost: how often the coordinator had declared it lost.
        steps: those that it has reported.
        joined_at: when it learned that it may train, by the monotonic clock; 0: not yet.
        learned_at: when it learned that its job had ended; 0: not yet.
        heard_at: when it sent the last call that was answered.
    """

    def __init__(self, name: str, variables: int) -> None:
        self.name, self._variables = name, variables
        self.heartbeats = self.reports = self.leases = self.lost = self.steps = 0
        self.joined_at = self.learned_at = self.heard_at = 0.0
        self.pace = HeartbeatPace()
        self._incarnation = self._assignment = 0
        self._job = ""
        self._lease = self._unused = 0  # number of its lease, and samples of it that no step has used

    async def live(self, coordinator: str, registering: asyncio.Semaphore, registered: asyncio.Semaphore) -> None:
        """Takes part in the cluster until it is cancelled."""
        async with channel(coordinator, AccessRole.WORKER) as opened, asyncio.TaskGroup() as tasks:
            stub: Any = coordinator_pb2_grpc.CoordinatorStub(opened)
            jobs: Any = job_pb2_grpc.JobsStub(opened)
            async with registering:
                await self._register(opened, stub)
            registered.release()
            while True:
                try:
                    reply = await self._heartbeat(stub)
                except grpc.aio.AioRpcError:  # the coordinator has declared it lost
                    self.lost += 1
                    self._job = ""
                    await self._register(opened, stub)
                    continue
                if reply.job and not self._job:
                    self._job, self._assignment = reply.job, reply.assignment
                    tasks.create_task(self._train(jobs, registering))
                elif self._job and not reply.job:
                    self._learn()
                while (due_s := self.pace.heartbeat_due_s) > 0:  # a report puts it off
                    await asyncio.sleep(due_s)

    async def _register(self, opened: PresentingChannel, stub: Any) -> None:
        opened.secret = ""
        request = coordinator_pb2.RegisterRequest(
            role=coordinator_pb2.WORKER, member=self.name, process=f"{self.name}-{self.lost}"
        )
        reply = await answered(stub.Register, request)
        self._incarnation, opened.secret = reply.incarnation, reply.secret
        self.pace.answered(self.pace.now, reply.heartbeat_interval_s)

    async def _heartbeat(self, stub: Any) -> Any:
        request = coordinator_pb2.HeartbeatRequest(member=self.name, incarnation=self._incarnation)
        sent_at, heard_at = self.pace.now, time.monotonic()
        reply = await answered(stub.Heartbeat, request)
        self.pace.answered(sent_at, reply.heartbeat_interval_s)
        self.heard_at = heard_at
        self.heartbeats += 1
        return reply

    async def _train(self, jobs: Any, describing: asyncio.Semaphore) -> None:
        """Enters the job, then reports until it ends."""
        call = {
            "job": self._job,
            "worker": self.name,
            "incarnation": self._incarnation,
            "assignment": self._assignment,
        }
        try:
            async with describing:
                variables = described(self._variables)
                await answered(jobs.Describe, job_pb2.DescribeRequest(variables=variables, samples=SAMPLES, **call))
            while not (await answered(jobs.Join, job_pb2.JoinRequest(wait_s=JOIN_WAIT_S, **call), None)).ready:
                pass
            self.joined_at = time.monotonic()
            while not self.learned_at:
                await self._take_samples(jobs, call)
                await asyncio.sleep(self.pace.report_due_s)
                if await self._report(jobs, call):
                    self._learn()
        except grpc.aio.AioRpcError:  # the heartbeat tells why
            return

    async def _take_samples(self, jobs: Any, call: dict[str, Any]) -> None:
        """Leases the next range if there are not enough samples for the steps of a report."""
        if self._unused < STEPS * BATCH:
            reply = await answered(jobs.Lease, job_pb2.LeaseRequest(done=self._lease, **call))
            self.leases += 1
            samples = reply.range.stop - reply.range.start
            # Workers do not lease in step: each has used a part of its first range.
            self._unused = samples if self._lease else random.Random(self.name).randint(0, samples)
            self._lease = reply.range.lease
        self._unused -= STEPS * BATCH

    async def _report(self, jobs: Any, call: dict[str, Any]) -> bool:
        """Reports some steps, and returns whether the job has ended."""
        first, self.steps = self.steps, self.steps + STEPS
        began = time.time()
        timings = [
            job_pb2.StepTiming(step=step, began=began, pull=0.01, compute=0.08, push=0.01)
            for step in range(first, self.steps)
        ]
        request = job_pb2.ReportRequest(
            step=self.steps,
            accepted=self.steps,
            samples=BATCH * self.steps,
            values={"loss": 0.5},
            staleness={1: self.steps},
            timings=timings,
            **call,
        )
        sent_at, heard_at = self.pace.now, time.monotonic()
        self.pace.reporting()
        reply = await answered(jobs.Report, request)
        self.pace.answered(sent_at, reply.heartbeat_interval_s)
        self.heard_at = heard_at
        self.reports += 1
        return bool(reply.done)

    def _learn(self) -> None:
        self.learned_at = self.learned_at or time.monotonic()


async def work(coordinator: str, first: int, count: int, variables: int) -> None:
    """Runs simulated workers until the end of the input.

    The command `silence` lets the last worker fall silent. The answer to any command has the sums of the workers'
    counters, when the last one joined and learned of the end, and the silent workers with their last calls.
    """
    workers = [Worker(f"worker-{number:05}", variables) for number in range(first, first + count)]
    silent: dict[str, float] = {}
    registering, registered = asyncio.Semaphore(CONCURRENT), asyncio.Semaphore(0)
    async with asyncio.TaskGroup() as lives:
        tasks = [lives.create_task(worker.live(coordinator, registering, registered)) for worker in workers]
        for _ in workers:
            await registered.acquire()

        async def handle(command: str) -> MembersLine:
            if command == "silence":
                tasks[-1].cancel()
                await asyncio.wait([tasks[-1]])
                silent[workers[-1].name] = workers[-1].heard_at
                del tasks[-1], workers[-1]
            return {
                "workers": len(workers),
                "heartbeats": sum(worker.heartbeats for worker in workers),
                "reports": sum(worker.reports for worker in workers),
                "leases": sum(worker.leases for worker in workers),
                "lost": sum(worker.lost for worker in workers),
                "steps": sum(worker.steps for worker in workers),
                "joined": sum(worker.joined_at > 0 for worker in workers),
                "joined_at": max(worker.joined_at for worker in workers),
                "learned": sum(worker.learned_at > 0 for worker in workers),
                "learned_at": max(worker.learned_at for worker in workers),
                "interval_s": max(worker.pace.interval_s for worker in workers),
                "silent": silent,
            }

        await obey(handle)
        for task in tasks:
            task.cancel()
