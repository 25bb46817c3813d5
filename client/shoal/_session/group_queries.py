"""Questions of a client about elastic groups."""

from shoal._rpc import CoordinatorClient
from shoal.status import GroupStatus
from shoal.v1 import group_pb2


class GroupQueries:
    """The part of a client that concerns elastic groups, which the coordinator brings together."""

    _coordinator: CoordinatorClient

    def groups(self) -> list[GroupStatus]:
        """Returns the status of all elastic groups of the cluster, in order of their names, without their ranks."""
        found = self._coordinator.call(self._coordinator.groups.ListGroups, group_pb2.ListGroupsRequest())
        return [GroupStatus.from_proto(it) for it in found.groups]

    def group(self, name: str) -> GroupStatus:
        """Returns the status of an elastic group, with the times of its ranks over the last minute.

        Raises:
            UnknownGroup: there is no such group.
        """
        request = group_pb2.GetGroupRequest(group=name)
        return GroupStatus.from_proto(self._coordinator.call(self._coordinator.groups.GetGroup, request).status)


__all__ = ["GroupQueries"]
