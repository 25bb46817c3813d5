"""What is kept of a cluster: its records, and the stores that keep them.

`ClusterRecords` and `restored` map a cluster to records and back; `Store` is where they lie, SQLite's or in memory.
The shell decides when to write, and the machine which records have changed. The shell and what is above it
may import it; it imports `cluster`, `job` and `messages`.
"""

from shoal_coordinator.persistence.cluster_records import ClusterRecords, restored
from shoal_coordinator.persistence.store import MEMORY, Store, make_default_path, open_store

__all__ = ["MEMORY", "ClusterRecords", "Store", "make_default_path", "open_store", "restored"]
