"""Limits on everything that callers can make grow: the table of limits, their errors and the counts of refusals.

Any package may import this one. `catalogue` is the table. The limits page of the documentation is generated from it.
"""

from shoal._limits import catalogue
from shoal._limits.limit import Limit
from shoal._limits.refusals import count_refusal, refusals

__all__ = ["Limit", "catalogue", "count_refusal", "refusals"]
