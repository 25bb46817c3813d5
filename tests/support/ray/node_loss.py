"""Driver on a Ray cluster of three nodes, which are processes on this machine. It loses the node of a server.

    python -m support.ray.node_loss FOLDER

Prints the seconds until the server is back on another node. A process has one connection to Ray, so this is a process
of its own.
"""

import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import shoal
import shoal.ray
from shoal import optim
from support.clusters.local import PROGRAMS, QUICK
from support.waiting import wait_until

STEPS, BATCH = 640, 8


def paced(gate: Path) -> shoal.Job:
    """Returns a job with two copies of each shard, whose steps are slow until the file exists."""
    return shoal.Job(
        "support.programs.broken:Paced",
        settings={"gate": str(gate), "seconds": 0.05, "size": STEPS * BATCH},
        shards=2,
        replicas=2,
        min_replicas=1,
        optimizer=optim.SGD(1.0),
        batch_size=BATCH,
    )


def lose_a_node(nodes: Any, others: dict[str, Any], gate: Path) -> None:
    """Trains while Ray loses the node of a server that has no coordinator.

    Args:
        nodes: the Ray cluster.
        others: the nodes that it may lose, by their ids.
        gate: file that ends the job.
    """
    with shoal.ray.cluster(servers=2, workers=1, path=PROGRAMS, flags=QUICK) as cluster, cluster.client() as client:
        where = {name: cluster.report(name)["node"] for name in cluster.actors}
        assert where["server-0"] != where["server-1"], "Ray has not spread the servers"
        spare = (where["coordinator"], where["worker-0"])
        victim = next(it for it in ("server-0", "server-1") if where[it] in others and where[it] not in spare)
        job = client.submit(paced(gate))
        wait_until(lambda: job.status().copies == 2, timeout_s=60, what="two copies on two nodes")
        lost_at = time.monotonic()
        nodes.remove_node(others[where[victim]], allow_graceful=False)
        wait_until(lambda: cluster.report(victim)["node"] != where[victim], timeout_s=120, what="the server's return")
        took = time.monotonic() - lost_at
        wait_until(lambda: job.status().copies == 2, timeout_s=60, what="two copies again")
        gate.touch()
        job.wait(timeout_s=60)
        assert job.status().restarts == 0
    print(f"{took:.1f}")


def main(folder: Path) -> None:
    head = {"num_cpus": 2, "include_dashboard": False, "temp_dir": str(folder)}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        others = [nodes.add_node(num_cpus=2) for _ in range(2)]
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, log_to_driver=False)
        lose_a_node(nodes, {node.node_id: node for node in others}, folder / "gate")
    finally:
        ray.shutdown()
        nodes.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
