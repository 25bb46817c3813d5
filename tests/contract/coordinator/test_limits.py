"""Limits of jobs, of their variables and of lists, over real gRPC: refusals have a status, a name and a count."""

from collections.abc import Iterator

import grpc
import pytest

from shoal import _rpc, errors
from shoal._limits import refusals
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import coordinator_pb2_grpc, job_pb2_grpc, parameter_server_pb2, tensor_pb2
from shoal.v1 import job_pb2 as jobs
from shoal.variables import Variable
from shoal_coordinator.cluster import JobLimits
from support.clusters.coordinator_rig import Rig, job

LIMITS = JobLimits(live_jobs=4, submitter_jobs=3, variables=2, nbytes=100)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(jobs=LIMITS)
    try:
        yield rig
    finally:
        rig.stop()


def variables(*shapes: int) -> list[tensor_pb2.Variable]:
    return [Variable(shape).to_proto(f"v{number}") for number, shape in enumerate(shapes)]


def hostile(shape: list[int]) -> list[tensor_pb2.Variable]:
    message = Variable(()).to_proto("v")
    message.shape.extend(shape)
    return [message]


@pytest.mark.parametrize(
    ("described", "limit"),
    [
        (variables(1, 1, 1), "JOB_VARIABLES"),
        (variables(20, 20), "JOB_BYTES"),
        (hostile([1] * 65), "TENSOR_RANK"),
        (hostile([1 << 63]), "TENSOR_BYTES"),
        (hostile([(1 << 64) - 1] * 32), "TENSOR_BYTES"),
    ],
    ids=["variables", "bytes", "rank 65", "2^63 elements", "2^2048 elements"],
)
def test_a_description_beyond_a_limit_is_refused_before_anything_is_placed(
    rig: Rig, described: list[tensor_pb2.Variable], limit: str
) -> None:
    rig.register(members.WORKER, "w0")
    rig.submit(job())
    before = refusals("coordinator")[limit]
    with grpc.insecure_channel(rig.process.address) as channel:
        request = jobs.DescribeRequest(job="a", worker="w0", incarnation=rig.lives["w0"], variables=described)
        with pytest.raises(grpc.RpcError) as refused:
            job_pb2_grpc.JobsStub(channel).Describe(request, timeout=5)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"the limit {limit} is" in str(refused.value.details())
    assert refusals("coordinator")[limit] == before + 1
    assert not any(notes.of(parameter_server_pb2.CreateShardsRequest) for notes in rig.notes.values())


def test_jobs_of_one_submitter_are_limited_also_after_a_restart(tmp_path: object) -> None:
    rig = Rig(store=f"{tmp_path}/store.db", jobs=LIMITS)
    try:
        for name in "abc":
            rig.submit(job(name))
        text = r"127\.0\.0\.1 has 3 live jobs; the limit SUBMITTER_JOBS is 3 \(--max-submitter-jobs\)"
        with pytest.raises(errors.Overloaded, match=text):
            rig.submit(job("d"))
        rig.restart()
        with pytest.raises(errors.Overloaded, match=text):
            rig.submit(job("d"))
        rig.job("Cancel", job="a")
        rig.submit(job("d"))
    finally:
        rig.stop()


@pytest.mark.parametrize("token", ["x" * 5_000_000, "\0", "../../etc/passwd", "am9iOi0x", "%00", "9" * 200])
def test_a_page_token_that_is_none_is_a_bad_request(rig: Rig, token: str) -> None:
    with _rpc.channel(rig.process.address) as channel:
        with pytest.raises(errors.BadRequest), _rpc.as_shoal_errors(rig.process.address):
            job_pb2_grpc.JobsStub(channel).List(jobs.ListRequest(page_token=token), timeout=5)
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        with pytest.raises(errors.BadRequest), _rpc.as_shoal_errors(rig.process.address):
            stub.GetStatus(members.GetStatusRequest(page_token=token), timeout=5)
