"""Rows of the results table: the name, target and format of each row (no I/O).

`FIGURES` lists the rows. `docs/explanation/performance.md` explains them in the same order.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Whether more of a unit is better.
_MORE_IS_BETTER = {
    "GB/s": True,
    "steps/s": True,
    "M parameters/s": True,
    "images/s": True,
    "ms": False,
    "s": False,
    "MB": False,
}


@dataclass(frozen=True)
class Figure:
    """A figure that a row of the results shows."""

    bench: str  # that measures it
    what: str
    asked: str = ""  # of Shoal, in words; "" where nothing is
    at_least: float | None = None  # the same as a ratio
    needs_peers: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the results; `ratio` above 1 means that Shoal is better."""

    name: str
    ours: float
    unit: str
    peer: str  # the best peer, or what Shoal is compared with where no peer does such a thing; "" without either
    theirs: float | None
    ratio: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the row meets its target. None if it has no target, or nothing to compare with."""
        figure = FIGURES.get(self.name)
        if figure is None or figure.at_least is None or self.ratio is None:
            return None
        return self.ratio >= figure.at_least

    def to_json(self) -> dict[str, Any]:
        """Returns the row as in latest.json, with figures to four digits."""
        return {key: _rounded(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Row":
        """Returns the row of a dict from `to_json`, or of another benchmark's dict with at least the same keys."""
        return cls(**{key: row[key] for key in ("name", "ours", "unit", "peer", "theirs", "ratio")})


def compared(name: str, ours: float, unit: str, peer: str, theirs: float | None) -> Row:
    """Returns a row with its ratio."""
    return Row(name, ours, unit, peer, theirs, None if theirs is None else ratio(ours, theirs, unit))


def against_best(name: str, ours: float, unit: str, medians: Mapping[str, float]) -> Row:
    """Returns a row that is compared with the best of some peers, by their medians. There may be no peers."""
    if not medians:
        return compared(name, ours, unit, "", None)
    choose = max if _MORE_IS_BETTER[unit] else min
    peer = choose(medians, key=lambda peer: medians[peer])
    return compared(name, ours, unit, peer, medians[peer])


def ratio(ours: float, theirs: float, unit: str) -> float:
    """Returns how many times as good as the peer's figure Shoal's figure is."""
    return ours / theirs if _MORE_IS_BETTER[unit] else theirs / ours


def expected(benches: Iterable[str]) -> list[str]:
    """Returns the names of the rows of some benchmarks, in order."""
    chosen = set(benches)
    return [name for name, figure in FIGURES.items() if figure.bench in chosen]


def missing(rows: Sequence[Row], benches: Iterable[str], *, peers: bool, skipped: Collection[str] = ()) -> list[str]:
    """The names without a row, or without anything to compare with though peers were given; but for those skipped."""
    there = {row.name: row for row in rows}
    return [
        name
        for name in expected(benches)
        if name not in skipped
        and (name not in there or (there[name].ratio is None and (peers or not FIGURES[name].needs_peers)))
    ]


def merged(old: Iterable[Row], new: Sequence[Row], benches: Iterable[str]) -> list[Row]:
    """Returns the old rows with the new rows in place of those of the same benchmarks, in the order of `FIGURES`."""
    replaced = set(expected(benches))
    rows = {row.name: row for row in old if row.name in FIGURES and row.name not in replaced}
    rows |= {row.name: row for row in new}
    return [rows[name] for name in FIGURES if name in rows]


def cells(row: Row) -> list[str]:
    """Returns the cells of a row in a table with the columns `HEADINGS`."""
    figure = FIGURES[row.name]
    theirs = "" if row.theirs is None else f"{_short(row.theirs)} {row.unit}"
    times = "" if row.ratio is None else f"{row.ratio:.2f}"
    verdict = {True: "yes", False: "no", None: ""}[row.holds]
    return [row.name, figure.what, f"{_short(row.ours)} {row.unit}", row.peer, theirs, times, figure.asked, verdict]


HEADINGS = ("row", "what", "Shoal", "against", "theirs", "ratio", "target", "met")


def markdown(rows: Iterable[Row]) -> str:
    """Returns the rows as a table for the docs."""
    lines = [HEADINGS, ["---", "---", "---:", "---", "---:", "---:", "---", "---"]]
    lines += [[f"`{name}`", *rest] for name, *rest in map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _kernel(optimizer: str) -> Figure:
    what = f"{optimizer}, 16 M parameters, one thread"
    return Figure("kernels", what, "at least 0.95 of torch's", 0.95, needs_peers=True)


def _all_reduce(what: str, at_least: float) -> Figure:
    return Figure("all_reduce", f"all-reduce of 106 MB, {what}", f"at least {at_least:g}x", at_least, needs_peers=True)


def _model(what: str, asked: str = "", at_least: float | None = None) -> Figure:
    return Figure("nn", f"{what}, forward and backward, one thread", asked, at_least, needs_peers=True)


CHUNKS_KIB = (64, 256, 512, 1024, 2048, 4096)

FIGURES: Mapping[str, Figure] = {
    "dense_tcp": Figure("dense", "dense step over TCP, without overlap", "at least 1.6x", 1.6, needs_peers=True),
    "dense_tcp_overlapped": Figure("dense", "dense step over TCP, overlapped", needs_peers=True),
    "dense_grpc": Figure("dense", "dense step over gRPC streams alone, without overlap", needs_peers=True),
    "dense_shm": Figure(
        "dense",
        "dense step through shared memory, overlapped, gradients in the session's buffers",
        "at least 2.7x; 4x hoped for",
        2.7,
        needs_peers=True,
    ),
    "dense_shm_copied": Figure("dense", "the same, gradients in arrays of the program's own", needs_peers=True),
    "dense_shm_no_overlap": Figure("dense", "dense step through shared memory, without overlap", needs_peers=True),
    "dense_shm_one_by_one": Figure(
        "dense", "without overlap, gradients pushed one by one as they are computed", needs_peers=True
    ),
    "small": Figure("small", "small step, without overlap", "at least 2x", 2.0, needs_peers=True),
    "small_overlapped": Figure("small", "small step, overlapped", needs_peers=True),
    "dense_tls": Figure("tls", "dense step over lanes with TLS, without overlap", "at least 0.35 of plain lanes", 0.35),
    "dense_tls_grpc": Figure("tls", "the same, against gRPC with TLS", "at least 1.5x", 1.5),
    "small_tls": Figure("tls", "small step over lanes with TLS, without overlap", "at least 0.8 of plain lanes", 0.8),
    "small_authorized": Figure(
        "authorization", "small step, without overlap, with tokens", "at least 0.97 of a cluster with --insecure", 0.97
    ),
    "replicas": Figure(
        "replicas", "dense step with two copies of the shards, on one machine", "at most 1.9 times one copy", 1 / 1.9
    ),
    "small_cluster": Figure(
        "small_cluster",
        "steps of two workers with two servers, a model of 171 KB",
        "at least 3x",
        3.0,
        needs_peers=True,
    ),
    "small_cluster_overlapped": Figure("small_cluster", "the same, overlapped", needs_peers=True),
    "allreduce_shm_2": _all_reduce("2 ranks, shared memory", 1.5),
    "allreduce_shm_4": _all_reduce("4 ranks, shared memory", 1.6),
    "allreduce_tcp_2": _all_reduce("2 ranks, TCP", 1.1),
    "allreduce_tcp_4": _all_reduce("4 ranks, TCP", 1.0),
    "kernel_sgd": _kernel("SGD"),
    "kernel_adagrad": _kernel("Adagrad"),
    "kernel_adam": _kernel("Adam"),
    "kernel_adamw": _kernel("AdamW"),
    "many_variables": Figure(
        "scale",
        "pull and push of the dense bytes in 10,000 variables, gradients in the session's buffers",
        "at most 1.15 times the time",
        1 / 1.15,
    ),
    "many_variables_copied": Figure("scale", "the same, gradients in arrays of the program's own"),
    "many_variables_step": Figure("scale", "the whole step, including 10,000 NumPy expressions, one for each variable"),
    "shards_2": Figure("scale", "2 shards on 1 server, without overlap", "at most 1.05 times the time", 1 / 1.05),
    "shards_4": Figure("scale", "4 shards on 1 server, without overlap", "at most 1.05 times the time", 1 / 1.05),
    "memory_rest": Figure(
        "memory",
        "server with 1 GiB of variables and Adam's slots, at rest",
        "at most 1.05 times values and slots + 300 MB",
        1.0,
    ),
    "memory_rest_open": Figure("memory", "the same server, while a session is open"),
    "memory_pull_6gb": Figure(
        "memory",
        "the larger peak of server and worker, pull of one variable of 6 GB",
        "at most 1.2 times the variable + 512 MB",
        1.0,
    ),
    "ready_seconds": Figure("memory", "`shoal server` to ready, kernels cached", "under 2.5 s", 1.0),
    "waiting_pulls": Figure("waiting_pulls", "a push of 100 KB while 200 pulls wait", "at most twice the time", 0.5),
    "parquet_scan": Figure(
        "data", "1 GB of Parquet, read by two workers in shuffled batches", "at least 0.8 of Arrow's own scan", 0.8
    ),
    "parquet_scan_in_order": Figure("data", "the same, rows in their order within a block"),
    "checkpoint_write": Figure(
        "checkpoints", "a server saves 256 MB in four shards, manifest included", "at least 0.7 of a plain file", 0.7
    ),
    "checkpoint_restore": Figure("checkpoints", "a server restores these shards", "at least 0.7 of a plain read", 0.7),
    "checkpoint_slowdown": Figure(
        "checkpoints", "steps with 256 MB of state, a checkpoint every 10 s", "slowed by at most 3.5%", 1 - 0.035
    ),
    "resnet18_cpu": _model("ResNet-18, 32 images of 32x32", "at least 0.5 of torch's speed", 0.5),
    "mobilenet_v2_cpu": _model("MobileNetV2 of width 0.35, 64 images of 32x32"),
    "small_cnn_cpu": _model("the small CNN, 64 images of 28x28"),
    "torch_adapter": Figure(
        "torch",
        "step of ResNet-18 by `shoal.torch`, 32 images of 32x32, one thread",
        "at most 1.05 times a plain session",
        1 / 1.05,
    ),
    "torch_ddp": Figure(
        "torch",
        "synchronous step of two workers by `shoal.torch`, a CNN of 0.8 MB, 64 images of 28x28, one thread each",
        "at most 1.1 times DDP",
        1 / 1.1,
    ),
    "torch_ddp_resnet18": Figure("torch", "the same, ResNet-18, 32 images of 32x32"),
    "torch_dense": Figure("torch", "dense step by `shoal.torch`", "at least 1.5x", 1.5, needs_peers=True),
    "gpu_resnet50_alone": Figure("nn", "ResNet-50 on a GPU, 64 images of 224x224, float32", needs_peers=True),
    "gpu_resnet50_cluster": Figure("nn", "the same through a cluster on one host", "at least 0.9 of alone", 0.9),
    **{
        f"chunks_{kib}k": Figure("chunks", f"dense step over TCP without overlap, chunks of {kib} KiB")
        for kib in CHUNKS_KIB
        if kib != 1024
    },
}

DEFAULT_BENCHES = (
    "dense",
    "small",
    "tls",
    "authorization",
    "replicas",
    "small_cluster",
    "all_reduce",
    "kernels",
    "scale",
    "memory",
    "waiting_pulls",
    "data",
    "checkpoints",
    "nn",
    "torch",
)
