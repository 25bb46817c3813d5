"""Benchmark of `shoal_nn`'s models: on one thread compared with PyTorch's, on a GPU, and through a cluster."""

import os
from collections.abc import Mapping, Sequence

from harness import HERE, Contestant, Run, median, ours
from peers.nn_workload import MODELS, ONE_THREAD, Work
from processes import Line
from rows import Row, against_best, compared

from shoal import errors
from shoal_worker.arrays import choose_device

ON_GPU = ("gpu_resnet50_alone", "gpu_resnet50_cluster")
NO_TORCH = "no torch is given"
# Of channels in memory: PyTorch's own, and the one that is faster for some models.
LAYOUTS = ("first", "last")


def nn(run: Run) -> list[Row]:
    """Measures the models on a CPU, and on a GPU if CuPy finds one."""
    return [row for model in MODELS for row in on_cpu(run, model)] + on_gpu(run)


def on_cpu(run: Run, model: str) -> list[Row]:
    """Returns a model's row, compared with the faster layout of PyTorch. Without torch, the row is skipped."""
    row, work = f"{model}_cpu", MODELS[model]
    shoal = ours(
        f"{work.name}, Shoal",
        "nn_step.py",
        model,
        *run.short_flag,
        env=ONE_THREAD,
        objection=lambda line: objection(line, work),
    )
    torch = run.interpreters.get("torch", "")
    theirs = [_torch(run, torch, model, layout) for layout in LAYOUTS] if torch else []
    seen = run.contest("nn", [shoal, *theirs])
    if shoal.name not in seen:
        return []
    mine = median(seen[shoal.name], "ms_per_step")
    if not torch:
        run.skip(row, f"{NO_TORCH} to compare with; Shoal's own {mine:.3g} ms are kept")
        return [compared(row, mine, "ms", NO_TORCH, None)]
    found = against_best(
        row, mine, "ms", {name: median(seen[name], "ms_per_step") for name in seen if name != shoal.name}
    )
    if found.peer:
        by_round = ", ".join(f"{ratio:.2f}" for ratio in ratios(seen[shoal.name], seen[found.peer]))
        run.say(f"{row}: ratio of each round: {by_round}")
    return [found]


def ratios(mine: Sequence[Line], theirs: Sequence[Line]) -> list[float]:
    """Returns for each round how many times as fast as the peer Shoal was."""
    pairs = zip(mine, theirs, strict=True)
    return [their_line["ms_per_step"] / line["ms_per_step"] for line, their_line in pairs]


def objection(line: Line, work: Work) -> str:
    """Returns why a line is not valid: it is of another model, or a step went wrong."""
    if line["parameters"] != work.parameters:
        return f"its model has {line['parameters']} parameters, and {work.name} {work.parameters}"
    return "" if line["loss"] is not None else "its loss is not finite"


def on_gpu(run: Run) -> list[Row]:
    """Runs gpu.py. Its rows are skipped without a GPU."""
    try:
        choose_device("cuda:0")
    except errors.DeviceUnavailable as error:
        for row in ON_GPU:
            run.skip(row, error.message)
        return []
    script = ours("ResNet-50 on a GPU", "gpu.py", "--out", os.devnull, timeout_s=600)
    lines = run.contest("nn", [script], rounds=1).get(script.name)
    return gpu_rows(run, lines[0]) if lines else []


def gpu_rows(run: Run, results: Mapping[str, float]) -> list[Row]:
    """Returns the rows of gpu.py's results. They compare with the PyTorch of CuPy's environment, not of the peers'."""
    alone, cluster = ON_GPU
    mine, theirs = results["images_per_s_alone"], results.get("images_per_s_torch")
    if theirs is None:
        run.skip(alone, f"no PyTorch to compare with; Shoal's own {mine:.3g} images/s are kept")
    return [
        compared(alone, mine, "images/s", "no torch beside CuPy" if theirs is None else "torch", theirs),
        compared(cluster, results["images_per_s_cluster"], "images/s", "Shoal, alone", mine),
    ]


def _torch(run: Run, interpreter: str, model: str, layout: str) -> Contestant:
    work = MODELS[model]
    command = (interpreter, str(HERE / "peers" / "torch_nn.py"), model, layout, *run.short_flag)
    return Contestant(
        f"{work.name}, torch, channels {layout}", command, ONE_THREAD, objection=lambda line: objection(line, work)
    )
