"""`shoal.torch` with modules on a GPU: the results of plain PyTorch there."""

import copy
import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shoal
from shoal import optim
from support.clusters.local import local_cluster

if TYPE_CHECKING:
    import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]
STEPS = 20


@pytest.fixture(autouse=True)
def gpu() -> None:
    import torch  # noqa: PLC0415 - the module is collected without PyTorch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")


@pytest.fixture(scope="module")
def client() -> Iterator[shoal.Client]:
    slow = {"coordinator": ["--heartbeat-timeout", "30"]}
    with local_cluster(servers=2, workers=0, flags=slow) as cluster, cluster.client() as client:
        yield client


def network(dtype: "torch.dtype") -> "torch.nn.Module":
    from torch import manual_seed, nn  # noqa: PLC0415

    manual_seed(0)
    # Without a bias: BatchNorm makes its gradient pure rounding, which Adam would enlarge.
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)]
    return nn.Sequential(*layers).to(dtype).to("cuda")


def batch(step: int, dtype: "torch.dtype") -> tuple["torch.Tensor", "torch.Tensor"]:
    import torch  # noqa: PLC0415

    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 3, 8, 8, generator=draw), torch.randint(0, 4, (16,), generator=draw)
    return x.to(dtype).to("cuda"), y.to("cuda")


def train(model: "torch.nn.Module", optimizer: Any, dtype: "torch.dtype") -> dict[str, np.ndarray]:
    import torch  # noqa: PLC0415

    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step, dtype)
        torch.nn.functional.cross_entropy(model(x).double(), y).backward()
        optimizer.step()
    return {name: it.double().cpu().numpy() for name, it in model.state_dict().items()}


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-10), ("float32", 1e-4), ("bfloat16", 0.05)])
def test_a_worker_on_a_gpu_equals_plain_pytorch(client: shoal.Client, dtype: str, bound: float) -> None:
    import torch  # noqa: PLC0415

    import shoal.torch  # noqa: PLC0415

    kind = getattr(torch, dtype)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    model = network(kind)
    plain = copy.deepcopy(model)
    with shoal.torch.DistributedOptimizer(model, optim.Adam(1e-3), job=f"gpu-{dtype}", client=client) as optimizer:
        found = train(model, optimizer, kind)
    assert all(it.is_cuda for it in model.parameters())
    wanted = train(plain, torch.optim.Adam(plain.parameters(), 1e-3), kind)
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=bound * max(1, abs(values).max()), err_msg=name)


def test_a_job_begins_with_the_values_on_the_gpu(client: shoal.Client) -> None:
    import torch  # noqa: PLC0415

    import shoal.torch  # noqa: PLC0415

    model = torch.nn.Linear(3000, 3000, device="cuda")  # its copy lasts longer than a call
    before = {name: it.cpu().numpy() for name, it in model.state_dict().items()}
    with shoal.torch.DistributedOptimizer(model, optim.SGD(0.1), job="gpu-begins", client=client) as optimizer:
        for name, values in optimizer.session.pull().items():
            np.testing.assert_array_equal(values, before[name])
