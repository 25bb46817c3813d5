"""A simulated parameter server for benchmarks of the control plane: it keeps no shards."""

import json
import time
from typing import Any

from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc


def say(**line: Any) -> None:
    """Prints a JSON line at once."""
    print(json.dumps(line), flush=True)


class SimulatedServer(parameter_server_pb2_grpc.ParameterServerServicer):
    """Accepts what a coordinator asks for, and reports when it has admitted all workers or released one."""

    def __init__(self, workers: int) -> None:
        self.workers, self.admitted, self.calls = workers, set[str](), 0

    async def CreateShards(self, request: Any, context: Any) -> Any:
        self.calls += 1
        return pb.CreateShardsReply()

    async def DropShards(self, request: Any, context: Any) -> Any:
        return pb.DropShardsReply()

    async def AdmitWorkers(self, request: Any, context: Any) -> Any:
        self.calls += 1
        self.admitted.update(it.worker for it in request.workers)
        if len(self.admitted) == self.workers:
            say(admitted=time.time(), calls=self.calls)
        return pb.AdmitWorkersReply(results=[pb.AdmissionResult() for _ in request.workers])

    async def FenceWorkers(self, request: Any, context: Any) -> Any:
        return pb.FenceWorkersReply(committed_steps=[0 for _ in request.workers])

    async def ReleaseWorkers(self, request: Any, context: Any) -> Any:
        for it in request.workers:
            say(released=time.time(), worker=it.worker)
        return pb.ReleaseWorkersReply()
