"""Transformers: the workers of a job train a model with the `Trainer` of Hugging Face that you have.

    trainer = Trainer(model=model, args=args, train_dataset=data)
    shoal.transformers.distribute(trainer, job="m", workers=2)
    trainer.train()

Start this program on each worker. The optimizer, its schedule, the batch size and the epochs are those of the
`TrainingArguments`. Needs the extra `transformers`.
"""

from shoal._system import load

for _package in ("torch", "transformers", "accelerate"):
    load(_package, "shoal.transformers", extra="transformers")

from shoal.transformers._training import (  # noqa: E402 - after the check, whose error says what to install
    DistributedTraining,
    distribute,
)

__all__ = ["DistributedTraining", "distribute"]
