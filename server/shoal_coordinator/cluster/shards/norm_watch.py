"""Norm watch: synchronous jobs with `clip_norm` whose servers cannot reach each other (no I/O).

The step of such a job waits until each server has the norms of all others (docs/decisions/0063). Servers report
with their heartbeats which norms other servers do not accept.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from shoal.status import Role, UndeliveredNorm
from shoal_coordinator.cluster.job_table import JobTable
from shoal_coordinator.cluster.membership import Membership
from shoal_coordinator.cluster.shards.placement import Candidate
from shoal_coordinator.job import JobMachine
from shoal_coordinator.messages import JobRef

# Seconds for which a step waits for the norm of another server. After that, the job gives up its shards. It is longer
# than the time after which a dead server is declared lost with the default heartbeat timeout.
NORM_TIMEOUT_S = 60.0


class NormWatch:
    """Finds the jobs whose servers cannot reach each other, and the servers that their next placements leave out.

    Nothing of this is stored: after a restart of the coordinator, the next heartbeats tell it again.

    Args:
        members: members of the cluster; servers have the loads of their latest heartbeats.
        jobs: jobs of the cluster.
    """

    def __init__(self, members: Membership, jobs: JobTable) -> None:
        self._members, self._jobs = members, jobs
        self._found: dict[JobRef, list[tuple[str, UndeliveredNorm]]] = {}  # with the server that has the norm
        self._left_out: dict[JobRef, frozenset[str]] = {}  # servers that placements of live jobs leave out

    def update(self) -> bool:
        """Reads the latest heartbeats. Returns whether what a job waits for has changed."""
        before = {ref: _pairs(norms) for ref, norms in self._found.items()}
        self._found = {}
        for server in self._members.alive(Role.SERVER):
            for norm in server.load.undelivered_norms:
                job = self._jobs.get(norm.job)
                if job and _concerns(job, server.id, norm):
                    self._found.setdefault(job.ref, []).append((server.id, norm))
        if self._left_out:
            self._left_out = {ref: it for ref, it in self._left_out.items() if self._jobs.find_live(ref)}
        return before != {ref: _pairs(norms) for ref, norms in self._found.items()}

    def waiting_for(self, job: JobMachine) -> str:
        """Returns what a job waits for; empty if its servers reach each other."""
        if job.ref not in self._found:
            return ""
        pairs = _pairs(self._found[job.ref])
        told = ", ".join(f"server {server} to reach server {other}" for server, other in pairs)
        return f"waiting for {told}, for the norm of a step" if told else ""

    def give_up(self) -> list[tuple[JobMachine, str]]:
        """Returns the jobs that have waited too long, and the reasons. Their next placements leave out servers."""
        overdue = []
        for ref, norms in list(self._found.items()):
            server, norm = max(norms, key=lambda found: found[1].seconds)
            job = self._jobs.find_live(ref)
            if job is None or norm.seconds < NORM_TIMEOUT_S:
                continue
            del self._found[ref]
            self._left_out[ref] = self._left_out.get(ref, frozenset()) | separating(_pairs(norms))
            reason = (
                f"server {server} could not send the norm of a step to server {norm.server} for {NORM_TIMEOUT_S:g} s "
                f"({norm.reason}); let the servers of a job with clip_norm reach each other"
            )
            overdue.append((job, reason))
        return overdue

    def usable(self, job: JobMachine, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Returns the servers on which a job may be placed: all if none would be left."""
        left_out = self._left_out.get(job.ref, frozenset())
        return [server for server in candidates if server.server not in left_out] or candidates


def separating(pairs: Iterable[tuple[str, str]]) -> frozenset[str]:
    """Returns servers whose removal leaves no pair. The server in the most pairs is removed first, repeatedly.

    Args:
        pairs: a server, and another one that it cannot reach. Of servers in equally many pairs, the one that is
            unreached most often is removed.
    """
    left, taken = [*pairs], set[str]()
    while left:
        counts, unreached = Counter(name for pair in left for name in pair), Counter(other for _, other in left)
        name = max(sorted(counts), key=lambda it: (counts[it], unreached[it]))
        taken.add(name)
        left = [pair for pair in left if name not in pair]
    return frozenset(taken)


def _pairs(norms: Iterable[tuple[str, UndeliveredNorm]]) -> list[tuple[str, str]]:
    return sorted({(server, norm.server) for server, norm in norms})


def _concerns(job: JobMachine, server: str, norm: UndeliveredNorm) -> bool:
    """Returns whether a norm is that of two servers of a live job's placement."""
    if job.ended or job.placement is None or job.placement.generation != norm.generation:
        return False
    return {server, norm.server} <= {it.member for it in job.servers}


__all__ = ["NORM_TIMEOUT_S", "NormWatch", "separating"]
