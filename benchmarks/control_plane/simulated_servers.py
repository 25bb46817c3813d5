"""Simulated parameter servers: they speak the real protocol, keep no shards, and agree to everything."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
from members import CONCURRENT, MembersLine, answered, channel, obey

from shoal._rpc import HeartbeatPace
from shoal._security import AccessRole
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, parameter_server_pb2_grpc
from shoal.v1 import parameter_server_pb2 as pb

# As in real servers: the coordinator's channels stay open, and show that they are alive.
SERVER_OPTIONS = [("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000), ("grpc.http2.max_ping_strikes", 0)]


class SimulatedServer(parameter_server_pb2_grpc.ParameterServerServicer):
    """A server that notes when it has admitted all workers of a job, and when it released one.

    Args:
        workers: number of workers of the job.

    Attributes:
        calls: the number of calls that created shards or admitted workers.
        complete_at: when it had admitted all workers, by the monotonic clock; 0: not yet.
        released_at: when it released each worker.
        heartbeats: the number of those that were answered.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._admitted = workers, set[str]()
        self.calls = self.heartbeats = 0
        self.complete_at = 0.0
        self.released_at: dict[str, float] = {}

    async def CreateShards(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return pb.CreateShardsReply()

    async def DropShards(self, request: Any, context: Any) -> Any:
        return pb.DropShardsReply()

    async def AdmitWorkers(self, request: Any, context: Any) -> Any:
        self.calls += 1
        self._admitted.update(worker.worker for worker in request.workers)
        if len(self._admitted) == self._workers:
            self.complete_at = self.complete_at or time.monotonic()
        return pb.AdmitWorkersReply(results=[pb.AdmissionResult() for _ in request.workers])

    async def FenceWorkers(self, request: Any, context: Any) -> Any:
        return pb.FenceWorkersReply(committed_steps=[0 for _ in request.workers])

    async def ReleaseWorkers(self, request: Any, context: Any) -> Any:
        for worker in request.workers:
            self.released_at[worker.worker] = time.monotonic()
        return pb.ReleaseWorkersReply()

    async def live(self, coordinator: str, name: str, address: str, registered: asyncio.Semaphore) -> None:
        """Registers, and then sends heartbeats when they are due."""
        pace = HeartbeatPace()
        async with channel(coordinator, AccessRole.SERVER) as opened:
            stub: Any = coordinator_pb2_grpc.CoordinatorStub(opened)
            request = coordinator_pb2.RegisterRequest(
                role=coordinator_pb2.SERVER, member=name, address=address, process=name
            )
            reply = await answered(stub.Register, request)
            opened.secret = reply.secret
            pace.answered(pace.now, reply.heartbeat_interval_s)
            registered.release()
            heartbeat = coordinator_pb2.HeartbeatRequest(
                member=name, incarnation=reply.incarnation, load=coordinator_pb2.ServerLoad()
            )
            while True:
                await asyncio.sleep(pace.heartbeat_due_s)
                sent_at = pace.now
                reply = await answered(stub.Heartbeat, heartbeat)
                pace.answered(sent_at, reply.heartbeat_interval_s)
                self.heartbeats += 1


async def serve(coordinator: str, first: int, count: int, workers: int) -> None:
    """Runs simulated servers until the end of the input.

    The answer to any command has: how many servers have admitted all workers, and when the last one had; the calls of
    the busiest one; how many workers all servers have released, and when the last one was.
    """
    simulated, registered = [SimulatedServer(workers) for _ in range(count)], asyncio.Semaphore(0)  # type: ignore[abstract]
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as lives:
        running = []
        for number, server in enumerate(simulated, first):
            endpoint = grpc.aio.server(options=SERVER_OPTIONS)
            parameter_server_pb2_grpc.add_ParameterServerServicer_to_server(server, endpoint)
            address = f"127.0.0.1:{endpoint.add_insecure_port('127.0.0.1:0')}"
            await endpoint.start()
            stack.push_async_callback(endpoint.stop, None)
            running.append(lives.create_task(server.live(coordinator, f"server-{number:05}", address, registered)))
            if number - first >= CONCURRENT:
                await registered.acquire()
        for _ in range(min(count, CONCURRENT)):
            await registered.acquire()

        async def handle(_: str) -> MembersLine:
            released = set.intersection(*(set(server.released_at) for server in simulated))
            return {
                "servers": count,
                "heartbeats": sum(server.heartbeats for server in simulated),
                "complete": sum(server.complete_at > 0 for server in simulated),
                "admitted_at": max(server.complete_at for server in simulated),
                "calls": sum(server.calls for server in simulated),
                "released_by_all": {
                    worker: max(server.released_at[worker] for server in simulated) for worker in sorted(released)
                },
            }

        await obey(handle)
        for task in running:
            task.cancel()
