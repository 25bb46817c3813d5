"""Limits of a server's calls, and the errors of calls that exceed them."""

from dataclasses import dataclass, field

from shoal import errors
from shoal._limits import catalogue
from shoal._rpc.calls import CallClass
from shoal._system import memory_limit

# The part of the process's memory limit that messages which wait for a thread may take.
_RECEIVED_PART = 8


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of a server's calls. All but the memory apply to each class of calls separately.

    Attributes:
        message_s: seconds for a call's first message after its headers. A description of 60,000 variables has some MB,
            which takes less on any link that can train; a caller that is only slow repeats the call.
        host_calls: calls of one host at a time. A host has many workers in one process or behind one translated
            address, and each has a few calls that wait.
        calls: calls at a time, of some 10 KB each.
        host_open_calls: open calls of one host at a time, in place of `host_calls`. A probe makes one at a time.
        open_calls: open calls at a time, in place of `calls`.
        received_bytes: bytes of messages that wait for a thread.
        memory_bytes: memory of the process. While it has more, calls whose message has not arrived are ended at each
            check, except essential ones, because the parts of their messages that have arrived take memory.
    """

    message_s: float = catalogue.MESSAGE_S.default
    host_calls: int = catalogue.HOST_CALLS.default
    calls: int = catalogue.CALLS.default
    host_open_calls: int = catalogue.HOST_OPEN_CALLS.default
    open_calls: int = catalogue.OPEN_CALLS.default
    received_bytes: int = field(default_factory=lambda: memory_limit() // _RECEIVED_PART)
    memory_bytes: int = field(default_factory=lambda: memory_limit() * catalogue.MEMORY_PERCENT.default // 100)

    def late(self) -> errors.ShoalError:
        """Returns the error of a call whose message is late."""
        return errors.DeadlineExceeded(
            f"the call sent no message within {self.message_s:g} s of its headers, the limit MESSAGE_S; repeat the "
            "call, and send its message at once",
            limit="MESSAGE_S",
        )

    def no_memory(self, resident: int) -> errors.ShoalError:
        """Returns the error of a call whose message has not arrived when the process has this much memory."""
        return errors.Overloaded(
            f"the process has {resident} bytes of memory, more than {catalogue.MEMORY_PERCENT.default}% of what it may "
            "have (MEMORY_PERCENT), so it ends calls whose message has not arrived; try again later",
            limit="MEMORY_PERCENT",
        )

    def too_many(self, kind: CallClass, host: bytes, of_host: int, of_all: int) -> errors.ShoalError | None:
        """Returns why another call is refused; None if it is not.

        Args:
            kind: the class of the call.
            host: where the call comes from.
            of_host: calls of this class and host now.
            of_all: calls of this class now.
        """
        limits = (catalogue.CALLS, self.calls), (catalogue.HOST_CALLS, self.host_calls)
        if kind is CallClass.OPEN:
            limits = (catalogue.OPEN_CALLS, self.open_calls), (catalogue.HOST_OPEN_CALLS, self.host_open_calls)
        callers = ("this server", of_all), (host.decode(errors="replace"), of_host)
        for (limit, most), (who, now) in zip(limits, callers, strict=True):
            if now >= most:
                return limit.refusal(f"{who} has {most} calls at a time", "try again later", limit=most)
        return None

    def too_large(self, nbytes: int, waiting: int) -> errors.ShoalError | None:
        """Returns why a message is refused; None if it is not.

        Args:
            nbytes: bytes of the message.
            waiting: bytes of the messages that wait for a thread now.
        """
        if waiting + nbytes <= self.received_bytes:
            return None
        problem = f"messages of {waiting} bytes wait for a thread, and this one has {nbytes} bytes"
        return catalogue.RECEIVED_BYTES.refusal(problem, "try again later", limit=self.received_bytes)


__all__ = ["CallLimits"]
