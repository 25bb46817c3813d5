"""The service of groups of ranks."""

import grpc

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._wire import check_address, check_text
from shoal.status import RankTimes
from shoal.v1 import group_pb2 as pb
from shoal.v1 import group_pb2_grpc
from shoal_coordinator.api.callers import caller_name
from shoal_coordinator.api.checks import check_rank_times
from shoal_coordinator.groups import GroupRegistry, RankCandidate, RankHeartbeat

_MIN_PROGRESS = -1


class GroupsService(group_pb2_grpc.GroupsServicer):
    """The service of groups of ranks.

    Args:
        groups: the groups.
    """

    def __init__(self, groups: GroupRegistry) -> None:
        self._groups = groups

    @_rpc.servicer
    def Join(self, request: pb.JoinGroupRequest, _: grpc.ServicerContext) -> pb.JoinGroupReply:
        _check(request)
        if request.progress < _MIN_PROGRESS:
            raise errors.BadRequest(f"progress is {request.progress}; it is -1 or more")
        formed, waits_for = self._groups.join(
            request.group,
            RankCandidate(request.process_id, request.address, request.progress),
            ranks=request.ranks,
            min_ranks=request.min_ranks,
            generation=request.generation,
            submitter=caller_name(),
        )
        if formed is None:
            return pb.JoinGroupReply(waits_for=waits_for)
        ranks = [
            pb.GroupRank(process_id=it.process_id, address=it.address, progress=it.progress) for it in formed.ranks
        ]
        return pb.JoinGroupReply(generation=formed.generation, ranks=ranks)

    @_rpc.servicer
    def Heartbeat(self, request: pb.HeartbeatGroupRequest, _: grpc.ServicerContext) -> pb.HeartbeatGroupReply:
        _check(request)
        check_text(f"the reason of {request.process_id!r:.80}", request.reason)
        if not (request.generation and request.rank < request.size <= request.ranks and request.lost_rank >= -1):
            raise errors.BadRequest(
                f"rank {request.rank} of {request.size} in generation {request.generation} is not valid; generations "
                "begin with 1, and have at most as many ranks as the group"
            )
        if request.HasField("times"):
            check_rank_times(f"the heartbeat of {request.process_id!r:.80}", request.times)
        heartbeat = RankHeartbeat(
            RankCandidate(request.process_id, request.address),
            request.generation,
            request.rank,
            request.size,
            request.lost_rank,
            request.reason,
            request.leaves,
            RankTimes.from_proto(request.times) if request.HasField("times") else None,
        )
        ended = self._groups.heartbeat(
            request.group,
            heartbeat,
            ranks=request.ranks,
            min_ranks=request.min_ranks,
            submitter=caller_name(),
        )
        return pb.HeartbeatGroupReply(ended=ended)

    @_rpc.servicer
    def ListGroups(self, _request: pb.ListGroupsRequest, _: grpc.ServicerContext) -> pb.ListGroupsReply:
        return pb.ListGroupsReply(groups=[it.to_proto() for it in self._groups.statuses()])

    @_rpc.servicer
    def GetGroup(self, request: pb.GetGroupRequest, _: grpc.ServicerContext) -> pb.GetGroupReply:
        return pb.GetGroupReply(status=self._groups.status(request.group).to_proto())


def _check(request: pb.JoinGroupRequest | pb.HeartbeatGroupRequest) -> None:
    """Checks the texts and numbers that both requests have.

    Raises:
        BadRequest: one of them is not valid.
        LimitExceeded: a text is too long, or there are too many ranks.
    """
    if not (request.group and request.process_id):
        raise errors.BadRequest("the name of the group or the id of the process is empty")
    check_text("the name of the group", request.group)
    check_text("the id of the process", request.process_id)
    check_address(f"the address of {request.process_id!r:.80}", request.address)
    if request.ranks > catalogue.GROUP_RANKS.default:
        raise catalogue.GROUP_RANKS.refusal(f"group {request.group!r:.80} has {request.ranks} ranks")
    if request.ranks < 1:
        raise errors.BadRequest("the group has 0 ranks; give 1 or more")
    if not 1 <= request.min_ranks <= request.ranks:
        raise errors.BadRequest(
            f"the group has {request.ranks} ranks, but a minimum of {request.min_ranks}; give 1 to {request.ranks} as "
            "the minimum (min_workers)"
        )


__all__ = ["GroupsService"]
