"""Data of a `Trainer` whose samples the workers of a job divide among themselves."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal import consistency, errors
from shoal.torch import DataLoader, DistributedOptimizer


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Sizes of the steps of a job, as its `TrainingArguments` give them.

    Attributes:
        samples: samples in one epoch.
        batch_size: samples in one step of one worker, in all its backward passes.
        range_size: samples in one lease.
        steps: the most steps of one worker in an epoch.
    """

    samples: int
    batch_size: int
    range_size: int
    steps: int

    @classmethod
    def of(cls, samples: int, args: Any, workers: int, options: dict[str, Any]) -> "EpochPlan":
        """Returns the plan of a job.

        A range has one batch unless the user gives its size. The steps of synchronous workers then differ by one at
        most, so their number is known. In other modes, one worker could take all steps.

        Args:
            samples: samples in one epoch.
            args: the `TrainingArguments`.
            workers: number of workers of the job.
            options: the options of the session.

        Raises:
            BadRequest: the size of a range is not a multiple of that of a batch.
        """
        batch = args.train_batch_size * args.gradient_accumulation_steps
        size = options.get("range_size") or batch
        if size % batch:
            raise errors.BadRequest(
                f"range_size is {size}; give a multiple of {batch}, which is per_device_train_batch_size times "
                "gradient_accumulation_steps"
            )
        ranges = math.ceil(samples / size)
        mode = options.get("consistency") or consistency.Synchronous()
        turns = math.ceil(ranges / workers) if mode.needs_every_worker else ranges
        return cls(samples, batch, size, min(turns * (size // batch), math.ceil(samples / batch)))


class TrainerData:
    """The batches of a trainer. Its session opens after `Trainer` has asked for their number.

    Args:
        plain: the loader that the trainer has without Shoal.
        plan: the sizes of the steps.
        parts: number of backward passes in a step.
        optimizer: returns the optimizer, with the open session.

    Attributes:
        dataset: the data set.
        batch_size: samples of a batch.
    """

    def __init__(self, plain: Any, plan: EpochPlan, parts: int, optimizer: Callable[[], DistributedOptimizer]) -> None:
        self.dataset, self.batch_size = plain.dataset, plan.batch_size // parts
        self._plan, self._parts, self._optimizer = plan, parts, optimizer
        self._loader: DataLoader | None = None
        names = (
            "collate_fn",
            "num_workers",
            "pin_memory",
            "prefetch_factor",
            "worker_init_fn",
            "multiprocessing_context",
        )
        self._options = {name: getattr(plain, name) for name in names}

    def __len__(self) -> int:
        return self._plan.steps * self._parts

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = DataLoader(self.dataset, session=self._optimizer(), accumulate=self._parts, **self._options)
        # The trainer stops after the expected number of steps, so the first iteration may yield nothing.
        for _ in range(2):
            yielded = False
            for batch in self._loader:
                yielded = True
                yield batch
            if yielded:
                return


__all__ = ["EpochPlan", "TrainerData"]
