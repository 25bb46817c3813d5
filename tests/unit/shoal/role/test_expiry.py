"""Metric and reminder of a role's certificate that will expire."""

import datetime
import math
from collections.abc import Iterable
from pathlib import Path

import prometheus_client
import pytest
from structlog.testing import capture_logs

from shoal._role import process_metrics
from shoal._role.expiry_reminder import DAY_S, ExpiryReminder
from shoal._security.certificates import CA_DAYS, issue_certificate, make_certificates
from shoal._security.tls import TlsFiles
from support.certificates import replace_certificates, tls_files

NAME = "shoal_server_certificate_expiry_timestamp_seconds"
NOW = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
NOW_S = NOW.timestamp()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "certificates"
    make_certificates(made, now=NOW)
    return made


def warned(tls: TlsFiles | None, days: Iterable[float]) -> list[tuple[float, str]]:
    """Checks at times that are so many days from now. Returns the time of each warning, and its text."""
    reminder, found = ExpiryReminder(tls), []
    for day in days:
        with capture_logs() as logs:
            reminder.check(NOW_S + day * DAY_S)
        found += [(day, log["event"]) for log in logs]
    return found


def test_the_log_reminds_once_a_day_in_the_last_month(folder: Path) -> None:
    soon, late = "a certificate expires soon", "a certificate has expired"
    days = [0, 334, 335, 335.5, 336, 336.99, 364.5, 365.5]
    assert warned(tls_files(folder), days) == [(335, soon), (336, soon), (364.5, soon), (365.5, late)]


def test_the_log_reminds_again_if_the_clock_was_set_back(folder: Path) -> None:
    assert [day for day, _ in warned(tls_files(folder), [364, 340, 340.5])] == [364, 340]


def test_a_certificate_of_a_few_days_is_reminded_of_in_its_last_third(folder: Path) -> None:
    issue_certificate("server", "short", ca=folder, days=9, now=NOW)
    tls = TlsFiles(folder / "ca.pem", folder / "short.pem", folder / "short-key.pem")
    assert [day for day, _ in warned(tls, [0, 5, 6.5, 8])] == [6.5, 8]


def test_the_reminder_says_what_and_what_to_do(folder: Path) -> None:
    with capture_logs() as logs:
        ExpiryReminder(tls_files(folder)).check(NOW_S + 355 * DAY_S)
    [log] = logs
    assert log["file"] == str(folder / "server.pem")
    assert log["days"] == 10.0
    assert log["expires"] == f"{NOW + datetime.timedelta(days=365):%Y-%m-%d %H:%M} UTC"
    assert "replace the files" in log["fix"]


def test_without_tls_nothing_expires() -> None:
    assert warned(None, [0, 10_000]) == []
    registry = prometheus_client.CollectorRegistry()
    process_metrics.register_expiry(registry, "server", None)
    assert registry.get_sample_value(NAME) == math.inf


def test_the_metric_shows_the_certificate_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    make_certificates(folder, now=NOW - datetime.timedelta(days=100))
    registry = prometheus_client.CollectorRegistry()
    process_metrics.register_expiry(registry, "server", tls_files(folder))
    assert registry.get_sample_value(NAME) == NOW_S + 265 * DAY_S
    replace_certificates(folder, tmp_path / "new")
    assert (registry.get_sample_value(NAME) or 0) >= NOW_S + 365 * DAY_S


def test_a_ca_that_ends_before_its_certificate_counts(tmp_path: Path) -> None:
    made = NOW - datetime.timedelta(days=CA_DAYS - 3)
    make_certificates(tmp_path / "ca", now=made)
    make_certificates(tmp_path / "new", ca=tmp_path / "ca", now=NOW)
    validity = tls_files(tmp_path / "new").current().validity
    assert validity
    assert validity.file.name == "ca.pem"
    assert validity.ends_at == NOW_S + 3 * DAY_S
