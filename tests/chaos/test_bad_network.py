"""Pushes over a bad network, through proxies: each acknowledged push counts exactly once.

Gradients are ones and the rate is 1, so each value is minus the number of updates that were applied.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import _rpc, errors, optim
from shoal._training import start_or_find
from shoal._training.parameters import ParameterClient
from shoal._training.participant import Participant
from shoal._wire import Placement
from shoal.consistency import Consistency
from shoal.v1 import coordinator_pb2, job_pb2
from support import run_lengths
from support.clusters.presented import as_admin
from support.clusters.proxied_cluster import SESSIONS, ProxiedCluster
from support.programs.counted_pushes import SIZE
from support.programs.recovery import Rows
from support.scraping import sample

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    flags = {"coordinator": ["--heartbeat-timeout", "3"]}
    with ProxiedCluster(2, 2, tmp_path_factory.mktemp("store"), flags=flags) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: ProxiedCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
        yield client
        cluster.network.heal()


def counted(cluster: ProxiedCluster, name: str) -> float:
    """Returns a counter of the servers, summed over all of them."""
    return sum(sample(cluster.processes[server].metrics, name) for server in ("server-0", "server-1"))


# Sessions, and the processes that they run in. In the long form, they push 100,000 times over lanes.
SESSION_COUNT, PROCESSES = run_lengths.size((2, 1), (64, 4))
PUSHES = {"tcp": run_lengths.runs(60, 1_563), "grpc": run_lengths.runs(20, 100)}


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("transport", PUSHES)
def test_pushes_count_once_when_replies_are_dropped(
    cluster: ProxiedCluster, client: shoal.Client, transport: str
) -> None:
    """One tenth of the replies of servers and of the coordinator is dropped, each together with its connection."""
    sessions, processes, pushes = SESSION_COUNT, PROCESSES, PUSHES[transport]
    job, share = f"dropped-{transport}", 0.1
    links = cluster.links(SESSIONS, " of server")
    for link in links:
        link.drop_replies(share)
    arguments = [cluster.network[SESSIONS].address, job, str(sessions), str(sessions // processes), str(pushes)]
    with run_lengths.count_runs("dropped_replies", sessions * pushes, "pushes lost or applied twice") as rows:
        acknowledged = run_sessions(processes, arguments, transport)
        for link in links:
            link.heal()
        values = client.pull(job)
        for value in values.values():
            np.testing.assert_array_equal(value, -float(sum(acknowledged)))
        assert acknowledged == [pushes] * sessions
        rows.passes(0.0, sessions * pushes)
        dropped, replies = sum(link.counts.dropped for link in links), sum(link.counts.replies for link in links)
        repeated = counted(cluster, "shoal_server_duplicate_pushes_total")
        rows.metrics |= {
            "pushes lost": 0,
            "pushes applied twice": 0,
            f"replies, {transport}": replies,
            f"replies dropped, {transport}": dropped,
            f"calls recognised, {transport}": repeated,
        }
    print(f"{transport}: {sum(acknowledged)} pushes; {dropped} of {replies} replies dropped; {repeated:.0f} recognised")
    assert repeated, "no push was repeated"


def run_sessions(processes: int, arguments: Sequence[str], transport: str) -> list[int]:
    """Runs processes with sessions. Returns the number of acknowledged pushes of each session."""
    command = [sys.executable, "-m", "support.programs.counted_pushes", *arguments]
    environment = {**os.environ, "SHOAL_TRANSPORT": transport}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS, env=environment)
        for _ in range(processes)
    ]
    try:
        outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * processes
    return [int(line) for output in outputs for line in output.splitlines()]


REPLAYED = run_lengths.runs(50, 1_000)


@pytest.mark.parametrize("mode", [shoal.Asynchronous(), shoal.Synchronous()], ids=str)
@pytest.mark.parametrize("shards", [1, 2])
def test_acknowledged_pushes_that_are_sent_again_are_recognised(
    cluster: ProxiedCluster, client: shoal.Client, mode: Consistency, shards: int
) -> None:
    """Each push is sent again after its answer, and a late copy of an earlier one comes periodically."""
    job = f"replayed-{shards}-{mode}".replace("(", "-").replace(")", "")
    name, sent = "shoal_server_duplicate_pushes_total", REPLAYED // 4
    with (
        run_lengths.count_runs("replayed_pushes", sent, "pushes applied twice") as rows,
        joined(cluster.network[SESSIONS].address, job, mode, shards) as parameters,
    ):
        before = counted(cluster, name)
        ones = {key: np.ones(SIZE, np.float32) for key in "ab"}
        earlier = None
        for number in range(sent):
            parameters.pull()
            push = parameters.prepare(ones, None, 1.0)
            answer = parameters.send(push)
            assert parameters.pusher.send(push) == answer
            if number % 10 == 9 and earlier:
                with pytest.raises(errors.BadRequest, match="only the last push may be repeated"):
                    parameters.pusher.send(earlier)
            earlier = push
            rows.passes(0.0)
        recognised = counted(cluster, name) - before
        for value in client.pull(job).values():
            np.testing.assert_array_equal(value, -float(sent))
    print(f"{mode} on {shards} servers: {sent} pushes sent again, {recognised:.0f} calls recognised")
    # On two servers, each of both phases of a push is sent again, and each of both servers recognises it.
    assert recognised == sent * shards**2


# Samples and epochs: 2 steps in the short form, and about 5 minutes of steps in the long one.
SLOW_SIZE, SLOW_EPOCHS = run_lengths.size((32, 1), (512, 12))
DELAY_S, JITTER_S = run_lengths.size((0.06, 0.01), (0.1, 0.02))
LOSS_WITHIN = 0.01
MEMBERS = ("server-0", "server-1", "worker-0", "worker-1")


@pytest.mark.timeout(900)
def test_a_slow_network_changes_nothing_but_the_time(cluster: ProxiedCluster, client: shoal.Client) -> None:
    """Each segment takes 100 ms in each direction, and one of a hundred 300 ms more."""
    with run_lengths.count_runs("slow_network", 1, "s of training") as rows:
        clean = loss_of(client, client.submit(plane("clean")))
        lives, refused = incarnations(client), {name: faults(cluster, name) for name in FAULTS}
        for link in cluster.links():
            link.delay(DELAY_S, JITTER_S)
            link.stall(0.01, 0.3)
        begun = time.monotonic()
        slow = loss_of(client, client.submit(plane("slow")))
        took = time.monotonic() - begun
        cluster.network.heal()
        stalled = sum(link.counts.stalled for link in cluster.links())
        print(f"loss {slow:.6f}, {clean:.6f} in a clean run; {took:.0f} s; {stalled} segments stalled")
        assert abs(slow - clean) <= LOSS_WITHIN * clean
        assert incarnations(client) == lives, "a member was declared lost"
        assert {name: faults(cluster, name) for name in FAULTS} == refused
        rows.passes(took)
        rows.metrics |= {
            "loss": slow,
            "loss of a clean run": clean,
            "segments stalled": stalled,
            "calls beyond their deadline": 0,
        }


# What counts calls that have met their deadline, or found nobody, by the role that counts them.
FAULTS = {
    "shoal_worker_retries_total": "worker",
    "shoal_worker_trainer_crashes_total": "worker",
    "shoal_server_rejected_pushes_total": "server",
    "shoal_coordinator_retries_total": "coordinator",
    "shoal_coordinator_members_lost_total": "coordinator",
}


def faults(cluster: ProxiedCluster, name: str) -> float:
    """Returns a counter of `FAULTS`, summed over the processes of its role."""
    pages = [process.metrics for process in cluster.processes.values() if process.role == FAULTS[name]]
    return sum(sample(page, name) for page in pages)


def plane(name: str) -> shoal.Job:
    settings: dict[str, Any] = {"size": SLOW_SIZE}
    return shoal.Job(
        "support.programs.recovery:Plane",
        name=name,
        settings=settings,
        workers=2,
        shards=2,
        batch_size=8,
        epochs=SLOW_EPOCHS,
        seed=5,
        optimizer=optim.Adam(0.01),
    )


def loss_of(client: shoal.Client, job: shoal.JobHandle) -> float:
    """Returns the loss of the values at a job's end, over all samples."""
    job.wait(timeout_s=600)
    rows, values = Rows(SLOW_SIZE), client.pull(job)
    np.testing.assert_array_equal(values["seen"], SLOW_EPOCHS)
    return float(((rows.x @ values["w"] - rows.y) ** 2).mean())


def incarnations(client: shoal.Client) -> dict[str, int]:
    """Returns the incarnations of the members that are alive."""
    return {it.member: it.incarnation for it in client.status().members if it.alive and it.member in MEMBERS}


@contextmanager
def joined(address: str, job: str, mode: Consistency, shards: int) -> Iterator[ParameterClient]:
    """Yields the pulls and pushes of the only session of a new job, as a session makes them."""
    variables = {name: np.zeros(SIZE, np.float32) for name in "ab"}
    options = {"workers": 1, "optimizer": optim.SGD(1.0), "consistency": mode, "shards": shards}
    member = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member=f"of-{job}")
    with closing(_rpc.CoordinatorClient(address, credentials=as_admin(address))) as coordinator:
        start_or_find(coordinator, job, options, starts=True)
        with _rpc.MembershipClient(coordinator, member) as membership:
            membership.start()
            presented = membership.credentials_in(job)
            participant = Participant(coordinator, job, member.member, membership.incarnation, credentials=presented)
            participant.describe(variables, samples=0)
            participant.enter().close()
            reply = coordinator.call(coordinator.jobs.GetPlacement, job_pb2.GetPlacementRequest(job=job))
            placement = Placement.from_proto(reply)
            with ParameterClient(
                placement,
                worker=member.member,
                incarnation=membership.incarnation,
                refresh=lambda: placement,
                credentials=presented,
            ) as parameters:
                yield parameters
