"""Benchmark of checkpoints of 256 MB: python benchmarks/checkpoints.py speed|slowdown, prints one JSON line.

speed: One server holds four shards with Adam's slots. It saves them to a temporary folder: it takes the cut and writes
       the files and the manifest. The save ends when all of these are durable on the disk. Then the server restores the
       shards. For comparison, the script writes the same number of bytes to one file with fsync, and reads them into
       memory that is already allocated, as the server's memory is. The server and this comparison take turns. The page
       cache has room for all files while they are written. The script drops the files from the page cache before they
       are read.
slowdown: A session takes steps on two servers, which together hold as much state as that of `speed`. The run consists
       of stretches of 3 s or more. Every other stretch starts with a checkpoint and lasts until the checkpoint is
       complete. The gradients are computed before the run, so only the servers and the connections can slow down.
       There is no second worker: it would use the cores of a small machine and hide the slowdown.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

import shoal
from shoal import optim
from shoal._checkpoint import Catalogue, FileEntry, LocalStorage, Manifest
from shoal.consistency import Asynchronous
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_coordinator.cluster import plan_shards
from shoal_server.checkpoints import CheckpointWriter, cut_session
from shoal_server.shards import JobShardConfig, ShardStore

ROUNDS = 7
BYTES = 256 * 10**6
SHARDS, VARIABLES, COLUMNS = 4, 32, 1000
JOB, GENERATION = "job", 1
SPARE_BYTES = 32 << 20
# The target assumes one checkpoint in this period. The benchmark takes more of them.
PERIOD_S = 10.0
CHECKPOINTS, STRETCH_S = 20, 3.0
MB, GB = 10**6, 10**9


def variables_of(size: int) -> dict[str, Variable]:
    """Returns variables that, with Adam's two slots, take about `size` bytes."""
    rows = size // (3 * 4 * VARIABLES * COLUMNS)
    return {f"dense_{number}": Variable((rows, COLUMNS)) for number in range(VARIABLES)}


class Server:
    """The shards and the checkpoint writer of a server, without a network."""

    def __init__(self, root: Path, size: int) -> None:
        variables = variables_of(size)
        self.nbytes = 3 * sum(variable.nbytes for variable in variables.values())
        self._store = ShardStore(lambda _seconds: None)
        config = JobShardConfig(JOB, GENERATION, variables, optim.Adam(0.001), Asynchronous(), seed=1)
        self._store.create(config, plan_shards(variables, SHARDS, None))
        self._folder = LocalStorage(root)
        self._catalogue = Catalogue(self._folder)
        self._writer = CheckpointWriter(self._folder)
        self._number = 0

    def save(self) -> None:
        """Saves a checkpoint, from the cut to the manifest."""
        self._number += 1
        held = pb.HoldCommitsRequest(job=JOB, generation=GENERATION, cut=self._number)
        cut_session.hold(self._store, self._writer, held)
        request = pb.SaveRequest(job=JOB, generation=GENERATION, cut=self._number, number=self._number)
        cut_session.save(self._store, self._writer, request)
        reply = pb.CollectFilesReply()
        while not reply.done:
            collected = pb.CollectFilesRequest(job=JOB, number=self._number, within_s=10)
            reply = cut_session.collect(self._store, self._writer, collected)
        entries = tuple(FileEntry(file.name, file.bytes, tuple(file.sums)) for file in reply.files)
        self._catalogue.publish(Manifest(JOB, self._number, 0.0, 0, 0, {}, (), entries))

    def restore(self) -> None:
        """Restores the last checkpoint."""
        request = pb.RestoreRequest(job=JOB, generation=GENERATION, from_job=JOB, number=self._number)
        cut_session.restore(self._store, self._folder, request, lambda: True)

    def forget(self) -> None:
        """Removes the last checkpoint from the disk."""
        self._catalogue.remove(JOB, self._number)

    def close(self) -> None:
        self._writer.close()
        self._store.clear()


class PlainFile:
    """One file with as many bytes as a checkpoint, for comparison."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8).data
        self._target = np.ones(nbytes, np.uint8).data

    def write(self) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        rest = self._data
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
        os.close(descriptor)

    def read(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY)
        start, rest = 0, self._target
        while rest:
            count = os.preadv(descriptor, [rest], start)
            start, rest = start + count, rest[count:]
        os.close(descriptor)

    def forget(self) -> None:
        self._path.unlink()


def leave_cache(folder: Path) -> None:
    """Drops the files of a folder from the page cache, as a restart of the machine does."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def timed(action: Callable[[], None]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def measured(folder: Path, size: int, rounds: int) -> dict[str, float]:
    """Returns the medians over the rounds, in GB/s. The first round is a warm-up and does not count."""
    server = Server(folder / "checkpoints", size)
    plain = PlainFile(folder / "plain", server.nbytes)
    turns = [
        ({"plain_write": plain.write, "plain_read": plain.read}, plain.forget),
        ({"save": server.save, "restore": server.restore}, server.forget),
    ]
    seconds: dict[str, list[float]] = {name: [] for actions, _ in turns for name in actions}
    for _ in range(rounds + 1):
        for actions, forget in turns:
            # Memory for the page cache that has been touched: a virtual machine may take seconds to find a GB of it,
            # and whose turn that falls into is chance.
            np.ones(server.nbytes + SPARE_BYTES, np.uint8)
            for name, action in actions.items():
                leave_cache(folder)
                seconds[name].append(timed(action))
            forget()
        turns.reverse()
    server.close()
    speeds = {f"{name}_gb_per_s": server.nbytes / statistics.median(took[1:]) / GB for name, took in seconds.items()}
    return {**speeds, "mb": server.nbytes / MB}


class Training:
    """The steps of a session, and the checkpoints that its job takes at the same time.

    Args:
        client: the client of the cluster.
        session: the session, which is open.
        variables: the job's variables.
        seconds: a stretch of steps lasts at least so long.
    """

    def __init__(
        self, client: shoal.Client, session: shoal.Session, variables: Mapping[str, Variable], seconds: float
    ) -> None:
        self._job, self._session, self._seconds = client.job(session.job), session, seconds
        self._gradients = {name: np.full(it.shape, 1e-3, np.float32) for name, it in variables.items()}
        self._aside = ThreadPoolExecutor(1)

    def stretch(self, done: Callable[[], bool] = lambda: True) -> tuple[int, float]:
        """Takes steps until the stretch is over. Returns their number and the seconds that they took."""
        steps, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < self._seconds or not done():
            self._session.pull()
            self._session.push(self._gradients)
            steps += 1
        return steps, took

    def stretch_with_checkpoint(self) -> tuple[int, float, float]:
        """Takes a checkpoint during a stretch. Also returns the seconds until the checkpoint was complete."""
        cut_session = self._aside.submit(timed, self._job.checkpoint)
        return (*self.stretch(cut_session.done), cut_session.result())

    def close(self) -> None:
        self._aside.shutdown()


def slowed_down(folder: Path, size: int, checkpoints: int, seconds: float) -> dict[str, float]:
    """Returns the medians over the checkpoints. The first checkpoint is a warm-up and does not count.

    The cost of a checkpoint is the extra time of its stretch: beyond the time that as many steps take in the stretches
    before and after it. A machine's speed varies from minute to minute by more than this cost, so the stretches are
    short. A stretch of a whole period of 10 s would include that variation.
    """
    variables = variables_of(size)
    with (
        shoal.LocalCluster(servers=2, workers=0, checkpoints=folder) as cluster,
        cluster.client() as client,
        client.session(
            JOB,
            variables=variables,
            optimizer=optim.Adam(0.001),
            consistency=Asynchronous(),
            checkpoints=shoal.CheckpointPolicy(every_s=0, keep_last=1, at_end=False),
        ) as session,
        closing(Training(client, session, variables, seconds)) as training,
    ):
        training.stretch_with_checkpoint()
        steps, took = training.stretch()
        paces, costs, savings = [took / steps], [], []
        for _ in range(checkpoints):
            steps, took, cut_session = training.stretch_with_checkpoint()
            later_steps, later_took = training.stretch()
            paces.append(later_took / later_steps)
            costs.append(took - steps * (paces[-2] + paces[-1]) / 2)
            savings.append(cut_session)
    cost, alone = statistics.median(costs), 1 / statistics.median(paces)
    return {
        "steps_per_s": alone * (1 - cost / PERIOD_S),
        "alone_steps_per_s": alone,
        "seconds_lost": cost,
        "seconds_to_save": statistics.median(savings),
        "mb": 3 * sum(variable.nbytes for variable in variables.values()) / MB,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("speed", "slowdown"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS)
    parser.add_argument("--megabytes", type=int, default=BYTES // MB)
    parser.add_argument("--folder", help="on the disk to measure; a temporary one by default")
    parser.add_argument(
        "--short", action="store_true", help="make a short run that only tests the benchmark; its results mean nothing"
    )
    options = parser.parse_args()
    shoal.tune_allocator()  # as in a server's process
    size = 8 * MB if options.short else options.megabytes * MB
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the files go, too
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", dir=options.folder) as folder:
        if options.what == "speed":
            results = measured(Path(folder), size, 1 if options.short else options.rounds)
        else:
            checkpoints, seconds = (1, 0.5) if options.short else (options.checkpoints, STRETCH_S)
            results = slowed_down(Path(folder), size, checkpoints, seconds)
        print(json.dumps(results))


if __name__ == "__main__":
    main()
