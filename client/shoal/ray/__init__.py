"""Ray: a cluster whose coordinator, servers and workers are actors.

    ray.init()
    with shoal.ray.cluster(servers=2, workers=4) as cluster, cluster.client() as client:
        client.submit(shoal.Job("digits:Digits", workers=4)).wait()

Ray places the roles and starts them again when they die. Values do not pass through Ray: workers and servers call each
other as in every other cluster. Provisional. Needs the extra `ray`.
"""

from shoal._system import load

load("ray", "shoal.ray", extra="ray")

from shoal.ray._cluster import RayCluster, cluster  # noqa: E402 - after the check, whose error says what to install
from shoal.ray._connection import connect  # noqa: E402

__all__ = ["RayCluster", "cluster", "connect"]
