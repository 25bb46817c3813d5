"""Loggers: a user's process gets messages of the logger `shoal`, and a role gets structured lines."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from shoal._system.logs import Log

WARN = (
    "from shoal._system.logs import Log; log = Log('a'); log.warning('refused', job='line', why='no'); log.debug('x')"
)
TO_STDOUT = "import logging, sys; logging.basicConfig(stream=sys.stdout, level='DEBUG', format='%(name)s %(message)s')"


def run(code: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, done.stderr


@pytest.fixture
def unconfigured() -> Iterator[None]:
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.reset_defaults()
    yield
    if before:
        structlog.configure(**before)


def test_a_program_that_configures_nothing_gets_warnings_on_standard_error() -> None:
    assert run(WARN) == ("", "refused (job=line, why=no)\n")


def test_a_program_that_configures_logging_gets_the_messages_there() -> None:
    assert run(f"{TO_STDOUT}; {WARN}") == ("shoal refused (job=line, why=no)\nshoal x\n", "")


def test_messages_have_levels_and_tracebacks(caplog: pytest.LogCaptureFixture, unconfigured: None) -> None:
    caplog.set_level(logging.DEBUG, "shoal")
    log = Log("a")
    log.debug("50% done")
    log.info("info")
    log.error("error", code=3)
    try:
        {"here": 1}["gone"]
    except KeyError:
        log.exception("failed")
    assert [(it.levelname, it.getMessage()) for it in caplog.records] == [
        ("DEBUG", "50% done"),
        ("INFO", "info"),
        ("ERROR", "error (code=3)"),
        ("ERROR", "failed"),
    ]
    assert "KeyError: 'gone'" in caplog.text


def test_a_role_gets_structured_lines(caplog: pytest.LogCaptureFixture) -> None:
    with capture_logs() as lines:
        Log("a").warning("refused", job="line")
    assert lines == [{"event": "refused", "job": "line", "log_level": "warning"}]
    assert not caplog.records
