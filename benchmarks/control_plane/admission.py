"""Benchmark of admission: python benchmarks/control_plane/admission.py [WORKERS] [SERVERS] [STORE] [TIMEOUT_S].

It runs a real coordinator with simulated workers (default: 1,000) and servers (default: 100) on loopback. Two processes
simulate half of the servers each, and two other processes half of the workers each. They use the real protocol, but
open no lanes and send no values.

The script measures the seconds from Submit until every server has admitted every worker, and until Join has told every
worker that it may begin. Then one worker of each process stops sending heartbeats. The script measures the seconds from
its last heartbeat until every server has released it. It prints one JSON line.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import prometheus_client
import structlog
from servicers import SimulatedServer, say

import shoal
from shoal.job import Job
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import coordinator_pb2_grpc, job_pb2, job_pb2_grpc, parameter_server_pb2_grpc
from shoal_coordinator.process import CoordinatorConfig, start_coordinator

PROCESSES = 2
TIMEOUT_S, INTERVAL_S, JOIN_WAIT_S = 10.0, 3.0, 20.0
PATIENCE_S = 300.0
# As in real servers: the coordinator's channels stay open, and show that they are alive.
SERVER_OPTIONS = [("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000), ("grpc.http2.max_ping_strikes", 0)]
JOB = "admission"


async def serve(coordinator: str, first: int, count: int, workers: int) -> None:
    async with grpc.aio.insecure_channel(coordinator) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        servers, beats = [], []
        for number in range(first, first + count):
            server = grpc.aio.server(options=SERVER_OPTIONS)
            simulated = SimulatedServer(workers)  # type: ignore[abstract]
            parameter_server_pb2_grpc.add_ParameterServerServicer_to_server(simulated, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            servers.append(server)
            name = f"server-{number:05}"
            request = members.RegisterRequest(role=members.SERVER, member=name, address=address, process=name)
            incarnation = (await answered(stub.Register, request)).incarnation
            beats.append(asyncio.create_task(beat(stub, name, incarnation)))
        say(ready=count)
        await asyncio.gather(*beats)


async def beat(stub: Any, name: str, incarnation: int) -> None:
    await asyncio.sleep(random.random() * INTERVAL_S)
    while True:
        await answered(stub.Heartbeat, members.HeartbeatRequest(member=name, incarnation=incarnation))
        await asyncio.sleep(INTERVAL_S)


async def work(coordinator: str, first: int, count: int, total: int) -> None:
    async with grpc.aio.insecure_channel(coordinator) as channel:
        stub, jobs = coordinator_pb2_grpc.CoordinatorStub(channel), job_pb2_grpc.JobsStub(channel)
        variables = [shoal.Variable((64, 64)).to_proto(f"layer-{number}") for number in range(total)]
        lives = []
        for number in range(first, first + count):
            name = f"worker-{number:05}"
            request = members.RegisterRequest(role=members.WORKER, member=name, process=name)
            life, victim = (await answered(stub.Register, request)).incarnation, number == first + count - 1
            lives.append(asyncio.create_task(train(stub, jobs, name, life, variables, victim)))
        say(ready=count)
        await asyncio.gather(*lives)


async def train(stub: Any, jobs: Any, name: str, life: int, variables: list[Any], victim: bool) -> None:
    """Enters the job and sends heartbeats. The victim stops its heartbeats some time after it has entered."""
    entering: asyncio.Task[None] | None = None
    await asyncio.sleep(random.random() * INTERVAL_S)
    until = float("inf")
    while time.monotonic() < until:
        reply = await answered(stub.Heartbeat, members.HeartbeatRequest(member=name, incarnation=life))
        last = time.time()
        if reply.job and entering is None:
            entering = asyncio.create_task(enter(jobs, name, life, reply.assignment, variables))
        if victim and entering and entering.done() and until == float("inf"):
            until = time.monotonic() + 5.0
        await asyncio.sleep(INTERVAL_S)
    say(silent=last, worker=name)
    await asyncio.sleep(PATIENCE_S)


async def enter(jobs: Any, name: str, life: int, assignment: int, variables: list[Any]) -> None:
    call = {"job": JOB, "worker": name, "incarnation": life, "assignment": assignment}
    await answered(jobs.Describe, job_pb2.DescribeRequest(variables=variables, samples=1 << 20, **call))
    while not (await answered(jobs.Join, job_pb2.JoinRequest(wait_s=JOIN_WAIT_S, **call))).ready:
        pass
    say(joined=time.time(), worker=name)


async def answered(method: Any, request: Any) -> Any:
    """Makes a call, and repeats it while the coordinator refuses it because of too many calls."""
    while True:
        try:
            return await method(request)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise
            await asyncio.sleep(random.random())


@contextmanager
def simulated(role: str, coordinator: str, count: int, other: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts the processes of a role, and waits until their members are registered."""
    share, running = count // PROCESSES, []
    for number in range(PROCESSES):
        command = [sys.executable, __file__, role, coordinator, str(number * share), str(share), str(other)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    try:
        for process in running:
            assert process.stdout
            assert "ready" in json.loads(process.stdout.readline())
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def lines(processes: list[subprocess.Popen[str]], key: str, count: int) -> list[dict[str, Any]]:
    """Returns the lines that have a key. Each process writes the same number of them."""
    found = []
    for process in processes:
        assert process.stdout
        left = count // len(processes)
        while left:
            line = json.loads(process.stdout.readline())
            if key in line:
                found.append(line)
                left -= 1
    return found


def main(workers: int, servers: int, store: str, timeout_s: float) -> None:
    structlog.configure(processors=[lambda *_: (_ for _ in ()).throw(structlog.DropEvent)])
    config = CoordinatorConfig(
        listen="127.0.0.1:0", store=store, heartbeat_timeout_s=timeout_s, heartbeat_interval_s=INTERVAL_S
    )
    process = start_coordinator(config, prometheus_client.CollectorRegistry())
    with (
        simulated("servers", process.address, servers, workers) as serving,
        simulated("workers", process.address, workers, servers) as working,
        grpc.insecure_channel(process.address) as channel,
    ):
        job = Job("m:f", name=JOB, workers=workers, shards=servers)
        cpu, start = time.process_time(), time.time()
        job_pb2_grpc.JobsStub(channel).Submit(job_pb2.SubmitRequest(spec=job.to_proto()))
        admitted = lines(serving, "admitted", servers)
        admitted_s = max(it["admitted"] for it in admitted) - start
        joined_s = max(it["joined"] for it in lines(working, "joined", workers)) - start
        cpu_s = time.process_time() - cpu
        silent = {it["worker"]: it["silent"] for it in lines(working, "silent", len(working))}
        released = lines(serving, "released", servers * len(silent))
        assert {it["worker"] for it in released} == silent.keys()
        say(
            workers=workers,
            servers=servers,
            store="memory" if store == "memory" else "file",
            admitted_s=round(admitted_s, 2),
            joined_s=round(joined_s, 2),
            coordinator_cpu_s=round(cpu_s, 2),
            calls_a_server=max(it["calls"] for it in admitted),
            timeout_s=timeout_s,
            released_after_s=round(max(it["released"] - silent[it["worker"]] for it in released), 2),
            load=[round(it, 1) for it in os.getloadavg()],
        )
    process.stop()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["servers", address, first, count, other]:
            asyncio.run(serve(address, int(first), int(count), int(other)))
        case ["workers", address, first, count, other]:
            asyncio.run(work(address, int(first), int(count), int(other)))
        case arguments:
            defaults = ["1000", "100", "memory", str(TIMEOUT_S)]
            many, few, where, lease = [*arguments, *defaults[len(arguments) :]]
            main(int(many), int(few), where, float(lease))
