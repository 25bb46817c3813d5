"""Creation of a job's shards on its servers, and their removal."""

from collections import defaultdict
from collections.abc import Callable

from shoal import errors
from shoal._checkpoint import Catalogue
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects import checkpoint_restore
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.messages import CreateShards, DropShards, ServerRef, SetLearningRate, events, servers_of

# Allocating and filling shards of many GB takes a while.
_CREATE_TIMEOUT_S = 120.0


def create(
    effect: CreateShards, calls: ServerCalls, catalogue: Callable[[], Catalogue], is_live: Callable[[], bool]
) -> events.ShardsCreated:
    """Creates a job's shards on all its servers, and fills them from a checkpoint if the effect has sources.

    Args:
        effect: The shards to create.
        calls: The calls to servers.
        catalogue: Returns the cluster's checkpoints.
        is_live: Returns whether the job has not ended. If it ends, the restore ends.

    Raises:
        ShoalError: See `checkpoint_restore.restore`. Some servers may have created their shards.
    """
    servers, request_for = servers_of(effect.placement), _requests(effect)

    def create_all() -> None:
        calls.call_all(servers, "CreateShards", request_for, timeout_s=_CREATE_TIMEOUT_S)

    if not effect.sources:
        create_all()
        return events.ShardsCreated(effect.job, effect=effect.number)
    restored = checkpoint_restore.restore(effect, create_all, calls.unless_ended(is_live), catalogue())
    return events.ShardsCreated(effect.job, restored, effect=effect.number)


def drop(effect: DropShards, calls: ServerCalls) -> None:
    """Frees a job's shards on all its servers that can be reached.

    Raises:
        Unreachable: A server could not be called; the message gives the reason for each.
    """
    replies = calls.call_each(effect.servers, "DropShards", pb.DropShardsRequest(job=effect.job.name))
    if failures := [reply.message for reply in replies if isinstance(reply, errors.ShoalError)]:
        raise errors.Unreachable("; ".join(failures))


def set_learning_rate(effect: SetLearningRate, calls: ServerCalls) -> None:
    """Sets the learning rate of a job's later updates on all its servers.

    Raises:
        ShoalError: A server does not answer, or has lost the shards.
    """
    request = pb.SetRateRequest(job=effect.job.name, learning_rate=effect.learning_rate.to_proto())
    calls.call_all(effect.servers, "SetRate", lambda _: request)


def _requests(effect: CreateShards) -> Callable[[ServerRef], pb.CreateShardsRequest]:
    """Returns the function that makes a server's request. The variables are encoded once for all servers."""
    placement, spec = effect.placement, effect.spec
    by_server = defaultdict(list)
    for shard in placement.shards:
        by_server[shard.server].append(shard.layout)
    common = pb.CreateShardsRequest(
        job=placement.job,
        generation=placement.generation,
        variables=[variable.to_proto(name) for name, variable in placement.variables.items()],
        optimizer=spec.optimizer.to_proto(),
        consistency=spec.consistency.to_proto(),
        seed=spec.seed,
    )

    # Each server has to know the norm of the whole gradient.
    peers = servers_of(placement) if spec.optimizer.clip_norm else ()

    def request_for(server: ServerRef) -> pb.CreateShardsRequest:
        request = pb.CreateShardsRequest(
            shards=[layout.to_proto() for layout in by_server[server.member]],
            peers=[pb.Peer(server=it.member, address=it.address) for it in peers if it != server],
        )
        request.MergeFrom(common)
        return request

    return request_for


__all__ = ["create", "drop", "set_learning_rate"]
