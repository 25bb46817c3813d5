"""List of the dependencies of Shoal, one on each line: `requirements.py EXTRA,EXTRA`, beside pyproject.toml."""

import sys
import tomllib


def requirements(extras: list[str]) -> list[str]:
    """Returns the dependencies of Shoal and of these extras, from pyproject.toml.

    Raises:
        SystemExit: there is no such extra.
    """
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    optional = project["optional-dependencies"]
    for unknown in set(extras).difference(optional):
        raise SystemExit(f"EXTRAS: there is no {unknown!r} in pyproject.toml; there are {', '.join(optional)}")
    return [*project["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements([extra for extra in sys.argv[1].split(",") if extra])))  # noqa: T201
