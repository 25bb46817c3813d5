"""Benchmarks of whole steps.

`dense`, `small`, `small_cluster` and `all_reduce` compare Shoal with the peers. `scale`, `chunks` and `tls` compare
Shoal with itself: `scale` with different numbers of variables and shards, `chunks` with different chunk sizes, `tls`
with and without TLS.
"""

from collections.abc import Iterable, Mapping, Sequence

from harness import HERE, Contestant, Run, alternate, median, ours
from processes import Line
from rivals import PEERS, Peer
from rows import CHUNKS_KIB, Row, against_best, compared


def dense(run: Run) -> list[Row]:
    """Runs the dense workload over TCP and through shared memory."""
    shoals = {
        "dense_tcp": _shoal(run, "Shoal, TCP, without overlap", "tcp", "dense", "--no-overlap"),
        "dense_shm": _shoal(
            run, "Shoal, shared memory, overlapped, in place", "auto", "dense", "--in-place", shared=True
        ),
        "dense_tcp_overlapped": _shoal(run, "Shoal, TCP, overlapped", "tcp", "dense"),
        "dense_shm_copied": _shoal(run, "Shoal, shared memory, overlapped", "auto", "dense", shared=True),
        "dense_shm_no_overlap": _shoal(
            run, "Shoal, shared memory, without overlap", "auto", "dense", "--no-overlap", shared=True
        ),
        "dense_shm_one_by_one": _shoal(
            run, "Shoal, shared memory, one by one", "auto", "dense", "--no-overlap", "--one-by-one", shared=True
        ),
        "dense_grpc": _shoal(run, "Shoal, gRPC, without overlap", "grpc", "dense", "--no-overlap"),
    }
    theirs = _peers(run, "dense")
    lines = run.contest("dense", alternate(list(shoals.values()), theirs))
    of_peers = _medians(lines, [peer.name for peer in theirs], "gb_per_s")
    over_tcp = {peer.name: of_peers[peer.name] for peer in PEERS if peer.tcp and peer.name in of_peers}
    return [
        against_best(row, median(lines[contestant.name], "gb_per_s"), "GB/s", of_peers if "shm" in row else over_tcp)
        for row, contestant in shoals.items()
        if contestant.name in lines
    ]


def small(run: Run) -> list[Row]:
    """Runs the small workload over the transport that Shoal chooses."""
    shoals = {
        "small": _shoal(run, "Shoal", "auto", "small", "--no-overlap"),
        "small_overlapped": _shoal(run, "Shoal, overlapped", "auto", "small"),
    }
    theirs = _peers(run, "small")
    lines = run.contest("small", alternate(list(shoals.values()), theirs))
    of_peers = _medians(lines, [peer.name for peer in theirs], "steps_per_s")
    return [
        against_best(row, median(lines[contestant.name], "steps_per_s"), "steps/s", of_peers)
        for row, contestant in shoals.items()
        if contestant.name in lines
    ]


def tls(run: Run) -> list[Row]:
    """Runs both workloads over lanes with TLS, over plain lanes, and the dense one over gRPC with TLS."""
    dense_tls = _shoal(run, "Shoal, TLS, dense", "tcp", "dense", "--no-overlap", "--tls")
    small_tls = _shoal(run, "Shoal, TLS, small", "tcp", "small", "--no-overlap", "--tls")
    against = {
        "dense_tls": (dense_tls, _shoal(run, "Shoal, TCP, dense", "tcp", "dense", "--no-overlap"), "gb_per_s"),
        "dense_tls_grpc": (
            dense_tls,
            _shoal(run, "Shoal, gRPC with TLS, dense", "grpc", "dense", "--no-overlap", "--tls"),
            "gb_per_s",
        ),
        "small_tls": (small_tls, _shoal(run, "Shoal, TCP, small", "tcp", "small", "--no-overlap"), "steps_per_s"),
    }
    contestants = {it.name: it for ours_, theirs, _ in against.values() for it in (ours_, theirs)}
    lines = run.contest("tls", list(contestants.values()))
    units = {"gb_per_s": "GB/s", "steps_per_s": "steps/s"}
    return [
        compared(row, median(lines[mine.name], key), units[key], other.name, median(lines[other.name], key))
        for row, (mine, other, key) in against.items()
        if mine.name in lines and other.name in lines
    ]


def authorization(run: Run) -> list[Row]:
    """Runs the small workload by turns in a cluster that asks for tokens, as by default, and in one that does not."""
    contestant = ours("Shoal, small, by turns", "cluster/authorization.py", *run.short_flag)
    lines = run.contest("authorization", [contestant])
    if contestant.name not in lines:
        return []
    ratio, mine = (median(lines[contestant.name], key) for key in ("ratio", "steps_per_s"))
    return [compared("small_authorized", mine, "steps/s", "Shoal, --insecure, small", mine / ratio)]


def replicas(run: Run) -> list[Row]:
    """Runs the dense workload by turns with one copy of the shards, and with two."""
    contestant = ours("Shoal, dense, two copies, by turns", "cluster/replicas.py", *run.short_flag)
    lines = run.contest("replicas", [contestant])
    if contestant.name not in lines:
        return []
    ratio, mine = (median(lines[contestant.name], key) for key in ("ratio", "ms_per_step"))
    return [compared("replicas", mine, "ms", "Shoal, one copy, dense", mine / ratio)]


def small_cluster(run: Run) -> list[Row]:
    """Runs the small-cluster workload over the transport that Shoal chooses."""
    shoals = {
        "small_cluster": ours("Shoal, 2 servers, 2 workers", "cluster/small_cluster.py", *run.short_flag),
        "small_cluster_overlapped": ours(
            "Shoal, 2 servers, 2 workers, overlapped", "cluster/small_cluster.py", "--overlap", *run.short_flag
        ),
    }
    theirs = _peers(run, "small_cluster", [peer for peer in PEERS if peer.small_cluster])
    lines = run.contest("small_cluster", alternate(list(shoals.values()), theirs))
    of_peers = _medians(lines, [peer.name for peer in theirs], "steps_per_s")
    return [
        against_best(row, median(lines[contestant.name], "steps_per_s"), "steps/s", of_peers)
        for row, contestant in shoals.items()
        if contestant.name in lines
    ]


def all_reduce(run: Run) -> list[Row]:
    """Runs collectives of 2 and 4 ranks, through shared memory and over TCP, against gloo."""
    torch = run.interpreters.get("torch")
    found = []
    for ranks in (2, 4):
        script = ["collectives/all_reduce.py", str(ranks), *run.short_flag]
        shoals = {
            f"allreduce_shm_{ranks}": ours(f"Shoal, {ranks} ranks, shared memory", *script),
            f"allreduce_tcp_{ranks}": ours(f"Shoal, {ranks} ranks, TCP", *script, "--tcp"),
        }
        gloo = Contestant(f"gloo, {ranks} ranks", (torch or "", str(HERE / "peers" / "gloo_allreduce.py"), str(ranks)))
        lines = run.contest("all_reduce", [*shoals.values(), *([gloo] if torch else [])])
        theirs = _medians(lines, [gloo.name], "ms_per_step")
        found += [
            against_best(row, median(lines[contestant.name], "ms_per_step"), "ms", theirs)
            for row, contestant in shoals.items()
            if contestant.name in lines
        ]
    return found


def scale(run: Run) -> list[Row]:
    """Runs the dense workload with its bytes in more variables, and in more shards of one server."""
    few = {shards: f"161 variables, {shards} shard{'s' if shards > 1 else ''}" for shards in (1, 2, 4)}
    many = "10,000 variables, 4 shards"
    arguments = {name: ["--shards", str(shards)] for shards, name in few.items()}
    arguments[many] = [*arguments[few[4]], "--variables", "10000"]
    for name in (few[4], many):
        arguments[f"{name}, in place"] = [*arguments[name], "--in-place"]
    contestants = [_shoal(run, name, "auto", "dense", "--no-overlap", *more) for name, more in arguments.items()]
    # Two processes of one kind differ by a tenth, which is as much as what is looked for.
    lines = run.contest("scale", contestants, rounds=2 * run.rounds - 1)
    whole = _medians(lines, arguments, "ms_per_step")
    calls = _medians({name: [_calls(line) for line in seen] for name, seen in lines.items()}, arguments, "ms")
    pairs = {
        "many_variables": (calls, f"{many}, in place", f"{few[4]}, in place"),
        "many_variables_copied": (calls, many, few[4]),
        "many_variables_step": (whole, many, few[4]),
        "shards_2": (whole, few[2], few[1]),
        "shards_4": (whole, few[4], few[1]),
    }
    return [
        compared(row, times[ours], "ms", f"Shoal, {base}", times[base])
        for row, (times, ours, base) in pairs.items()
        if ours in times and base in times
    ]


def _calls(line: Line) -> Line:
    return {"ms": line["ms_in_pull"] + line["ms_in_push"]}


def chunks(run: Run) -> list[Row]:
    """Runs the dense workload over TCP with other chunk sizes than the default."""
    names = {kib: f"Shoal, TCP, without overlap, chunks of {kib} KiB" for kib in CHUNKS_KIB}
    contestants = [
        _shoal(run, name, "tcp", "dense", "--no-overlap", env={"SHOAL_CHUNK_BYTES": str(kib << 10)})
        for kib, name in names.items()
    ]
    times = _medians(run.contest("chunks", contestants), names.values(), "ms_per_step")
    return [
        compared(f"chunks_{kib}k", times[name], "ms", "Shoal, chunks of 1 MiB", times[names[1024]])
        for kib, name in names.items()
        if kib != 1024 and name in times and names[1024] in times
    ]


def _shoal(
    run: Run,
    name: str,
    transport: str,
    *arguments: str,
    shared: bool = False,
    env: Mapping[str, str] | None = None,
) -> Contestant:
    def objection(line: Line) -> str:
        if transport == "auto" and not shared:
            return ""  # whatever it chose
        if line["shared_memory"] == shared:
            return ""
        return "it went through shared memory" if line["shared_memory"] else "it did not go through shared memory"

    way = {"SHOAL_TRANSPORT": transport, **(env or {})}
    return ours(name, "step.py", *arguments, *run.short_flag, env=way, objection=objection)


def _peers(run: Run, workload: str, peers: Iterable[Peer] = PEERS) -> list[Contestant]:
    return [
        peer.contestant(workload, run.interpreters[peer.environment])
        for peer in peers
        if peer.environment in run.interpreters
    ]


def _medians(lines: Mapping[str, Sequence[Line]], names: Iterable[str], key: str) -> dict[str, float]:
    return {name: median(lines[name], key) for name in names if name in lines}
