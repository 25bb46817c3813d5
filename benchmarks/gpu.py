"""Benchmark of ResNet-50 on a GPU: python benchmarks/gpu.py, or `make test-gpu`; writes results/gpu.json.

It runs the same steps in several ways. Each step trains on 64 images of 224x224, which are copied from the host.

- Alone: the gradients are applied on the device. In float32, and with bfloat16 images and float32 parameters.
- Through a cluster on this machine: one server and one worker, in asynchronous mode, with overlap. In float32.
- By PyTorch, if it and torchvision are installed: as fastest, where cuDNN tries its algorithms; with deterministic
  algorithms that a heuristic chooses, as Shoal's are; and with bfloat16 by autocast, as fastest.

The time of a step is the time since the end of the step before. The script reports the median. It leaves out the first
steps, which also compile and plan.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import shoal
from shoal import errors
from shoal_nn import TrainingContext, one_by_one, softmax_cross_entropy
from shoal_nn.models import resnet
from shoal_worker.arrays import choose_device
from shoal_worker.devices import Device

HERE = Path(__file__).parent
RESULT = HERE / "results" / "gpu.json"
BATCH, STEPS, SKIPPED = 64, 60, 10
LEARNING_RATE = 0.01

# When a step began and ended, in seconds.
Note = tuple[float, float]


class Images:
    """A network that gets the same images in each step.

    It notes when each step began, and when it yielded the last gradient.

    Args:
        depth: depth of the residual network.
        size: height and width of an image.
        samples: number of samples in the data set.
        notes: the file to which times are written; empty for none.
        dtype: of the images, in which the layers compute.
    """

    def __init__(self, depth: int, size: int, samples: int, notes: str = "", dtype: npt.DTypeLike = np.float32) -> None:
        self.net, self.shape = resnet(depth), (size, size, 3)
        self.dataset = self
        self._samples, self._notes = samples, notes
        rng = np.random.default_rng(0)
        self._x = rng.normal(size=(BATCH, *self.shape)).astype(dtype)
        self._y = rng.integers(0, 1000, BATCH)

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._x[: len(indices)], self._y[: len(indices)]

    def variables(self) -> Mapping[str, shoal.Variable]:
        return self.net.variables(self.shape)

    def loss_and_gradients(self, params: Mapping[str, Any], batch: Any, *, seed: int) -> shoal.StepOutput:
        begun = time.monotonic()
        x, y = batch
        logits, state, pullback = self.net.apply(params, params, x, TrainingContext(seed))
        loss, dlogits = softmax_cross_entropy(logits, y)

        def gradients() -> Iterator[tuple[str, Any]]:  # one by one, as shoal_nn.Supervised yields them
            yield from one_by_one(pullback, dlogits)
            if self._notes:
                with open(self._notes, "a") as notes:
                    notes.write(json.dumps((begun, time.monotonic())) + "\n")

        return shoal.StepOutput(loss, gradients(), updates=state)


def alone(device: Device, program: Images, batch: int, steps: int) -> list[Note]:
    """Takes steps on a device, and applies the gradients there."""
    params, state = program.net.init(np.random.default_rng(0), program.shape)
    held = {name: device.to_device(value) for name, value in (params | state).items()}
    notes = []
    for number in range(steps):
        begun = time.monotonic()
        step = program.loss_and_gradients(held, device.put(program.batch(np.arange(batch))), seed=number)
        for name, gradient in dict(step.gradients).items():
            held[name] = held[name] - LEARNING_RATE * gradient
        held |= step.updates
        float(step.loss)  # waits for all of the step
        notes.append((begun, time.monotonic()))
    return notes


def through_cluster(device: str, depth: int, size: int, batch: int, steps: int) -> list[Note]:
    """Takes the same steps as a job."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        settings: dict[str, Any] = {"depth": depth, "size": size, "samples": batch * steps, "notes": str(notes)}
        with (
            shoal.LocalCluster(
                servers=1, workers=1, path=[HERE], flags={"worker": ["--device", device.partition(" ")[0]]}
            ) as cluster,
            cluster.client() as client,
        ):
            job = shoal.Job(
                "gpu:Images",
                settings=settings,
                batch_size=batch,
                consistency=shoal.Asynchronous(),
                optimizer=shoal.optim.SGD(LEARNING_RATE),
            )
            client.submit(job).wait()
        return [tuple(json.loads(line)) for line in notes.read_text().splitlines()]


def by_torch(batch: int, size: int, steps: int, *, trials: bool = True, half: bool = False) -> list[Note]:
    """Takes the same steps in PyTorch, with the channels last and without TF32.

    Args:
        batch: images of a step.
        size: height and width of an image.
        steps: number of steps.
        trials: whether cuDNN chooses its algorithms by trial, and also those whose results differ from run to run.
        half: whether bfloat16 is used where autocast uses it.
    """
    torch, models = importlib.import_module("torch"), importlib.import_module("torchvision.models")
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = trials, not trials
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    model = models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    x, y = torch.randn(batch, 3, size, size).pin_memory(), torch.randint(0, 1000, (batch,)).pin_memory()
    notes = []
    for _ in range(steps):
        begun = time.monotonic()
        there = x.cuda(non_blocking=True).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(there), y.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        notes.append((begun, time.monotonic()))
    return notes


def images_per_s(notes: Sequence[Note], batch: int, skipped: int = SKIPPED) -> float:
    """Returns the images per second, by the median time from the end of one step to the end of the next.

    Raises:
        ValueError: there are too few steps.
    """
    ends = [ended for _, ended in notes[skipped:]]
    if len(ends) < 2:
        raise ValueError(f"{len(notes)} steps are too few, of which {skipped} do not count")
    return batch / statistics.median(later - earlier for earlier, later in itertools.pairwise(ends))


def results(
    device: Device, *, depth: int = 50, size: int = 224, batch: int = BATCH, steps: int = STEPS
) -> dict[str, Any]:
    """What gpu.json has: of rows, gpu_resnet50_alone is `images_per_s_alone`, gpu_resnet50_cluster the one after it.

    Args:
        device: a GPU, activated.
        depth, size: of the model and its images.
        batch, steps: of each way.
    """
    found: dict[str, Any] = {"device": device.name, "model": f"ResNet-{depth}, {size}x{size}, float32", "batch": batch}
    for name, dtype in (("images_per_s_alone", np.float32), ("images_per_s_alone_bfloat16", ml_dtypes.bfloat16)):
        program = Images(depth, size, batch, dtype=dtype)
        found[name] = images_per_s(alone(device, program, batch, steps), batch)
    device.xp.get_default_memory_pool().free_all_blocks()  # the worker is another process
    found["images_per_s_cluster"] = images_per_s(through_cluster(device.name, depth, size, batch, steps), batch)
    if depth == 50 and all(importlib.util.find_spec(name) for name in ("torch", "torchvision")):
        # First, because PyTorch keeps what it has tried.
        found["images_per_s_torch_deterministic"] = images_per_s(by_torch(batch, size, steps, trials=False), batch)
        found["images_per_s_torch"] = images_per_s(by_torch(batch, size, steps), batch)
        found["images_per_s_torch_bfloat16"] = images_per_s(by_torch(batch, size, steps, half=True), batch)
    return found


def found_gpu(say: Callable[[str], object]) -> Device | None:
    """Returns the first GPU. If there is none, it prints the reason."""
    try:
        device = choose_device("cuda:0")
    except errors.DeviceUnavailable as error:
        say(f"the GPU is not measured: {error.message}")
        return None
    device.activate()
    return device


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=RESULT, help="the file to write")
    options = parser.parse_args(None if arguments is None else list(arguments))
    device = found_gpu(lambda reason: print(reason, file=sys.stderr))
    if device is None:
        return
    result = results(device)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
