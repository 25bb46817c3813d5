"""One script for each task of TF_CONFIG: trains a pipeline with a process for each stage, and prints its variables.

`PLAN` is a `Plan` in JSON. While the file "armed" is in its folder, the rank that is to be lost waits for its end at
the beginning of the third epoch, and says so by the file "waiting".
"""

import json
import os
import signal
from pathlib import Path

from shoal_distribute import MultiWorkerPipelineStrategy, keras
from support.programs.forked_pipeline import REPLICAS, STAGES, Plan, trained


def main() -> None:
    """Trains, and prints the variables."""
    plan = Plan(**json.loads(os.environ["PLAN"]))

    def begin(epoch: int, logs: object) -> None:
        del logs
        if epoch == 2 and Path(plan.folder, "armed").exists():
            Path(plan.folder, "waiting").touch()
            signal.pause()

    with MultiWorkerPipelineStrategy(STAGES, REPLICAS, device="/cpu:0", micro_batches=2, cut=["norm"]) as strategy:
        waits = [keras.callbacks.LambdaCallback(on_epoch_begin=begin)] if strategy.rank == plan.lost else []
        print(json.dumps(trained(plan, strategy, waits)), flush=True)


if __name__ == "__main__":
    main()
