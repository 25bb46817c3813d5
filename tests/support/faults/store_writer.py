"""Process that writes transactions until it is killed: store_writer.py PATH.

It prints the number of each durable transaction. Each transaction sets a few records to its number, and deletes one of
the other records.
"""

import itertools
import sys
from pathlib import Path

from shoal_coordinator.persistence.sqlite_store import SqliteStore

KEYS = [f"key/{number}" for number in range(5)]


def transaction(number: int) -> dict[str, bytes | None]:
    """Returns the n-th transaction: every record contains n, and one of ten others is deleted."""
    record = str(number).encode() * 200
    passing = {f"passing/{key}": record for key in range(10) if key != number % 10}
    return {**dict.fromkeys(KEYS, record), **passing, f"passing/{number % 10}": None}


def expected(number: int) -> dict[str, bytes]:
    """Returns the whole store after the n-th transaction, counted from 1."""
    return {key: record for key, record in transaction(number).items() if record is not None} if number else {}


def main(path: str) -> None:
    store = SqliteStore(Path(path))
    print("open", flush=True)
    for number in itertools.count(1):
        store.apply(transaction(number))
        print(number, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
