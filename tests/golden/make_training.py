"""Generator of training.json: a small network, trained by PyTorch in float64.

    pip install torch==2.13.0 numpy && python tests/golden/make_training.py

One process trains on joined batches, with parameter groups, schedules and clipping. `tests/support/clusters` has the
problem (`training_problem.py`), and PyTorch's side of it (`torch_training.py`).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.training import torch_training
from support.training.training_problem import RECORDED


def main() -> None:
    """Writes the file beside this script."""
    cases = {str(combination): torch_training.train(combination).to_json() for combination in RECORDED}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    Path(__file__).with_name("training.json").write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
