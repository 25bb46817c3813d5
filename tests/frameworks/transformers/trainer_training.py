"""A worker that trains a small model by `Trainer`: python trainer_training.py OPTIONS, which are JSON.

`arguments` are those of `TrainingArguments`, and `distribute` those of `shoal.transformers.distribute`; without it,
the trainer trains alone. `stop` is the step at which an error is raised, `resume` the argument of `train`. The weights
go to the file `weights`, and what happened goes to the standard output.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import transformers

import shoal.transformers

SAMPLES, LENGTH, WORDS = 24, 6, 20


class Stop(transformers.TrainerCallback):
    """Raises an error after a step, as a crash would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise RuntimeError("stopped")


def data() -> list[dict[str, Any]]:
    """Returns samples with different numbers of labels, so that their weights differ."""
    draw = np.random.default_rng(0)
    words = draw.integers(0, WORDS, (SAMPLES, LENGTH))
    labels = np.where(np.arange(LENGTH) < draw.integers(2, LENGTH + 1, (SAMPLES, 1)), words, -100)
    return [{"input_ids": row.tolist(), "labels": its.tolist()} for row, its in zip(words, labels, strict=True)]


def model() -> Any:
    """Returns a model with random weights in float64."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    without = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": None, "eos_token_id": None}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **without)).double()


def loss_of(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Returns the mean loss of all tokens in float64. The loss of Transformers is float32."""
    logits = outputs["logits"][:, :-1].reshape(-1, WORDS)
    wanted = labels[:, 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum") / num_items_in_batch


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    args = transformers.TrainingArguments(
        report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **options["arguments"]
    )
    stop = [Stop(options["stop"])] if options.get("stop") else []
    trained, told = model(), dict[str, Any]()
    trainer = transformers.Trainer(
        model=trained, args=args, train_dataset=data(), callbacks=stop, compute_loss_func=loss_of
    )
    training = shoal.transformers.distribute(trainer, **options["distribute"]) if options.get("distribute") else None
    try:
        trainer.train(resume_from_checkpoint=options.get("resume"))
    except RuntimeError as error:
        told["error"] = str(error)
    if training:
        told["rank"] = training.session.rank
    told |= {"steps": trainer.state.global_step, "epoch": trainer.state.epoch}
    told["log"] = [it for it in trainer.state.log_history if "loss" in it]
    np.savez(options["weights"], **{name: it.detach().numpy() for name, it in trained.named_parameters()})
    print(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
