"""Pauses before the restart of a role that keeps dying."""

from pathlib import Path

import pytest

from shoal._engines import pause_after_death


def test_the_pause_grows_up_to_a_limit_while_the_role_keeps_dying(tmp_path: Path) -> None:
    assert [pause_after_death(tmp_path, 1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_role_that_worked_for_a_while_starts_again_soon(tmp_path: Path) -> None:
    for _ in range(5):
        pause_after_death(tmp_path, 1.0)
    assert pause_after_death(tmp_path, 60.0) == 1
    assert pause_after_death(tmp_path, 1.0) == 2


@pytest.mark.parametrize("content", ["", "many", "\0", "-3"])
def test_a_file_that_is_not_whole_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "deaths").write_text(content)
    assert pause_after_death(tmp_path, 1.0) == 1


def test_a_folder_that_is_gone_counts_as_no_earlier_death(tmp_path: Path) -> None:
    assert [pause_after_death(tmp_path / "gone", 1.0) for _ in range(2)] == [1, 1]


def test_a_huge_count_gives_the_longest_pause(tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text("9" * 40)
    assert pause_after_death(tmp_path, 1.0) == 30
