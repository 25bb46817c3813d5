"""What a lock group gives to its callers: the answers of pulls, and the cut of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal import errors
from shoal_server.shards import events
from shoal_server.shards.snapshot import Snapshot


class PullTicket(Protocol):
    """Callbacks of one pull. The group calls them without its lock."""

    def answer(self, step: int) -> None:
        """The values may be read now."""

    def refuse(self, error: errors.ShoalError) -> None:
        """The pull has failed."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of a group's shards for a checkpoint. The owner must end each snapshot with `end_saving`."""

    answer: events.AnswerCut
    snapshots: Sequence[Snapshot]


__all__ = ["Cut", "PullTicket"]
