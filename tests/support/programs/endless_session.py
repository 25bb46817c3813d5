"""A process with one session of two, which takes steps until it gets SIGINT.

python endless_session.py ADDRESS JOB ON_ERROR
"""

import sys

import numpy as np

import shoal


def main(address: str, job: str, on_error: str) -> None:
    variables = {"w": np.zeros(3)}
    with (
        shoal.Client(address) as client,
        client.session(job, variables=variables, workers=2, worker="ended", on_error=on_error) as session,  # type: ignore[arg-type]
    ):
        while True:
            session.pull()
            session.push({"w": np.ones(3)})


if __name__ == "__main__":
    main(*sys.argv[1:])
