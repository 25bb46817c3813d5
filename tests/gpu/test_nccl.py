"""Sums by NCCL between the ranks of a group, each with a GPU of its own. The ranks are threads."""

import numpy as np
import pytest

from shoal import optim
from shoal_distribute import Group, MultiWorkerMirroredStrategy
from shoal_distribute.collectives import CommunicationOptions
from shoal_worker.devices import Device
from support.ranks import run_ranks, succeeded

pytestmark = pytest.mark.gpu


def test_ranks_with_gpus_of_their_own_equal_ranks_on_cpus(device: Device) -> None:
    ranks = min(4, device.xp.cuda.runtime.getDeviceCount())
    if ranks < 2 or not device.xp.cuda.nccl.available:
        pytest.skip("NCCL joins two GPUs or more, and CuPy must have it")
    start = np.random.default_rng(0).normal(size=(300, 1000))

    def work(kind: str, group: Group, options: CommunicationOptions) -> np.ndarray:
        name = f"/{kind}:{group.rank}"
        strategy = MultiWorkerMirroredStrategy(communication_options=options, devices=[name], group=group)
        weights, optimizer = strategy.create_variable("w", start), optim.Adam(0.1)

        def step() -> None:
            strategy.apply_gradients(optimizer, [((group.rank + 1) * weights.read(), weights)])

        for _ in range(10):
            strategy.run(step)
        values = weights.numpy()
        strategy.close()
        return values

    wanted = succeeded(run_ranks(ranks, lambda group: work("cpu", group, CommunicationOptions())))[0]
    nccl = CommunicationOptions(implementation="nccl")
    found = succeeded(run_ranks(ranks, lambda group: work("gpu", group, nccl)))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-10)
    assert len({it.tobytes() for it in found}) == 1
