"""The task of a server or a worker: it finds the coordinator, runs its role, and leaves when it is told to."""

import os
import socket
import time
from collections.abc import Callable

from shoal import _rpc, errors
from shoal._system.logs import Log
from shoal.slurm._allocation import Allocation
from shoal.slurm._options import member_flags, role_environment
from shoal.slurm._role_runner import RoleRunner
from shoal.slurm._run_folder import Announcement, Phase, RunFolder, RunPlan
from shoal.slurm._signals import EndSignals

_log = Log(__name__)

POLL_S = 0.5
# Seconds between two checks whether the coordinator accepts connections, and the longest of them.
_CHECK_S, _CONNECT_S = 5.0, 2.0
# Seconds for which a task stays after the servers have had their time to save. A node can see a new file up to a minute
# later, so only then it is certain that task 0 has received no signal.
_MARGIN_S = 90.0


class MemberTask:
    """The task of a server or a worker.

    Args:
        role: server or worker.
        index: its number among those of its role.
        plan: the plan of the run.
        place: the place of the task.
        folder: the folder of the run.
        signals: the signals of this task.
        helper: "" for a task of the run's own allocation. Otherwise the name of a worker of another allocation: it
            joins the run that goes on, and leaves it by itself.
        clock: returns seconds.
    """

    def __init__(
        self,
        role: str,
        index: int,
        plan: RunPlan,
        place: Allocation,
        folder: RunFolder,
        signals: EndSignals,
        *,
        helper: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role, self._plan, self._place, self._folder = role, plan, place, folder
        self._signals, self._clock = signals, clock
        self.name = helper or f"{role}-{index}"
        self._attempt = "" if helper else place.attempt
        # A worker stays while the servers save the job, so that the coordinator does not wait for its data.
        self._drains = bool(helper) or role == "server"

    def run(self) -> None:
        """Runs the role until the run ends, or the allocation.

        Raises:
            StartFailed: the coordinator was not found or does not answer any more, the role died too often, or this
                task alone was asked to end.
        """
        found = self._await_coordinator()
        if found is None:
            return
        if not self._attempt:  # the run that goes on may not be the latest submission
            self._plan = self._folder.plan(found.run)
        flags = member_flags(self._role, self.name, self._plan, self._place, self._folder, found.address)
        environment = role_environment(self._role, os.environ, self._folder, str(self._folder.path / "state"))
        timeout_s = self._plan.start_timeout_s
        with RoleRunner(self._role, self.name, lambda _: flags, environment, start_timeout_s=timeout_s) as role:
            self._follow(role, found.address)

    def _follow(self, role: RoleRunner, coordinator: str) -> None:
        """Looks after the role until it should end."""
        asked_at: float | None = None
        answered_at = checked_at = self._clock()
        while True:
            time.sleep(POLL_S)
            now = self._clock()
            phase = self._phase()
            if phase is Phase.ENDED:
                return
            if self._signals.received or phase is Phase.STOPPING:
                asked_at = now if asked_at is None else asked_at
                if self._drains:
                    role.drain()
                if now - asked_at > self._plan.save_timeout_s + _MARGIN_S:
                    self._refuse_lone_end(phase)
                    return
            role.poll()
            if role.left and (phase is Phase.STOPPING or not self._signals.received or not self._attempt):
                return
            if now - checked_at >= _CHECK_S:
                checked_at = now
                if _accepts(coordinator):
                    answered_at = now
                elif now - answered_at > self._plan.start_timeout_s:
                    raise errors.StartFailed(
                        f"the coordinator at {coordinator} has accepted no connection for {now - answered_at:.0f} s, "
                        f"so {self.name} ends; the log of task 0 may say why. Start the run again to go on "
                        "from its newest checkpoint"
                    )

    def _refuse_lone_end(self, phase: Phase) -> None:
        """Raises StartFailed if the run goes on without this task: the job could wait for it in vain."""
        if phase is Phase.RUNNING and self._attempt:
            raise errors.StartFailed(
                f"{self.name} received a signal to end, but task 0 did not, so the run ends; send signals to all tasks "
                "of the step. Start the run again to go on from its newest checkpoint"
            )

    def _await_coordinator(self) -> Announcement | None:
        """Returns where the coordinator is, or None if this task is not needed any more."""
        deadline = self._clock() + self._plan.start_timeout_s
        while not self._signals.received:
            found = self._folder.announced(self._attempt)
            if found is not None and found.phase is Phase.ENDED and self._attempt:
                return None
            if found is not None and found.address and found.phase is Phase.RUNNING:
                return found
            if self._attempt and (failures := self._folder.failures(self._attempt)):
                raise errors.StartFailed(f"a task failed: {' '.join(failures)}")
            if self._clock() >= deadline:
                raise errors.StartFailed(
                    f"{self.name} found no coordinator within {self._plan.start_timeout_s:g} s: task 0, on the node "
                    f"{self._place.nodes[0]}, has not written its address to {self._folder.path}. The log of task 0 "
                    "says whether it runs; the folder must be on a file system that all nodes share"
                )
            time.sleep(POLL_S)
        return None

    def _phase(self) -> Phase:
        said = self._folder.announced(self._attempt)
        return Phase.RUNNING if said is None else said.phase


def _accepts(address: str) -> bool:
    """Returns whether something accepts connections at an address."""
    try:
        with socket.create_connection(_rpc.parse_address(address), _CONNECT_S):
            return True
    except OSError:
        return False


__all__ = ["POLL_S", "MemberTask"]
