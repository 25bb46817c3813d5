"""Limit on open files. The tests do not change the limit of this process."""

import resource

import pytest

from shoal._system import open_files

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), 4096),
        ((4096, 4096), 4096),
        ((1024, UNLIMITED), open_files.MAX_OPEN_FILES),
        ((1024, 1 << 30), open_files.MAX_OPEN_FILES),
        ((1 << 30, 1 << 30), 1 << 30),  # never lowered
    ],
)
def test_the_soft_limit_becomes_the_hard_one(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: int
) -> None:
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    assert open_files.raise_open_files() == after
    assert limits[-1] == (after, before[1])


def test_too_low_a_limit_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert open_files.open_files_warning(1024, "1 lane", "--lanes") == ""
    warning = open_files.open_files_warning(4096, "2048 lanes", "--lanes")
    assert warning.startswith("the limit on open files is 1024, but 2048 lanes need up to 4096; raise the hard limit")
    assert warning.endswith(", or lower --lanes")
    assert open_files.open_files_warning(4096, "2048 connections").endswith("LimitNOFILE of systemd)")
