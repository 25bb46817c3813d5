"""Generator of training.json: a small network, trained by PyTorch in float64, for `test_promises.py`.

    pip install torch==2.13.0 numpy && python tests/golden/make_training.py

One process trains on joined batches, with parameter groups, a one-cycle schedule and, in one case, clipping.
`tests/support/clusters/training_problem.py` has the problem, and computes the gradients of the workers.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.clusters import training_problem as problem

CASES: tuple[dict[str, Any], ...] = ({"name": "groups", "clip_norm": 0.0}, {"name": "clipped", "clip_norm": 1.5})


def main() -> None:
    """Writes the file beside this script."""
    cases = [case | dict(zip(("values", "clipped_steps"), trained(case["clip_norm"]), strict=True)) for case in CASES]
    text = ",\n".join(map(json.dumps, cases))
    Path(__file__).with_name("training.json").write_text(f'{{"cases": [\n{text}\n]}}\n')


def trained(clip_norm: float) -> tuple[dict[str, Any], int]:
    """Returns the values after all steps, and in how many steps the gradient was clipped."""
    params = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in problem.start().items()}
    decay, rate = problem.WEIGHT_DECAY, problem.RATE
    params["embed"].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [params["hidden"]]},
            {"params": [params["hidden_bias"], params["out_bias"]], "weight_decay": 0.0},
            {"params": [params["out"]], "lr": 3 * rate},
        ],
        lr=rate,
        weight_decay=decay,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [rate, rate, 3 * rate], total_steps=problem.STEPS, cycle_momentum=False
    )
    clipped = 0
    for step in range(problem.STEPS):
        x, y = map(torch.from_numpy, problem.batch(step))
        hidden = torch.tanh(x @ params["embed"] @ params["hidden"] + params["hidden_bias"])
        loss = ((hidden @ params["out"] + params["out_bias"] - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        if clip_norm:
            norm = torch.nn.utils.clip_grad_norm_([p for p in params.values() if p.requires_grad], clip_norm)
            clipped += int(norm > clip_norm)
        optimizer.step()
        scheduler.step()
    return {name: value.detach().tolist() for name, value in params.items()}, clipped


if __name__ == "__main__":
    main()
