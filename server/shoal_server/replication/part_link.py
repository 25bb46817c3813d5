"""Part link: the sending end of the connection to the copy of one part of a lock group that is about to be split."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shoal._wire import ShardLayout
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import replica_pb2
from shoal_server.calling_server import CallingServer
from shoal_server.replication.primary_link import PrimaryLink
from shoal_server.shards import LockGroup


class PartLink(PrimaryLink):
    """The connection of one part, which is opened before the split. Nothing is copied over it.

    Args:
        whole: the group that is split.
        shards: the shards of the part, in the order of the group.
        request: the split.
        backup: the server of the backup.
        identity: who this server is.
        on_broken: as for `PrimaryLink`.
    """

    def __init__(
        self,
        whole: LockGroup,
        shards: Sequence[int],
        request: pb.SplitGroupRequest,
        backup: pb.Peer,
        identity: CallingServer,
        on_broken: Callable[[], object] = bool,
    ) -> None:
        made = pb.AddBackupRequest(
            job=request.job,
            generation=request.generation,
            group=min(shards),
            term=request.term,
            backup=backup,
            grant=request.grant,
        )
        super().__init__(whole, made, identity, on_broken)
        self._split_from = request.group
        self._part_layouts, self._part_slabs = whole.part_layouts(shards)

    def open(self) -> None:
        """Opens the connection, and waits until the backup's server has accepted it.

        Raises:
            ShoalError: the server does not accept it.
        """
        try:
            hello = self._hello(replica_pb2.ReplicaHello.PART)
            hello.split_from = self._split_from
            inputs = self._open(hello)
            copies = self._open(self._hello(replica_pb2.ReplicaHello.COPIES))
            copies.detect_loss()  # this end sends on the other lane
            self._send_on(inputs)
            self._start_threads(copies)
        except BaseException:
            self.close()
            raise

    def _layouts(self) -> Iterable[ShardLayout]:
        return self._part_layouts

    def _slab_values(self) -> Sequence[np.ndarray]:
        return self._part_slabs


__all__ = ["PartLink"]
