"""Limits of the calls of one server, and the reasons for which it refuses calls."""

from dataclasses import dataclass
from typing import Literal, get_args

# Seconds for a call's first message after its headers. A description of 60,000 variables has some MB, which takes less
# on any link that can train; a caller that is only slow repeats the call.
MESSAGE_S = 10.0
# Ordinary calls of one host at a time. A host has many workers in one process or behind one translated address, and
# each has a few calls that wait.
HOST_CALLS = 8_192
# Ordinary calls at a time, and as many essential ones: some 10 KB each.
CALLS = 16_384
Refusal = Literal["late_message", "calls_of_host", "calls", "unauthenticated", "forbidden"]
REFUSALS: tuple[Refusal, ...] = get_args(Refusal)


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of a server's calls.

    Attributes:
        message_s: seconds for a call's first message.
        host_calls: calls of one host at a time.
        calls: calls at a time.
    """

    message_s: float = MESSAGE_S
    host_calls: int = HOST_CALLS
    calls: int = CALLS


__all__ = ["CALLS", "HOST_CALLS", "MESSAGE_S", "REFUSALS", "CallLimits", "Refusal"]
