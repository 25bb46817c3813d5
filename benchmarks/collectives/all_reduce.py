"""All-reduce of the dense workload's bytes: python benchmarks/collectives/all_reduce.py RANKS [--hosts N] [--tcp].

Each rank is a process on this machine, and has one float32 array of 106 MB. A step replaces the arrays by their mean,
as gloo's script does (`peers/gloo_allreduce.py`). With --tcp, the ranks use connections on loopback. Otherwise they use
shared memory. With --hosts, it is that of several hosts, which are folders for shared memory as containers have them,
and connections on loopback between hosts. Rank 0 prints one JSON line.
"""

import argparse
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from peers import workload as wl

from shoal._transport import SHM, TokenSecurity
from shoal_distribute.collectives import Group, ReduceOp


def main() -> int:
    options = _options()
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(options.ranks)]
    addresses = [f"127.0.0.1:{it.getsockname()[1]}" for it in listening]
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        told = json.dumps({"addresses": addresses, "token": secrets.token_hex(16), "folder": folder})
        ranks = []
        for rank, each in enumerate(listening):
            with each:
                command = [sys.executable, *sys.argv, "--rank", str(rank), "--descriptor", str(each.fileno())]
                ranks.append(subprocess.Popen(command, pass_fds=[each.fileno()], stdin=subprocess.PIPE))
        for process in ranks:
            assert process.stdin
            process.stdin.write(told.encode())
            process.stdin.close()
        return max(abs(process.wait()) for process in ranks)


def run(options: argparse.Namespace) -> None:
    """Runs one rank."""
    told = json.load(sys.stdin)
    host = Path(told["folder"], str(options.rank * options.hosts // options.ranks))
    host.mkdir(exist_ok=True)
    with Group.open(
        options.rank,
        told["addresses"],
        security=TokenSecurity(bytes.fromhex(told["token"])),
        listening=socket.socket(fileno=options.descriptor),
        share=not options.tcp,
        directory=host,
    ) as group:
        x = np.full(wl.DENSE_BYTES // 4, group.rank, np.float32)

        def run_steps(count: int) -> None:
            for _ in range(count):
                group.all_reduce(x, ReduceOp.MEAN)
            group.barrier()

        # All ranks take the steps that rank 0 counts.
        seconds = _measured(group, run_steps, options.short)
        assert abs(x - (group.ranks - 1) / 2).max() < 1e-6, "the mean is wrong"
        if group.rank == 0:
            print(
                json.dumps(
                    {
                        "peer": f"Shoal all-reduce, {group.ranks} ranks",
                        "workload": "all_reduce",
                        "ms_per_step": seconds * 1e3,
                        "shared_memory": group.shares_memory,
                        "hosts": len(group.hosts),
                        "algorithm_gb_per_s": wl.DENSE_BYTES / seconds / 1e9,
                    }
                ),
                flush=True,
            )


def _measured(group: Group, run_steps: Callable[[int], object], short: bool) -> float:
    def agreed(count: int) -> None:
        run_steps(int(group.broadcast(np.array([count]))[0]))

    return wl.measure(agreed, 1, 0.05) if short else wl.measure(agreed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ranks", type=int)
    parser.add_argument("--hosts", type=int, default=1, help="hosts that the ranks are divided among")
    parser.add_argument("--tcp", action="store_true", help="use connections instead of shared memory")
    parser.add_argument("--short", action="store_true", help="make a short run, whose result means nothing")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = _options()
    if given.rank is None:
        sys.exit(main())
    run(given)
