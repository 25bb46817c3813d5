"""TensorFlow's ParameterServerStrategy in the benchmark of kills."""

import json
from dataclasses import dataclass
from pathlib import Path

from schedule import SERVERS, WORKERS
from supervisor import Supervisor
from system import HERE, System, free_port

_ENVIRONMENT = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "GRPC_FAIL_FAST": "use_caller"}


@dataclass
class TensorFlowSystem(System):
    """A chief, two parameter servers and four workers, each with `tensorflow_task.py`.

    Attributes:
        interpreter: the one that has TensorFlow.
        name: its name in the results.
    """

    interpreter: str
    name: str = "TensorFlow ParameterServerStrategy"

    def start(self, supervisor: Supervisor, folder: Path) -> None:
        """Starts all tasks. A parameter server and a worker keep their addresses."""
        counts = {"ps": SERVERS, "worker": WORKERS, "chief": 1}
        cluster = {task: [f"127.0.0.1:{free_port()}" for _ in range(count)] for task, count in counts.items()}
        command = [self.interpreter, str(HERE / "tensorflow_task.py"), str(folder)]
        for task, count in counts.items():
            for index in range(count):
                config = {"cluster": cluster, "task": {"type": task, "index": index}}
                supervisor.start(_name(task, index), command, {**_ENVIRONMENT, "TF_CONFIG": json.dumps(config)})


def _name(task: str, index: int) -> str:
    return {"ps": f"server-{index}", "worker": f"worker-{index}", "chief": "chief"}[task]
