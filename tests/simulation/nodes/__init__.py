"""Nodes of a simulation: a coordinator, servers and workers, each around the state machines of the product.

A node is a machine. Its process (`Life`) can be killed and started again, and loses all but the disks. Another kind of
server is a subclass of `ServerNode`.

- `node`, `coordinator`, `server`, `worker`, `trainer`: the processes
- `connections`: the calls of a trainer to lock groups
- `effects`, `checkpoints`, `copy_effects`: the calls of the coordinator to servers
- `group`, `replica`, `copies`, `hosted`: lock groups, as primaries and backups, the connections between them, and those
  of one server
- `draining`: the end of a server
"""

from simulation.nodes.coordinator import CoordinatorNode
from simulation.nodes.node import Node, World
from simulation.nodes.server import ServerNode
from simulation.nodes.worker import WorkerNode

__all__ = ["CoordinatorNode", "Node", "ServerNode", "WorkerNode", "World"]
