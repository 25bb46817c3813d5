"""Limits of everything that a peer's input can make grow: one table, the errors that name a limit, and their counts.

Any package may import this one. `catalogue` is the table, from which the reference of the documentation is generated.
"""

from shoal._limits import catalogue
from shoal._limits.limit import Limit
from shoal._limits.refusals import count_refusal, refusals

__all__ = ["Limit", "catalogue", "count_refusal", "refusals"]
