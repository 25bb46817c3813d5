from typing import Any

import grpc
import pytest

from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.serving import ParameterServerServicer
from shoal_server.shards import ShardStore
from support.fuzzing.handler_targets import Aborted, Context


class Abandoned(Context):
    """The context of a call whose caller does not wait any more."""

    def is_active(self) -> bool:
        return False


class NoEndpoints:
    """Transports without handlers."""

    def handlers(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("CreateShards", pb.CreateShardsRequest(job="a", generation=1)),
        ("DropShards", pb.DropShardsRequest(job="a")),
        ("FenceWorkers", pb.FenceWorkersRequest(job="a")),
        ("ReleaseWorkers", pb.ReleaseWorkersRequest(job="a")),
        ("AdmitWorkers", pb.AdmitWorkersRequest(job="a", workers=[pb.WorkerAdmission(worker="w0", incarnation=1)])),
    ],
)
def test_an_abandoned_call_that_waited_for_a_thread_changes_nothing(method: str, request_: Any) -> None:
    endpoints: Any = NoEndpoints()
    service: Any = None
    copies: Any = None
    servicer = ParameterServerServicer(ShardStore(), endpoints, service=service, copies=copies, threads={})
    context = Abandoned()
    with pytest.raises(Aborted):
        getattr(servicer, method)(request_, context)
    assert context.code is grpc.StatusCode.CANCELLED
