"""Probe of a running cluster for tests: what its servers answered and committed, and sessions in threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal import Client, Session, _rpc
from shoal._wire.placement import Placement
from shoal.v1 import job_pb2, job_pb2_grpc
from shoal_server.shards.machine.events import Admission
from support.clusters import history_server
from support.clusters.presented import as_admin


def placement(client: Client, job: str) -> Placement:
    """Returns the placement of a job."""
    metadata = as_admin(client.address).metadata()
    with _rpc.channel(client.address) as channel:
        request = job_pb2.GetPlacementRequest(job=job)
        reply = job_pb2_grpc.JobsStub(channel).GetPlacement(request, timeout=20, metadata=metadata)
    return Placement.from_proto(reply)


def histories(client: Client, job: str) -> dict[int, list[Admission]]:
    """Returns for each shard the pulls that it answered and the pushes that it committed, oldest first.

    Its server must be a `history_server`.
    """
    shards = placement(client, job).shards
    return {shard.layout.shard: history_server.ask(shard.address, job, shard.layout.shard) for shard in shards}


def leads_of(history: Sequence[Admission]) -> tuple[list[int], dict[str, int]]:
    """Returns how far ahead of the slowest worker each answered pull was, and the steps that each worker finished.

    Both are computed from the pushes before each line, and not from the clocks that the server reports.
    """
    finished = dict.fromkeys({admission.worker for admission in history}, 0)
    leads = []
    for admission in history:
        if admission.kind == "pull":
            leads.append(admission.step - min(finished.values()))
        else:
            finished[admission.worker] = admission.step + 1
    return leads, finished


def in_sessions(
    client: Client, job: str, workers: int, loop: Callable[[Session, int], Any], **options: Any
) -> list[Any]:
    """Runs `loop(session, rank)` in sessions, each in its own thread. Returns the results in order of rank."""

    def run(index: int) -> tuple[int, Any]:
        with client.session(job, workers=workers, worker=f"{job}-{index}", **options) as session:
            return session.rank, loop(session, session.rank)

    with ThreadPoolExecutor(workers) as pool:
        results = [future.result() for future in [pool.submit(run, index) for index in range(workers)]]
    return [result for _, result in sorted(results, key=lambda pair: pair[0])]
