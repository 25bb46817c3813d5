import resource

import pytest
from structlog.testing import capture_logs

from shoal_coordinator.open_files import warn_of_few_files


@pytest.mark.parametrize(("limit", "warns"), [(4_096, True), (1 << 20, False), (resource.RLIM_INFINITY, False)])
def test_a_coordinator_warns_of_a_limit_on_open_files_below_its_connections(
    monkeypatch: pytest.MonkeyPatch, limit: int, warns: bool
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with capture_logs() as logs:
        warn_of_few_files()
    assert [log["log_level"] for log in logs] == ["warning"] * warns
    assert all("the limit on open files is 4096, but 17696 connections need up to 18208" in it["reason"] for it in logs)
