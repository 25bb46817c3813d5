"""`shoal.torch.DataLoader`: each sample once an epoch, over workers that come and go."""

from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import shoal
import shoal.torch
from shoal import errors, optim
from support.torch_training import name, together

SAMPLES = 100


def numbers(samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.arange(samples))


def opened(client: shoal.Client, **options: Any) -> shoal.torch.DistributedOptimizer:
    options = {"job": name(), "batch_size": 8, "range_size": 16, **options}
    return shoal.torch.DistributedOptimizer(torch.nn.Linear(1, 1), optim.SGD(0.0), client=client, **options)


def step(optimizer: shoal.torch.DistributedOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("loaders", [0, 2])
def test_two_workers_read_each_sample_once_an_epoch(
    client: shoal.Client, forks: ForkServerContext, loaders: int
) -> None:
    job = name()
    loading: dict[str, Any] = {"num_workers": loaders, "multiprocessing_context": forks} if loaders else {}

    def work(_: int) -> list[Counter[int]]:
        with opened(client, job=job, workers=2, epochs=3) as optimizer:
            loader = shoal.torch.DataLoader(numbers(), 8, session=optimizer, **loading)
            assert len(loader) == 7
            found = []
            for _ in range(3):
                found.append(Counter[int]())
                for (batch,) in loader:
                    assert optimizer.batch_samples == len(batch)
                    found[-1].update(batch.tolist())
                    step(optimizer)
            return found

    for epoch, (one, other) in enumerate(zip(*together(work), strict=True)):
        assert one + other == Counter(range(SAMPLES)), f"epoch {epoch}"
    assert client.job(job).data().total.done == 3 * SAMPLES


def test_a_loop_that_ends_early_continues_after_its_last_push(client: shoal.Client) -> None:
    seen = Counter[int]()
    with opened(client) as optimizer:
        loader = shoal.torch.DataLoader(numbers(), session=optimizer)
        for index, (batch,) in enumerate(loader):
            if index == 3:
                break
            seen.update(batch.tolist())
            step(optimizer)
        for (batch,) in loader:
            seen.update(batch.tolist())
            step(optimizer)
    assert seen == Counter(range(SAMPLES))


def test_batches_are_loaded_in_parts_for_backward_passes_that_add_up(client: shoal.Client) -> None:
    """Each step gets 3 parts of a batch of 8 samples; the last batch of an epoch has 2 samples, so 2 parts."""
    with opened(client) as optimizer:
        loader = shoal.torch.DataLoader(numbers(50), session=optimizer, accumulate=3)
        assert len(loader) == 3 * 7
        sizes, seen = [], Counter[int]()
        for index, (part,) in enumerate(loader):
            sizes.append(len(part))
            seen.update(part.tolist())
            if index % 3 == 2 or index == 19:
                assert optimizer.batch_samples == (8 if index < 18 else 2)
                step(optimizer)
        assert sizes == [3, 3, 2] * 6 + [1, 1]
        assert seen == Counter(range(50))
        assert optimizer.session.step == 7


def test_a_plain_session_has_batches_too(client: shoal.Client) -> None:
    with client.session(name(), variables={"w": np.zeros(1)}, batch_size=10) as session:
        loader = shoal.torch.DataLoader(numbers(), session=session)
        assert sum(len(batch) for (batch,) in loader) == SAMPLES


def test_an_epoch_more_than_the_job_has_is_empty_and_warned_of(
    client: shoal.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(client) as optimizer:
        loader = shoal.torch.DataLoader(numbers(16), session=optimizer)
        assert [len([*loader]), len([*loader])] == [2, 0]
    assert "its epoch is done" in caplog.text


class TestIsRefused:
    @pytest.fixture
    def session(self, client: shoal.Client) -> Any:
        with client.session(name(), variables={"w": np.zeros(1)}, batch_size=10) as session:
            yield session

    def test_a_data_set_without_a_length(self, session: shoal.Session) -> None:
        class Stream(IterableDataset[int]):
            def __iter__(self) -> Iterator[int]:
                return iter(range(10))

        class Endless(Dataset[int]):
            def __getitem__(self, index: int) -> int:
                return index

        for data in (Stream(), Endless()):
            with pytest.raises(errors.InvalidData, match=r"has no length, .* __len__ and __getitem__"):
                shoal.torch.DataLoader(data, session=session)
        with pytest.raises(errors.InvalidData, match="has no samples"):
            shoal.torch.DataLoader([], session=session)

    def test_another_batch_size_than_that_of_the_job(self, session: shoal.Session) -> None:
        with pytest.raises(errors.BadRequest, match=r"batch_size is 64, and that of job .* is 10"):
            shoal.torch.DataLoader(numbers(), 64, session=session)

    @pytest.mark.parametrize("option", [{"shuffle": False}, {"drop_last": True}, {"sampler": [1]}])
    def test_an_order_of_its_own(self, session: shoal.Session, option: dict[str, Any]) -> None:
        with pytest.raises(errors.BadRequest, match="leave it out"):
            shoal.torch.DataLoader(numbers(), session=session, **option)
