"""Persistence of a cluster: its records, and the stores that keep them.

`ClusterRecords` and `restored` map a cluster to records and back. `Store` keeps records in SQLite or in memory. The
shell decides when to write, and the machine tracks which records are dirty. The shell and the packages above it may
import this package; it imports `cluster`, `job` and `messages`.
"""

from shoal_coordinator.persistence.cluster_records import ClusterRecords, encode_records, restored
from shoal_coordinator.persistence.store import MEMORY, Store, make_default_path, open_store

__all__ = ["MEMORY", "ClusterRecords", "Store", "encode_records", "make_default_path", "open_store", "restored"]
