"""Peers: the systems that Shoal is compared with, and their interpreters.

Their scripts are in `peers/`. `bench_peers` builds their environments.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import HERE, Contestant

# Ignored by git; made by `make bench-peers`.
ENVIRONMENTS = HERE.parent / ".peers"


@dataclass(frozen=True)
class Environment:
    """The environment of one peer's interpreter."""

    packages: tuple[str, ...]  # for pip
    distribution: str  # the one whose version counts


@dataclass(frozen=True)
class Peer:
    """One way to use a peer."""

    name: str
    environment: str
    script: str
    arguments: tuple[str, ...] = ()
    tcp: bool = True  # else through shared memory
    small_cluster: bool = False  # whether its script has this workload

    def contestant(self, workload: str, interpreter: str) -> Contestant:
        """Returns the contestant that runs this peer on a workload."""
        script = str(HERE / "peers" / self.script)
        return Contestant(self.name, (interpreter, script, workload, *self.arguments))


BY_NAME: Mapping[str, Environment] = {
    "tensorflow": Environment(("tensorflow-cpu",), "tensorflow-cpu"),
    "torch": Environment(("torch==2.13.0", "numpy"), "torch"),
    "ray": Environment(("ray", "numpy"), "ray"),
    "torchft": Environment(("torch==2.13.0", "torchft", "numpy"), "torchft"),
    "mxnet": Environment(("mxnet==1.9.1", "numpy<1.24"), "mxnet"),
}

PEERS = (
    Peer("TensorFlow ParameterServerStrategy, TCP", "tensorflow", "tensorflow_ps.py", small_cluster=True),
    Peer("torch rpc, TCP", "torch", "torch_rpc_ps.py", ("tcp",)),
    Peer("torch rpc, shared memory", "torch", "torch_rpc_ps.py", tcp=False),
    Peer("MXNet KVStore, TCP", "mxnet", "mxnet_kvstore.py"),
    Peer("Ray actors, shared memory", "ray", "ray_ps.py", tcp=False),
)


def variable(name: str) -> str:
    """Returns the environment variable that names a peer's interpreter."""
    return f"SHOAL_PEER_{name.upper()}"


def interpreters(environ: Mapping[str, str] = os.environ, folder: Path = ENVIRONMENTS) -> dict[str, str]:
    """Returns the known interpreters by the peer's name: from its variable, or from the folder of environments.

    A peer whose variable is empty is left out.
    """
    found = {}
    for name in BY_NAME:
        built = folder / name / "bin" / "python"
        given = environ.get(variable(name), str(built) if built.exists() else "")
        if given:
            found[name] = given
    return found


def versions(interpreters: Mapping[str, str]) -> dict[str, str]:
    """Returns the version of each peer, as its interpreter reports it, or "unknown"."""
    return {name: _version(interpreter, BY_NAME[name].distribution) for name, interpreter in interpreters.items()}


def _version(interpreter: str, distribution: str) -> str:
    ask = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    try:
        answer = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
