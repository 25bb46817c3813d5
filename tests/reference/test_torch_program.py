"""The program in PyTorch of the examples, trained on a cluster."""

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import optim

pytest.importorskip("torch", reason="PyTorch is not installed: `make reference` does that")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_program_in_pytorch_learns() -> None:
    with shoal.LocalCluster(servers=2, workers=2, path=[EXAMPLES]) as cluster, cluster.client() as client:
        policy = shoal.EvaluationPolicy(metric="accuracy")
        options: dict[str, Any] = {"workers": 2, "epochs": 10, "evaluation": policy, "optimizer": optim.Adam(lr=0.003)}
        result = client.submit(shoal.Job("torch_digits:TorchDigits", **options)).wait(timeout_s=100)
    assert result.evaluation
    assert result.evaluation.values["accuracy"] > 0.95
