"""A process that reads its share of a job's data in a session, and may die at any moment.

Usage: python session_reader.py COORDINATOR JOB SAMPLES FILE WORKER. It appends the numbers of the samples that it has
trained on to the file, a line for each batch.
"""

import sys

import numpy as np

import shoal


def main(address: str, job: str, samples: str, path: str, worker: str) -> None:
    """Reads batches until the data ends."""
    with shoal.Client(address) as client, open(path, "a", encoding="utf-8") as seen:
        session = None
        while session is None:
            try:
                session = client.session(
                    job,
                    variables={"w": np.zeros(2)},
                    workers=2,
                    consistency=shoal.Asynchronous(),
                    batch_size=4,
                    worker=worker,
                )
            except shoal.Overloaded:  # the place of a dead process is not free yet
                continue
            except shoal.Cancelled:  # the others have read the rest meanwhile
                return
        with session:
            for numbers in session.batches(int(samples)):
                session.pull()
                session.push({"w": np.ones(2)}, weight=len(numbers))
                seen.write(" ".join(map(str, numbers)) + "\n")
                seen.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
