"""Planted bugs: servers that lack one protection. The simulation must find each of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Self

from shoal import errors
from shoal_server.shards.group.input_log import InputLog, InputSender
from shoal_server.shards.machine import events
from shoal_server.shards.machine.state import GroupState
from simulation import messages
from simulation.nodes import ServerNode
from simulation.nodes.group import Group
from simulation.nodes.hosted import check_whole
from simulation.nodes.replica import CopyStart, Replica


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
        group = self.hosted.group(job, None, shards)
        if group.generation == generation:
            check_whole(group, shards)
        return group


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


class ForgetfulSplit(Replica):
    """A lock group that drops staged pushes when it is split."""

    def part(self, shards: tuple[int, ...], start: CopyStart) -> Self:
        del start.state.staged[:]
        return super().part(shards, start)


class WithoutStagedPushes(ServerNode):
    """A server whose lock groups lose staged pushes when they are split."""

    replica_class = ForgetfulSplit


class EagerSplit(Replica):
    """A lock group that is split without the answers to the last pushes."""

    def part(self, shards: tuple[int, ...], start: CopyStart) -> Self:
        for worker in start.state.workers:
            worker.ClearField("answer")
        return super().part(shards, start)


class WithoutAnswers(ServerNode):
    """A server whose lock groups forget the last answers when they are split."""

    replica_class = EagerSplit


class StayingPrimary(Replica):
    """A lock group that serves alone after it was handed over, instead of being freed."""

    def leave(self, term: int) -> bool:
        self.end_copy(term)
        return False


class WithoutHandOver(ServerNode):
    """A server that goes on answering after a hand-over."""

    replica_class = StayingPrimary


PLANTED: Mapping[str, type[ServerNode]] = {
    "dedup_off": WithoutDedup,
    "fencing_off": WithoutFencing,
    "generation_check_off": WithoutGeneration,
    "acknowledge_before_backup": WithoutConfirmation,
    "split_drops_staged": WithoutStagedPushes,
    "split_drops_answers": WithoutAnswers,
    "old_primary_answers": WithoutHandOver,
}

__all__ = ["PLANTED"]
