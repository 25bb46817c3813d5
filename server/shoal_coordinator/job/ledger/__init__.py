"""The data of one job: `Ledger` has the state of every range, and `RequeuedRanges` those that wait to be leased again.

Pure: no clock, no I/O.
"""

from shoal_coordinator.job.ledger.ledger import Ledger, default_range_size

__all__ = ["Ledger", "default_range_size"]
