"""Effects about the copies of lock groups as calls to simulated servers, as those of the product."""

from typing import TYPE_CHECKING

from shoal import errors
from shoal_coordinator.effects.copy_effects import FIRST_POLL_S, MAX_POLL_S, MAX_SPLIT_POLL_S, PROBE_S, SPLIT_S
from shoal_coordinator.messages import (
    AddBackup,
    BackupFailed,
    BackupMade,
    DropBackup,
    DropCopy,
    GroupTold,
    ProbeServer,
    Promote,
    ServerProbed,
    SplitGroup,
)
from simulation import messages

if TYPE_CHECKING:
    from simulation.nodes.effects import EffectTasks


async def add_backup(tasks: "EffectTasks", effect: AddBackup) -> BackupMade | BackupFailed:
    """Makes the primary of a group, or its backup, copy it, and waits until the copy is complete."""
    about = effect.job.name, effect.generation, effect.group, effect.term
    request = messages.AddBackup(*about, effect.backup.member, effect.keeps_term, effect.as_backup)
    poll_s = FIRST_POLL_S
    while True:
        tasks.check_wanted(effect, effect.server)
        try:
            complete = await tasks.call(effect, request)
        except errors.Cancelled:
            raise
        except errors.ShoalError as error:
            return BackupFailed(effect.job, effect.group, effect.term, error.message, effect=effect.number)
        if complete:
            return BackupMade(effect.job, effect.group, effect.term, effect=effect.number)
        await tasks.node.sleep(poll_s)
        poll_s = min(2 * poll_s, MAX_POLL_S)


async def tell(tasks: "EffectTasks", effect: DropBackup | Promote) -> GroupTold:
    """Tells a server which copies of a group it has to keep: that it is the primary, or which backup it has."""
    about = effect.job.name, effect.generation, effect.group, effect.term, effect.keeps_term
    if isinstance(effect, DropBackup):
        await tasks.call(effect, messages.DropBackup(*about, effect.as_backup))
    else:
        await tasks.call(effect, messages.Promote(*about))
    return GroupTold(effect.job, effect.group, effect.term, effect=effect.number)


async def split(tasks: "EffectTasks", effect: SplitGroup) -> GroupTold | BackupFailed:
    """Makes two lock groups of one, as often as it takes. Simulated servers do not split a group with a backup."""
    if effect.backup:
        reason = "the server is of an earlier version"
        return BackupFailed(effect.job, effect.group, effect.term, reason, effect=effect.number)
    request = messages.SplitGroup(effect.job.name, effect.generation, effect.group, effect.term, effect.shards)
    poll_s = MAX_POLL_S
    while True:
        tasks.check_wanted(effect, effect.server)
        try:
            await tasks.call(effect, request, timeout_s=SPLIT_S)
        except (errors.Moved, errors.Cancelled, *errors.SHARDS_LOST):
            raise
        except errors.ShoalError:
            await tasks.node.sleep(poll_s)
            poll_s = min(2 * poll_s, MAX_SPLIT_POLL_S)
        else:
            return GroupTold(effect.job, effect.group, effect.term, effect=effect.number)


async def drop_copy(tasks: "EffectTasks", effect: DropCopy) -> None:
    """Makes a server free a copy of a group that it should not have any more."""
    await tasks.call(effect, messages.DropCopy(effect.job.name, effect.generation, effect.group, effect.term))


async def probe(tasks: "EffectTasks", effect: ProbeServer) -> ServerProbed:
    """Asks a server for an answer."""
    silence, request = "", messages.ResumeCommits(effect.job.name, 0)
    try:
        await tasks.call_all(effect, effect.servers, lambda _: request, timeout_s=PROBE_S, retry_for_s=0.0)
    except (errors.Unreachable, errors.DeadlineExceeded, *errors.SHARDS_LOST) as error:
        silence = error.message
    except errors.ShoalError:
        pass  # it answered
    return ServerProbed(effect.server, effect.incarnation, effect.asked_at, silence, effect=effect.number)


__all__ = ["add_backup", "drop_copy", "probe", "split", "tell"]
