"""Environment of trainers, and advice on the limits that they may have exceeded."""

import re
import subprocess
import sys

import pytest

from shoal_worker.isolation import TrainerIsolation, TrainerLimits, trainer_environment

LIMITS = TrainerLimits(memory=1 << 30, open_files=100, processes=200)


@pytest.mark.parametrize(
    "name",
    ["PATH", "LC_ALL", "LC_CTYPE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NUMBA_CACHE_DIR", "SHOAL_TRANSPORT",
     "OTEL_EXPORTER_OTLP_ENDPOINT", "GRPC_VERBOSITY", "LD_LIBRARY_PATH", "PYTHONPATH"],
)  # fmt: skip
def test_settings_of_libraries_are_passed(name: str) -> None:
    assert trainer_environment({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "GOOGLE_APPLICATION_CREDENTIALS", "HTTPS_PROXY", "SSH_AUTH_SOCK", "X",
     "SHOAL_TOKEN", "SHOAL_TLS_KEY", "SHOAL_NAME", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_CLIENT_KEY",
     "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "CUDA_API_TOKEN", "GRPC_SECRET", "PATH_TO_KEY", "path"],
)  # fmt: skip
def test_others_are_passed_only_by_name(name: str) -> None:
    assert trainer_environment({name: "x"}) == {}
    assert trainer_environment({name: "x"}, [name]) == {name: "x"}


def test_a_daemon_that_hides_its_environment_belongs_to_root_in_proc() -> None:
    code = "import ctypes, shoal_worker.isolation as i; i.hide_environment(); print(ctypes.CDLL(None).prctl(3))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout == "0\n", "PR_GET_DUMPABLE"


def test_values_of_additions_are_in_no_text() -> None:
    isolation = TrainerIsolation(("TOKEN=secret",))
    guarded = isolation.guarded(["true"], 3, 4, {"PATH": "/bin"})
    assert guarded.environment == {"PATH": "/bin", "TOKEN": "secret"}
    assert "secret" not in f"{isolation!r} {guarded!r} {guarded.words}"


@pytest.mark.parametrize(
    ("status", "error", "options"),
    [
        (0, "PROGRAM_ERROR: x raised MemoryError: ", ["--trainer-memory"]),
        (0, "OSError: [Errno 24] Too many open files", ["--trainer-open-files"]),
        (0, "can't start new thread", ["--trainer-memory", "--trainer-processes"]),
        (0, "[Errno 11] Resource temporarily unavailable", ["--trainer-memory", "--trainer-processes"]),
        (0, "ValueError", []),
        (0, "", []),
        (-6, "", ["--trainer-memory", "--trainer-open-files", "--trainer-processes"]),
        (1, "", ["--trainer-memory", "--trainer-open-files", "--trainer-processes"]),
        (-9, "", []),
    ],
)
def test_advice_names_the_options_whose_limits_may_be_the_reason(status: int, error: str, options: list[str]) -> None:
    advice = LIMITS.advice(status, error)
    assert re.findall("--trainer-[a-z-]+", advice) == options
    assert TrainerLimits().advice(status, error) == ""
