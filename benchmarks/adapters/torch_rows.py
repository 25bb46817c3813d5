"""Benchmark of `shoal.torch`: compared with a plain session, with DistributedDataParallel and with torch rpc.

Its scripts need PyTorch in the environment of Shoal (the extra `torch`). Without it, the rows are skipped.
"""

import importlib.util

from harness import Run, alternate, median, ours
from rivals import PEERS
from rows import Row, against_best, compared

_ROUNDS = 3  # of the rows by turns, whose scripts take a minute
DDP, SESSION = "DistributedDataParallel, gloo, 2 ranks", "Shoal, a plain session"
BY_TURNS = {
    "torch_adapter": (SESSION, "ResNet-18 by shoal.torch and by a session, by turns", ("torch_adapter.py",)),
    "torch_ddp": (DDP, "a small CNN by shoal.torch and by DDP, by turns", ("torch_ddp.py", "cnn")),
    "torch_ddp_resnet18": (DDP, "ResNet-18 by shoal.torch and by DDP, by turns", ("torch_ddp.py", "resnet18")),
}


def torch(run: Run) -> list[Row]:
    """Runs the steps by turns, and the dense workload through the adapter and through torch rpc."""
    if not importlib.util.find_spec("torch"):
        for row in (*BY_TURNS, "torch_dense"):
            run.skip(row, "PyTorch is not installed beside Shoal")
        return []
    return [*by_turns(run), *dense(run)]


def by_turns(run: Run) -> list[Row]:
    """Returns the rows whose scripts train in both ways by turns, and print the median ratio of the turns."""
    scripts = {
        row: ours(name, f"adapters/{script}", *arguments, *run.short_flag)
        for row, (_, name, (script, *arguments)) in BY_TURNS.items()
    }
    seen = run.contest("torch", list(scripts.values()), rounds=min(run.rounds, _ROUNDS))
    found = []
    for row, script in scripts.items():
        if lines := seen.get(script.name):
            mine, ratio = median(lines, "ms_per_step"), median(lines, "ratio")
            found.append(compared(row, mine, "ms", BY_TURNS[row][0], mine / ratio))
    return found


def dense(run: Run) -> list[Row]:
    """Returns the row of the dense workload."""
    script = ours("Shoal, torch.optim.Optimizer", "adapters/torch_dense.py", *run.short_flag)
    peers = [it for it in PEERS if it.script == "torch_rpc_ps.py" and it.environment in run.interpreters]
    theirs = [it.contestant("dense", run.interpreters[it.environment]) for it in peers]
    lines = run.contest("torch", alternate([script], theirs))
    if script.name not in lines:
        return []
    of_peers = {it.name: median(lines[it.name], "gb_per_s") for it in theirs if it.name in lines}
    return [against_best("torch_dense", median(lines[script.name], "gb_per_s"), "GB/s", of_peers)]
