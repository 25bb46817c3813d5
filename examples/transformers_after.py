"""The trainer of `transformers_before.py` on a cluster: start it on each worker. SHOAL_COORDINATOR says where."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from shoal.transformers import distribute

WORDS, LENGTH = 16, 12


def counting() -> list[dict[str, list[int]]]:
    """Returns sequences in which each number is that before it plus a fixed step."""
    rows = [[(start + step * it) % WORDS for it in range(LENGTH)] for start in range(WORDS) for step in (1, 3, 5)]
    return [{"input_ids": row, "labels": row} for row in rows]


def network() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def main() -> None:
    args = TrainingArguments("counting", num_train_epochs=20, per_device_train_batch_size=8, learning_rate=1e-2)
    trainer = Trainer(model=network(), args=args, train_dataset=counting())
    distribute(trainer, job="counting", workers=2)
    trainer.train()
    trainer.save_model("counting")


if __name__ == "__main__":
    main()
