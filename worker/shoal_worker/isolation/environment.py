"""Environment of a trainer: the variables that it gets from its daemon.

docs/how-to/trainer-isolation.md has the list for users.
"""

import re
from collections.abc import Iterable, Mapping

from shoal import errors

# Variables that every trainer gets, if the daemon has them.
ALLOWED = frozenset(
    {
        # the process and its files
        *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR"),
        # Python
        *("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
        *("PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONFAULTHANDLER", "PYTHONIOENCODING", "PYTHONUTF8"),
        # Shoal's own settings that a trainer reads
        *("SHOAL_ALLOCATOR", "SHOAL_CHUNK_BYTES", "SHOAL_FILE_ACCESS", "SHOAL_KERNELS", "SHOAL_SHARED_MEMORY"),
        *("SHOAL_TRACING", "SHOAL_TRANSPORT"),
    }
)
# Prefixes of further variables: locales, devices, threads of libraries, and the settings of tracing and gRPC.
ALLOWED_PREFIXES = (
    *("LC_", "CUDA_", "CUDNN_", "CUPY_", "NCCL_", "NVIDIA_"),
    *("BLIS_", "GOMP_", "GOTO_", "KMP_", "MKL_", "NUMBA_", "NUMEXPR_", "OMP_", "OPENBLAS_", "VECLIB_"),
    *("GRPC_", "OTEL_"),
)
# A variable with such a word may hold a secret, such as OTEL_EXPORTER_OTLP_HEADERS. It is not passed by its prefix.
_SECRET_WORDS = frozenset({"AUTH", "CREDENTIAL", "CREDENTIALS", "HEADERS", "KEY", "PASSWORD", "SECRET", "TOKEN"})

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def trainer_environment(daemon: Mapping[str, str], further: Iterable[str] = ()) -> dict[str, str]:
    """Returns the environment of a trainer.

    Args:
        daemon: the daemon's environment.
        further: what the operator adds with --trainer-env: NAME passes the daemon's variable, if it is set, and
            NAME=VALUE sets one.
    """
    passed = {name: value for name, value in daemon.items() if _is_allowed(name)}
    for each in further:
        name, equals, value = each.partition("=")
        if equals:
            passed[name] = value
        elif name in daemon:
            passed[name] = daemon[name]
    return passed


def check_additions(further: Iterable[str]) -> None:
    """Checks the values of --trainer-env.

    Raises:
        BadRequest: one is neither NAME nor NAME=VALUE.
    """
    for each in further:
        name = each.partition("=")[0]
        if not _NAME.fullmatch(name) or "\0" in each:
            raise errors.BadRequest(  # without the value, which may be a secret
                f"--trainer-env has {name!r:.80}, which is not a variable name; give NAME or NAME=VALUE, such as "
                "AWS_ACCESS_KEY_ID"
            )


def _is_allowed(name: str) -> bool:
    if name in ALLOWED:
        return True
    return name.startswith(ALLOWED_PREFIXES) and not _SECRET_WORDS.intersection(name.upper().split("_"))


__all__ = ["ALLOWED", "ALLOWED_PREFIXES", "check_additions", "trainer_environment"]
