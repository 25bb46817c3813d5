"""Calls to servers about the copies of lock groups, and the call that asks a server for an answer."""

from collections.abc import Callable

import structlog

from shoal import errors
from shoal._security import CopyGrant
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects.server_calls import ServerCalls
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
    ServerRef,
    SplitGroup,
)

_log = structlog.get_logger(__name__)

# Returns the coordinator's signature of a copy, for the backup's server with a member id and an incarnation.
GrantFor = Callable[[CopyGrant, str, int], str]
# Seconds between two questions whether a copy is complete: first, doubled each time, up to the maximum.
FIRST_POLL_S, MAX_POLL_S = 0.02, 0.5
# Seconds for an attempt to split a group: the server waits for a moment at which it can.
SPLIT_S = 30.0
# The longest pause between two attempts to split a group, in seconds.
MAX_SPLIT_POLL_S = 30.0
# Attempts to split a group with its backup that its server refuses: of an earlier version, or with a broken connection.
MOST_REFUSALS = 3
# Seconds in which a copy must get further. The network or the backup's server hangs otherwise.
STALLED_S = 30.0
# Seconds in which a server must answer a probe. A server answers at once, whatever else it does.
PROBE_S = 1.0


def no_grant(copy: CopyGrant, backup: str, incarnation: int) -> str:  # noqa: ARG001 - the same for all copies
    """Returns no grant: the cluster asks for none.

    Args:
        copy: the copy that the primary makes.
        backup: member id of the server that gets it.
        incarnation: incarnation of that server.
    """
    return ""


def grant_of(effect: AddBackup | SplitGroup, incarnation_of: Callable[[ServerRef], int], grant_for: GrantFor) -> str:
    """Returns the grant with which the primary makes a backup, or splits one; empty for a split without a backup.

    Args:
        effect: the copy to make, or the split.
        incarnation_of: returns the incarnation of a live server, or 0. No server accepts a grant for 0.
        grant_for: signs.
    """
    server, backup = effect.server, effect.backup
    if backup is None:
        return ""
    copy = CopyGrant(
        effect.job.name, effect.generation, effect.group, effect.term, server.member, incarnation_of(server)
    )
    return grant_for(copy, backup.member, incarnation_of(backup))


def add_backup(
    effect: AddBackup, calls: ServerCalls, wait: Callable[[float], bool], clock: Callable[[], float], grant: str = ""
) -> BackupMade | BackupFailed:
    """Makes the primary of a group, or its backup, copy it to another server, and waits until the copy is complete.

    Args:
        effect: the copy to make.
        calls: the calls to servers.
        wait: waits for some seconds; returns True at once if the coordinator stops.
        clock: returns seconds that never go back.
        grant: allows the primary to make this backup.

    Returns:
        The outcome.

    Raises:
        Cancelled: the coordinator stops.
    """
    request = pb.AddBackupRequest(
        job=effect.job.name,
        generation=effect.generation,
        group=effect.group,
        term=effect.term,
        backup=pb.Peer(server=effect.backup.member, address=effect.backup.address),
        grant=grant,
        keeps_term=effect.keeps_term,
        as_backup=effect.as_backup,
    )
    poll_s, copied, moved_at, failure = FIRST_POLL_S, -1, clock(), ""
    while not failure:
        calls.check_wanted(effect.server)
        try:
            reply = calls.call(effect.server, "AddBackup", request)
        except errors.Cancelled:
            raise
        except errors.ShoalError as error:
            failure = error.message
            break
        if reply.complete:
            return BackupMade(effect.job, effect.group, effect.term, effect=effect.number)
        if reply.copied_bytes != copied:
            copied, moved_at = reply.copied_bytes, clock()
        elif clock() - moved_at > STALLED_S:
            failure = (
                f"no byte arrived in {STALLED_S:g} s, after {copied} of {reply.bytes} bytes; check the network between "
                "the two servers"
            )
        if wait(poll_s):
            raise errors.Cancelled("the coordinator stops")
        poll_s = min(2 * poll_s, MAX_POLL_S)
    reason = f"a copy of its shards from server {effect.server.member} to {effect.backup.member} failed: {failure}"
    return BackupFailed(effect.job, effect.group, effect.term, reason, effect=effect.number)


def tell(effect: DropBackup | Promote, calls: ServerCalls) -> GroupTold:
    """Tells a server which copies of a group it has to keep: that it is the primary, or which backup it has.

    Raises:
        Moved: the server does not have the group any more.
        ShoalError: the server does not answer, or has lost the shards.
    """
    kind = pb.PromoteRequest if isinstance(effect, Promote) else pb.DropBackupRequest
    request = kind(
        job=effect.job.name,
        generation=effect.generation,
        group=effect.group,
        term=effect.term,
        keeps_term=effect.keeps_term,
    )
    if isinstance(effect, DropBackup) and isinstance(request, pb.DropBackupRequest):
        request.as_backup = effect.as_backup
    elif isinstance(effect, Promote) and isinstance(request, pb.PromoteRequest):
        request.split_off.extend(effect.split_off)
    calls.call(effect.server, type(effect).__name__, request)
    return GroupTold(effect.job, effect.group, effect.term, effect=effect.number)


def split(
    effect: SplitGroup, calls: ServerCalls, wait: Callable[[float], bool], grant_of_attempt: Callable[[], str] = str
) -> GroupTold | BackupFailed:
    """Makes two lock groups of one, as often as it takes: a busy group may have no moment at which it can be split.

    The decision is never taken back, because an earlier attempt may still be carried out. But if the group cannot be
    split with its backup, the backup has failed. Then the group is split without one.

    Args:
        effect: the group, and the shards that leave it.
        calls: the calls to servers.
        wait: waits for some seconds; returns True at once if the coordinator stops.
        grant_of_attempt: returns a new grant, which allows the primary to split its backup.

    Returns:
        The outcome.

    Raises:
        Moved: the server does not have the group any more.
        Cancelled: the coordinator stops, or the split is not wanted any more.
        ShoalError: the server has lost the shards.
    """
    request = pb.SplitGroupRequest(
        job=effect.job.name,
        generation=effect.generation,
        group=effect.group,
        term=effect.term,
        shards=effect.shards,
        keeps_term=effect.keeps_term,
    )
    poll_s, refusals = MAX_POLL_S, 0
    while True:
        calls.check_wanted(effect.server)
        request.grant = grant_of_attempt()
        try:
            calls.call(effect.server, "SplitGroup", request, timeout_s=SPLIT_S)
        except (errors.Moved, errors.Cancelled, *errors.SHARDS_LOST):
            raise
        except errors.ShoalError as error:  # nothing is lost: the group goes on as it is
            _log.warning("a lock group is not split yet", job=effect.job.name, group=effect.group, reason=error.message)
            refusals += isinstance(error, errors.BadRequest)
            if effect.backup and refusals >= MOST_REFUSALS:
                reason = f"server {effect.server.member} cannot split its shards with their backup: {error.message}"
                return BackupFailed(effect.job, effect.group, effect.term, reason, effect=effect.number)
        else:
            return GroupTold(effect.job, effect.group, effect.term, effect=effect.number)
        if wait(poll_s):
            raise errors.Cancelled("the coordinator stops")
        poll_s = min(2 * poll_s, MAX_SPLIT_POLL_S)


def drop_copy(effect: DropCopy, calls: ServerCalls) -> None:
    """Makes a server free a copy of a group that it should not have any more.

    Raises:
        ShoalError: the server does not answer.
    """
    request = pb.DropCopyRequest(
        job=effect.job.name, generation=effect.generation, group=effect.group, term=effect.term
    )
    calls.call(effect.server, "DropCopy", request)


def probe(effect: ProbeServer, calls: ServerCalls) -> ServerProbed:
    """Asks a server for an answer.

    The question names a job of the server. So a new process at the same address, which has registered later or not yet,
    does not count as this server. The server answers without a lock that a training step holds.
    """
    silence = ""
    try:
        request = pb.ResumeCommitsRequest(job=effect.job.name)  # of no cut, so nothing changes
        calls.call_all([effect.server], "ResumeCommits", lambda _: request, timeout_s=PROBE_S, retry_for_s=0)
    except (errors.Unreachable, errors.DeadlineExceeded, *errors.SHARDS_LOST) as error:
        silence = error.message
    except errors.ShoalError:
        pass  # it answered
    return ServerProbed(effect.server, effect.incarnation, effect.asked_at, silence, effect=effect.number)


__all__ = [
    "FIRST_POLL_S",
    "MAX_POLL_S",
    "MOST_REFUSALS",
    "PROBE_S",
    "STALLED_S",
    "GrantFor",
    "add_backup",
    "drop_copy",
    "grant_of",
    "no_grant",
    "probe",
    "split",
    "tell",
]
