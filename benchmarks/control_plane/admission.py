"""Benchmark of admission: python benchmarks/control_plane/admission.py [--workers N] [--servers N] [--store FILE] ...

A real coordinator runs with simulated workers (default: 1,000) and servers (default: 100). The script measures the
seconds from Submit until every server has admitted every worker, and until Join has told every worker that it may
begin. The simulated workers run in several processes. One worker in each of these processes then falls silent, and the
script measures the longest time in seconds from the last call of such a worker until every server has released it. It
prints one JSON line. `scale` measures the same, and more.
"""

import argparse
import json
import os

from phases import Scale, admit, remove, simulated


def scale_of(parser: argparse.ArgumentParser) -> tuple[Scale, argparse.Namespace]:
    """Adds an option for each field of `Scale`, and returns what is given."""
    for name, default in vars(Scale()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    return Scale(**{name: getattr(options, name) for name in vars(Scale())}), options


def main() -> None:
    scale, _ = scale_of(argparse.ArgumentParser(description=__doc__))
    with simulated(scale) as run:
        print(json.dumps({**run.facts, **admit(run), **remove(run), "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
