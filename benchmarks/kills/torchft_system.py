"""torchft's fault tolerant data parallelism in the benchmark of kills."""

from dataclasses import dataclass
from pathlib import Path

from schedule import WORKERS, Kill
from supervisor import Supervisor
from system import HERE, System, free_port


@dataclass
class TorchftSystem(System):
    """A lighthouse, and four replica groups of one worker, each with `torchft_worker.py`.

    torchft has no servers. A kill of a server hits the lighthouse, which is the process that all others need.

    Attributes:
        interpreter: the one that has torchft.
        name: its name in the results.
    """

    interpreter: str
    name: str = "torchft"

    def start(self, supervisor: Supervisor, folder: Path) -> None:
        """Starts the lighthouse and the workers."""
        port = free_port()
        lighthouse = str(Path(self.interpreter).with_name("torchft_lighthouse"))
        options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--quorum_tick_ms", "100"]
        supervisor.start("lighthouse", [lighthouse, "--bind", f"127.0.0.1:{port}", *options])
        env = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        for index in range(WORKERS):
            name = f"worker-{index}"
            worker = [self.interpreter, str(HERE / "torchft_worker.py"), name, str(folder)]
            supervisor.start(name, worker, env)

    def victim(self, kill: Kill) -> str:
        """Returns the name of the process that a kill hits."""
        return "lighthouse" if kill.role == "server" else kill.victim
