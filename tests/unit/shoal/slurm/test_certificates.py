"""Certificates of a run: they are made again when they are incomplete or near their end."""

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.slurm._certificates import ensure_certificates

NOW = datetime.datetime(2026, 7, 1, tzinfo=datetime.UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensure_certificates(tmp_path / "certificates", NOW)
    return tmp_path / "certificates"


def test_good_certificates_stay(folder: Path) -> None:
    before = (folder / "ca.pem").read_bytes()
    ensure_certificates(folder, NOW + datetime.timedelta(days=300))
    assert (folder / "ca.pem").read_bytes() == before


def test_certificates_near_their_end_are_made_again(folder: Path) -> None:
    before = (folder / "ca.pem").read_bytes()
    ensure_certificates(folder, NOW + datetime.timedelta(days=310))
    assert (folder / "ca.pem").read_bytes() != before
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("-----BEGIN")])
@pytest.mark.parametrize("file", ["ca.pem", "ca-key.pem", "reader-key.pem"])
def test_an_interrupted_start_leaves_nothing_that_stays(
    folder: Path, file: str, damage: Callable[[Path], object]
) -> None:
    damage(folder / file)
    before = (folder / "server.pem").read_bytes()
    ensure_certificates(folder, NOW)
    assert (folder / "server.pem").read_bytes() != before
    ensure_certificates(folder, NOW)
