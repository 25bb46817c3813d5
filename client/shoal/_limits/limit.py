"""Limit: its name, default, unit and option, and the error that names it."""

from dataclasses import dataclass
from typing import Literal

from shoal import errors

LimitingRole = Literal["coordinator", "server"]
ROLES: tuple[LimitingRole, ...] = ("coordinator", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit.

    Attributes:
        name: the name in errors, in the label `limit` of the metrics, and in the documentation. It never changes.
        default: the limit that applies if the operator sets no other one.
        unit: the unit of the limit.
        of: what is limited, as a noun phrase.
        option: option of the role that sets the limit; empty if it is fixed.
        roles: the roles that count its refusals. Empty if it is not counted.
        error: class of the error. `Overloaded` means that a retry may succeed; `LimitExceeded` that it cannot.
        excess: what happens to the excess, if it is not refused with an error of this class.
        shown: the default in the documentation, if it depends on the machine.
    """

    name: str
    default: int
    unit: str
    of: str
    option: str = ""
    roles: tuple[LimitingRole, ...] = ROLES
    error: type[errors.ShoalError] = errors.LimitExceeded
    excess: str = ""
    shown: str = ""

    def refusal(
        self, problem: str, advice: str = "", *, limit: int | None = None, **details: object
    ) -> errors.ShoalError:
        """Returns the error for a request that exceeds the limit.

        Args:
            problem: what exceeds the limit, with its size, such as "device of w0 has 300 bytes".
            advice: what the caller should do.
            limit: the limit in force, if it is not the default.
            details: further values that the problem mentions.

        Returns:
            The error. Its details have the name of the limit.
        """
        option = f" ({self.option})" if self.option else ""
        text = f"{problem}; the limit {self.name} is {self.default if limit is None else limit}{option}"
        return self.error(f"{text}; {advice}" if advice else text, **details, limit=self.name)


__all__ = ["ROLES", "Limit", "LimitingRole"]
