"""Planted bugs: servers that lack one protection. The simulation must find each of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from shoal import errors
from shoal_server.shards.group.input_log import InputLog, InputSender
from shoal_server.shards.machine import events
from shoal_server.shards.machine.state import GroupState
from simulation import messages
from simulation.nodes import ServerNode
from simulation.nodes.group import Group
from simulation.nodes.replica import Replica


class ForgetfulState(GroupState):
    """A state machine that does not recognise a repeated push."""

    def answer_to(self, worker: str, incarnation: int, step: int) -> events.AnswerPush | None:
        with suppress(errors.BadRequest):
            super().answer_to(worker, incarnation, step)
        return None


class WithoutDedup(ServerNode):
    """A server that applies a repeated push again."""

    def machine_for(self, config: messages.CreateShards) -> GroupState:
        return ForgetfulState(config.job, self.mode_for(config), peers=config.norms)


class WithoutFencing(ServerNode):
    """A server that tells how far a worker is, but lets it go on."""

    def fence(self, group: Group, worker: str, incarnation: int) -> int:
        progress = group.machine.progress().get(worker)
        return progress.committed if progress and progress.incarnation <= incarnation else 0


class WithoutGeneration(ServerNode):
    """A server that ignores the generation of a call."""

    def group_for(self, job: str, generation: int, shards: Sequence[int]) -> Replica:
        return self.hosted.group(job, None, shards)


class EagerLog(InputLog):
    """A log that lets answers leave before the backup has the inputs."""

    def when_copied(
        self, number: int, give: Callable[[], object], refuse: Callable[[], object]
    ) -> Callable[[], object]:
        give()
        return bool


class WithoutConfirmation(ServerNode):
    """A server that acknowledges before the backup."""

    def log_for(self, group: Replica, request: messages.AddBackup, sender: InputSender) -> InputLog:
        return EagerLog(request.job, request.term, request.backup, sender)


PLANTED: Mapping[str, type[ServerNode]] = {
    "dedup_off": WithoutDedup,
    "fencing_off": WithoutFencing,
    "generation_check_off": WithoutGeneration,
    "acknowledge_before_backup": WithoutConfirmation,
}

__all__ = ["PLANTED"]
