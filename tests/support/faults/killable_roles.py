"""Parameter servers, workers and ranks of groups that tests kill, each a process that starts within milliseconds.

They are forks of one process, the nursery. The nursery has no threads, and has already imported and compiled what the
forks need. The shared-memory segments of the forks are in a folder of the test, apart from all other segments.

A doomed process counts the lines that it executes in the code that shares memory. At the n-th such line, it kills
itself by SIGKILL. A test repeats this with each n, and so covers every moment of this code.
"""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from shoal import _rpc, consistency, errors, optim
from shoal._role.logs import configure_logging
from shoal._training.parameters import ParameterClient
from shoal._transport import TokenSecurity, lane_transport, server_connection, shared_memory
from shoal._transport import lane as _lane
from shoal._transport import lane_socket as _lane_socket
from shoal._transport import segment as _segment
from shoal._transport.frames import PARAMETER_SERVER
from shoal._transport.lane import Lane
from shoal._transport.segment import Segment, remove_stale
from shoal._wire.placement import Placement
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_distribute import MultiWorkerMirroredStrategy
from shoal_distribute.collectives import Group, group, host_rings, mesh, ring, shared_blocks, watch
from shoal_distribute.collectives.watch import SILENT_S
from shoal_server.optimizers import compilation
from shoal_server.optimizers.kernel_threads import THREADS_VARIABLE
from shoal_server.process import Server, ServerConfig
from shoal_server.serving import chunk_frames, lane_endpoint
from support.faults.doom import Doom
from support.faults.killable_role import LONGEST_LINE, TIMEOUT_S, KillableRole

VARIABLES = {"w": Variable((100_000,))}  # 400 kB, enough for memory to be shared
RETRY_FOR_S = 0.2
_SERVER_CODE = {lane_endpoint.__file__, chunk_frames.__file__, _lane.__file__, _lane_socket.__file__, _segment.__file__}
_WORKER_CODE = {
    server_connection.__file__,
    shared_memory.__file__,
    lane_transport.__file__,
    _lane.__file__,
    _lane_socket.__file__,
    _segment.__file__,
}
_RANK_CODE = {
    *(str(module.__file__) for module in (group, host_rings, mesh, ring, shared_blocks, watch)),
    _lane.__file__,
    _lane_socket.__file__,
}

Say = Callable[[str], None]


class Nursery:
    """Starts processes that tests may kill. It is a context manager, and ends all of them.

    Args:
        folder: an empty folder in a tmpfs, for their segments.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(TIMEOUT_S)
        self._reports: list[socket.socket] = []
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), str(folder)]
            # One thread: what others held at a fork, nobody would give back.
            environment = {**os.environ, THREADS_VARIABLE: "1", "PYTHONPATH": str(Path(__file__).parents[2])}
            self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])

    def server(self, **options: Any) -> KillableRole:
        """Starts a parameter server with one shard. It sends its address, and then begins to count lines for its doom.

        Args:
            options: `doom`: the line at which it dies.
        """
        return self._start("serve", **options)

    def worker(self, address: str, **options: Any) -> KillableRole:
        """Starts a worker. After each step it sends its number of steps, and it sends "unreachable" when its server is.

        Args:
            address: address of its server.
            options: `doom`: the line at which it dies.
        """
        return self._start("train", address=address, **options)

    def mute(self, address: str) -> KillableRole:
        """Starts a client that connects to lanes and creates a segment. It sends the name here, but no hello there."""
        return self._start("say_nothing", address=address)

    def ranks(self, count: int, **options: Any) -> list[KillableRole]:
        """Starts the ranks of a group. Each sends "ready" after its first all-reduce, and then reduces until it fails.

        Then it sends its error. Its exit status is not 0 if a sum was wrong, or if the error is not that of a rank.

        Args:
            count: number of ranks.
            options: `share`: whether they use shared memory. `hosts`: the host of each rank. `silent_s`: see
                `Group.open`. `dooms`: by rank, as text, the line at which it dies.
        """
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listening]
        ranks = []
        for rank, each in enumerate(listening):
            with each:
                ranks.append(self._start("reduce", each, rank=rank, addresses=addresses, **options))
        return ranks

    def elastic_ranks(
        self, coordinator: str, group_name: str, workers: int, count: int, doom: int = 0
    ) -> list[KillableRole]:
        """Starts processes of an elastic group. After each step, each sends its progress, its weight and their number.

        Args:
            coordinator: address of the coordinator.
            group_name: name of the group.
            workers: number of processes of the group.
            count: number of processes to start.
            doom: the line after the first step at which the last one dies; 0 for none.
        """
        dooms = [0] * (count - 1) + [doom]
        named = {"coordinator": coordinator, "group_name": group_name, "workers": workers}
        return [self._start("adapt", **named, doom=it) for it in dooms]

    def segments(self) -> set[str]:
        """Returns the names of the segments that exist."""
        return {file.name for file in self.folder.rglob("*") if file.is_file()}

    def _ask(self, order: dict[str, Any], descriptors: list[int]) -> int:
        """Sends an order and waits for the answer."""
        socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
        answer = self._orders.recv(LONGEST_LINE)
        assert answer, "the nursery is gone"
        return int(answer)

    def _start(self, kind: str, *passed: socket.socket, **options: Any) -> KillableRole:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._reports.append(ours)
        with theirs:
            descriptors = [theirs.fileno(), *(each.fileno() for each in passed)]
            pid = self._ask({"start": kind, "options": options}, descriptors)
            return KillableRole(pid, ours, lambda: self._ask({"reap": pid}, []), self.folder)

    def __enter__(self) -> "Nursery":
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()  # by which it ends, and ends all that it has started
        self._process.wait(TIMEOUT_S)
        for reports in self._reports:
            reports.close()


# The nursery's side.


def nurse(orders: socket.socket) -> None:
    """Starts and reaps processes until the other end is closed; then ends those that are left."""
    living = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, LONGEST_LINE, 2)
        if not message:
            break
        order = json.loads(message)
        if "reap" in order:
            living.discard(order["reap"])
            answer = os.waitstatus_to_exitcode(os.waitpid(order["reap"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                orders.close()
                live(order["start"], *(socket.socket(fileno=each) for each in descriptors), options=order["options"])
            for descriptor in descriptors:
                os.close(descriptor)
            living.add(answer)
        orders.send(str(answer).encode())
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def live(kind: str, reports: socket.socket, *passed: socket.socket, options: dict[str, Any]) -> None:
    """Runs a process of the nursery. It does not return."""
    status = 1
    try:
        KINDS[kind](lambda what: reports.sendall(what.encode()), *passed, **options)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def serve(say: Say, doom: int = 0) -> None:
    end = Doom(doom, _SERVER_CODE) if doom else None
    coordinator = start_coordinator(
        CoordinatorConfig(listen="127.0.0.1:0", heartbeat_interval_s=0.1), CollectorRegistry()
    )
    address = Server(ServerConfig("server-0", coordinator.address), CollectorRegistry()).address
    placement = placement_on(address)
    request = pb.CreateShardsRequest(
        job=placement.job,
        generation=placement.generation,
        variables=[variable.to_proto(name) for name, variable in VARIABLES.items()],
        shards=[shard.layout.to_proto() for shard in placement.shards],
        optimizer=optim.SGD(1.0).to_proto(),
        consistency=consistency.Asynchronous().to_proto(),
    )
    with _rpc.channel(address) as channel:
        ParameterServerStub(channel).CreateShards(request)
    if end:
        end.begin()
    say(address)
    signal.pause()


def placement_on(address: str) -> Placement:
    """Returns the placement of the only job on the only server."""
    return Placement("job", 1, VARIABLES, assign_shards(plan_shards(VARIABLES, 1), [Candidate("server-0", address, 0)]))


def train(say: Say, address: str, doom: int = 0) -> None:
    placement = placement_on(address)
    name = f"worker-{os.getpid()}"
    with _rpc.channel(address) as channel:
        admission = pb.WorkerAdmission(worker=name, incarnation=1, rank=os.getpid())
        request = pb.AdmitWorkersRequest(job=placement.job, workers=[admission])
        first = ParameterServerStub(channel).AdmitWorkers(request).results[0].step
    if doom:
        Doom(doom, _WORKER_CODE).begin()
    try:
        with ParameterClient(
            placement,
            worker=name,
            incarnation=1,
            step=first,
            refresh=lambda: placement,
            retry_for_s=RETRY_FOR_S,
            transport="auto",
        ) as client:
            for step in itertools.count(1):
                check_step(client)
                say(str(step))
    except errors.Unreachable:
        say("unreachable")
    signal.pause()


def check_step(client: ParameterClient) -> None:
    """Takes a step. It keeps no values after it returns, because they would keep their segment."""
    values = client.pull()["w"]
    assert np.ptp(values) == 0, "a push has counted in part"
    client.push({"w": np.ones_like(values)})


def say_nothing(say: Say, address: str) -> None:
    with _rpc.channel(address) as channel:
        offer = ParameterServerStub(channel).Attach(pb.AttachRequest())
    lane = Lane.connect(*_rpc.parse_address(offer.address), PARAMETER_SERVER, timeout_s=TIMEOUT_S)
    with Segment.create(1 << 20) as segment:
        say(segment.name)
        signal.pause()
    lane.close()


def reduce(
    say: Say,
    listening: socket.socket,
    rank: int,
    addresses: list[str],
    share: bool = True,
    hosts: Sequence[int] = (),
    silent_s: float = SILENT_S,
    dooms: dict[str, int] | None = None,
) -> None:
    doom = (dooms or {}).get(str(rank))
    end = Doom(doom, _RANK_CODE) if doom else None
    of_host = Path(sys.argv[2], str(hosts[rank] if hosts else 0))  # in the folder that `main` has got
    of_host.mkdir(exist_ok=True)
    options: dict[str, Any] = {"share": share, "directory": of_host, "silent_s": silent_s}
    security = TokenSecurity(b"of this test")
    with Group.open(rank, addresses, security=security, listening=listening, **options) as joined:
        array = np.empty(1_000_003, np.float32)
        try:
            for step in itertools.count(1):
                array.fill(step + rank)
                joined.all_reduce(array)
                expected = joined.ranks * step + joined.ranks * (joined.ranks - 1) / 2
                assert (array == expected).all(), "the sum is wrong"
                if step == 1:
                    say("ready")
                    if end:
                        end.begin()
        except (errors.RankLost, errors.RanksDisagree) as error:
            say(error.message)


def adapt(say: Say, coordinator: str, group_name: str, workers: int, doom: int = 0) -> None:
    end = Doom(doom, _RANK_CODE) if doom else None
    strategy = MultiWorkerMirroredStrategy(
        devices=["/cpu:0"], workers=workers, coordinator=coordinator, group_name=group_name
    )
    optimizer = optim.SGD(1.0)
    with strategy.scope():
        weights = strategy.create_variable("w", np.zeros(300_001))
        strategy.adopt_optimizer(optimizer)
    gradient = np.ones(weights.shape)
    while True:
        step = strategy.progress
        strategy.elastic(strategy.run, lambda: strategy.apply_gradients(optimizer, [(gradient, weights)]))
        values = weights.numpy()
        assert np.ptp(values) == 0, "a step has counted in part"
        assert strategy.iterations(optimizer) == strategy.progress > step
        say(f"{strategy.progress} {-values[0]:.0f} {strategy.num_replicas_in_sync}")
        if end:
            end.begin()


KINDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "train": train,
    "say_nothing": say_nothing,
    "reduce": reduce,
    "adapt": adapt,
}


def main(descriptor: str, folder: str) -> None:
    # What all these processes take for /dev/shm.
    functions: tuple[Any, ...] = (Segment.create, Segment.open)
    for function in functions:
        function.__func__.__kwdefaults__["directory"] = Path(folder)
    remove_stale.__defaults__ = (Path(folder),)
    configure_logging("console", "error")
    compilation.warm_up()
    with socket.socket(fileno=int(descriptor)) as orders:
        nurse(orders)


if __name__ == "__main__":
    main(*sys.argv[1:])
