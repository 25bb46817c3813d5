"""Comparison of lock groups' state machines and their effects, with numbers for tickets and payloads."""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any

from shoal import errors
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine import events
from shoal_server.shards.machine.state import GroupState

# Parts of a machine that only make it fast. Equal machines may differ in them.
CACHES = {"_order", "_mark", "_up_to_mark", "_first_mark", "_first"}


@dataclasses.dataclass(eq=False)
class Numbered:
    """A ticket or a payload of the primary."""

    number: int


def number_of(value: Any) -> int:
    """Returns the number of a ticket or of a payload; those of a copy are numbers."""
    return value.number if isinstance(value, Numbered) else value


def plain(value: Any) -> Any:
    """Returns all that a machine or an effect consists of, with numbers for tickets and payloads."""
    if isinstance(value, Numbered):
        return value.number
    if isinstance(value, errors.ShoalError):
        return type(value).__name__, value.message
    if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
        fields = [(it.name, plain(getattr(value, it.name))) for it in dataclasses.fields(value)]
        return [type(value).__name__, *fields]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return [(plain(key), plain(it)) for key, it in value.items()]
    if isinstance(value, list | tuple | deque):
        return [plain(it) for it in value]
    if type(value).__module__.startswith("shoal_server"):
        return [(name, plain(it)) for name, it in vars(value).items() if name not in CACHES]
    return value


def without_tickets(effects: Sequence[events.LockGroupEffect], tickets: set[int]) -> list[events.LockGroupEffect]:
    """Returns effects without the answers to some pulls."""
    found = list[events.LockGroupEffect]()
    for effect in effects:
        match effect:
            case events.AnswerPulls():
                left = tuple(ticket for ticket in effect.tickets if number_of(ticket) not in tickets)
                found += [dataclasses.replace(effect, tickets=left)] if left else []
            case events.RefusePull() if number_of(effect.ticket) in tickets:
                pass
            case _:
                found.append(effect)
    return found


def written(state: GroupState) -> pb.GroupState:
    message = pb.GroupState()
    state.write_to(message, number_of, number_of)
    return message
