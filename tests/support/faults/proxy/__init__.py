"""Bad network for tests: TCP proxies between the roles of a cluster, which delay, stall, limit, lose and cut.

    with Network(seed=7) as network:
        proxy = network.proxy("worker-0 to coordinator", target="127.0.0.1:7070")
        ...  # let the worker call `proxy.address`
        proxy.delay(0.1, 0.02)
        proxy.partition()
        proxy.heal()

Tests import `Network` and `Proxy` from here. `conditions` is pure: it says when a segment arrives.
"""

from support.faults.proxy.conditions import Conditions, Direction
from support.faults.proxy.network import Network
from support.faults.proxy.proxy import Proxy, ProxyCounts

__all__ = ["Conditions", "Direction", "Network", "Proxy", "ProxyCounts"]
