"""Program that cuts the network between a primary and its backup, so that no packet arrives any more, not even a reset.

It needs a network namespace of its own, whose loopback device it takes down. It prints a JSON object: the seconds until
the primary and the backup have noticed.
"""

import fcntl
import json
import socket
import struct
import threading
import time

from shoal import _rpc, optim
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.shards import LockGroup
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # of netdevice(7)
# The network is cut when the connections have been idle for so long, because the kernel sends probes after that.
_IDLE_S = 0.5


def set_loopback(*, up: bool) -> None:
    """Takes the loopback device up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, _GET_FLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP if up else flags & ~_UP))


def noticed_after(groups: list[LockGroup], within_s: float) -> list[float]:
    """Returns after how many seconds each group knows that its other copy is gone."""
    begun, found = time.monotonic(), [0.0] * len(groups)
    while not all(found) and time.monotonic() < begun + within_s:
        for index, group in enumerate(groups):
            if not found[index] and group.broken_replicas:
                found[index] = time.monotonic() - begun
        time.sleep(0.02)
    return found


def main(within_s: float = 60.0) -> None:
    set_loopback(up=True)
    with ShardServers({"w": Variable(shape=(64,))}, servers=2, shards=1) as servers:
        backup = pb.Peer(server="server-1", address=servers.addresses[1])
        request = pb.AddBackupRequest(job="job", generation=1, group=0, term=1, backup=backup)

        def is_complete() -> bool:
            with _rpc.as_shoal_errors("server-0"):
                return bool(servers.stubs[0].AddBackup(request).complete)

        wait_until(is_complete, what="the copy")
        groups = [group for store in servers.stores for group in store.hosted.all()]
        time.sleep(_IDLE_S)
        set_loopback(up=False)
        # An input that the backup never confirms. While it is on its way, its lane sends no probes.
        waiting = threading.Thread(target=groups[0].set_learning_rate, args=(optim.ConstantLR(0.5),), daemon=True)
        waiting.start()
        primary_s, backup_s = noticed_after(groups, within_s)
        print(json.dumps({"primary": round(primary_s, 2), "backup": round(backup_s, 2)}), flush=True)
        set_loopback(up=True)
        groups[0].end_copy(2)
        waiting.join()


if __name__ == "__main__":
    main()
