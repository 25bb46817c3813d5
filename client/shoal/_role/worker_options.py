"""Options of a worker's command that clusters of all kinds set, and the threads of its libraries (no I/O)."""

from collections.abc import Iterable, Sequence
from typing import Any

from shoal._system import check_type

# The variables from which linear algebra libraries take their number of threads.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def share_of_cores(cores: int, workers: int) -> dict[str, str]:
    """Returns the variables that give each worker of a machine its share of the cores, so that they do not compete."""
    return dict.fromkeys(THREADS, str(max(1, cores // max(1, workers))))


def program_options(allow_programs: Any, trainer_env: Any) -> list[str]:
    """Returns the options for the programs that jobs may name, and for the environment variables that programs get.

    Args:
        allow_programs: a pattern, or a list of them; see `shoal.LocalCluster`.
        trainer_env: a variable, or a list of them; see `shoal.LocalCluster`.

    Raises:
        BadRequest: one of them is not a text.
    """
    patterns = texts("allow_programs", allow_programs, "a pattern, such as 'vision.*', or a list of them")
    variables = texts("trainer_env", trainer_env, "a name, such as 'AWS_ACCESS_KEY_ID', NAME=VALUE, or a list of them")
    return [*repeated("--allow-program", patterns), *repeated("--trainer-env", variables)]


def repeated(option: str, values: Iterable[str]) -> list[str]:
    """Returns an option once for each value."""
    return [part for value in values for part in (option, value)]


def texts(name: str, given: Any, give: str, kinds: tuple[type[Any], ...] = (str,)) -> list[str]:
    """Returns one text, or several of them, as a list.

    Args:
        name: name of the argument.
        given: its value.
        give: what it should be, for the error.
        kinds: the types that count as a text.

    Raises:
        BadRequest: it is something else.
    """
    found = [given] if isinstance(given, kinds) else given
    check_type(name, found, Sequence, give)
    for text in found:
        check_type(name, text, kinds, give)
    return [*map(str, found)]


__all__ = ["THREADS", "program_options", "repeated", "share_of_cores", "texts"]
