"""Catalogue of checkpoints, and their manifests."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._checkpoint import manifest as manifests
from shoal._checkpoint.catalogue import Catalogue, expired_numbers, path_of
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._checkpoint.tensor_files import write_tensors

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def manifest(job: str = "digits", number: int = 1, **fields: Any) -> Manifest:
    known = {"created_at": 1.5, "step": 7, "version": 9, "spec": {}, "variables": (), "files": ()}
    return Manifest(job=job, number=number, **{**known, **fields})


def save(catalogue: Catalogue, job: str, number: int, **fields: Any) -> Manifest:
    x = np.arange(100, dtype=np.float32) + number
    path = (*path_of(job, number), "shard-0.safetensors")
    entry = write_tensors(catalogue.folder, path, [("x", x.dtype, x.shape)], [x.data])
    saved = manifest(job, number, files=(entry,), **fields)
    catalogue.publish(saved)
    return saved


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(LocalStorage(tmp_path))


# Manifests.


@given(
    job=st.text(),
    number=st.integers(1, 10**18),
    created_at=st.floats(0, 1e12),
    spec=st.dictionaries(st.text(), JSON, max_size=3),
    variables=st.lists(st.dictionaries(st.text(), JSON, max_size=2), max_size=2).map(tuple),
    files=st.lists(st.builds(FileEntry, st.text(), st.integers(0, 10**15), st.lists(st.text()).map(tuple)), max_size=2),
    data=st.dictionaries(st.text(), JSON, max_size=3),
    evaluation=st.dictionaries(st.text(), JSON, max_size=3),
)
def test_a_manifest_is_read_as_it_was_written(files: list[FileEntry], **fields: Any) -> None:
    written = Manifest(step=3, version=5, files=tuple(files), **fields)
    assert Manifest.from_bytes(written.to_bytes(), "m") == written


@given(bit=st.floats(0, 1, exclude_max=True))
def test_a_manifest_with_any_other_bit_is_damaged(bit: float) -> None:
    written = manifest(spec={"name": "digits", "nested": {"é": [1, 2.5]}}, evaluation={"values": {"accuracy": 0.93}})
    text = bytearray(written.to_bytes())
    at = int(bit * len(text) * 8)
    text[at // 8] ^= 1 << (at % 8)
    with pytest.raises(errors.CorruptCheckpoint, match="m is damaged"):
        Manifest.from_bytes(bytes(text), "m")


def test_a_manifest_cut_short_anywhere_or_longer_is_damaged() -> None:
    text = manifest().to_bytes()
    for size in range(len(text)):
        with pytest.raises(errors.CorruptCheckpoint):
            Manifest.from_bytes(text[:size], "m")
    with pytest.raises(errors.CorruptCheckpoint):
        Manifest.from_bytes(text + b"\n", "m")


def sealed(text: bytes) -> bytes:
    """Ends a JSON object as every version's manifest does."""
    begun = text.rstrip().removesuffix(b"}")
    return begun + f',\n "sum": "{manifests.sum_of(begun)}"\n}}\n'.encode()


def signed(**fields: Any) -> bytes:
    return sealed(json.dumps({"format": "shoal-checkpoint", "schema": manifests.VERSION, **fields}).encode())


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"format": "shoal-checkpoint"}', signed(), signed(files=3)],
)
def test_text_that_is_not_a_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(errors.CorruptCheckpoint):
        Manifest.from_bytes(text, "m")


def test_a_manifest_of_a_later_shoal_is_refused_by_name() -> None:
    text = signed(schema=5, writer="9.0", more="fields")
    with pytest.raises(errors.IncompatibleCheckpoint, match=r"schema 5.*up to 4.*9\.0"):
        Manifest.from_bytes(text, "m")


def test_manifest_of_a_later_version_may_have_another_layout() -> None:
    text = sealed(b'{"writer":"9.0","schema":5,"step":1e400,"format":"shoal-checkpoint", "caf\\u00e9" : [ ] , "sum":3}')
    with pytest.raises(errors.IncompatibleCheckpoint, match=r"schema 5.*9\.0"):
        Manifest.from_bytes(text, "m")
    for at in range(len(text)):
        with pytest.raises(errors.CorruptCheckpoint):
            Manifest.from_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :], "m")


@pytest.mark.parametrize(
    "text", [b'{"format":"other","schema":1}', b'{"format":"shoal-checkpoint","schema":"1"}', b'{"schema":2}', b"{]}"]
)
def test_sealed_text_that_is_not_a_manifest_is_damaged(text: bytes) -> None:
    with pytest.raises(errors.CorruptCheckpoint, match="m is damaged: it is not a manifest"):
        Manifest.from_bytes(sealed(text), "m")


@pytest.mark.parametrize(("schema", "unknown"), [(1, {"evaluation", "submitter"}), (3, {"submitter"})])
def test_a_manifest_of_an_earlier_version_is_read(schema: int, unknown: set[str]) -> None:
    written = manifest(spec={"name": "digits"}, progress={"loss": 0.5})
    record = {name: value for name, value in asdict(written).items() if name not in unknown}
    assert Manifest.from_bytes(signed(**{**record, "schema": schema}), "m") == written


# Checkpoints.


def test_a_checkpoint_is_there_when_its_manifest_is(catalogue: Catalogue) -> None:
    assert catalogue.jobs() == []
    assert catalogue.next_number("digits") == 1
    first, second = save(catalogue, "digits", 1), save(catalogue, "digits", 2)
    catalogue.folder.write((*path_of("digits", 3), "shard-0.safetensors"), [b"torn"])
    assert catalogue.jobs() == ["digits"]
    assert catalogue.numbers("digits") == [1, 2]
    assert catalogue.next_number("digits") == 4
    assert list(catalogue.newest("digits")) == [second, first]
    for saved in (first, second):
        assert catalogue.manifest("digits", saved.number) == saved
        catalogue.verify(saved)
    with pytest.raises(errors.UnknownCheckpoint):
        catalogue.manifest("digits", 3)


def test_sweep_removes_only_incomplete_checkpoints(catalogue: Catalogue, tmp_path: Path) -> None:
    save(catalogue, "digits", 1)
    for number in (2, 3):
        catalogue.folder.write((*path_of("digits", number), "shard-0.safetensors"), [b"torn"])
    (tmp_path / "digits" / "notes").write_text("of the user")
    assert catalogue.remove_incomplete("digits", below=3) == [2]
    assert catalogue.folder.names(["digits"]) == ["00000001", "00000003", "notes"]
    assert catalogue.remove_incomplete("digits") == [3]
    assert catalogue.numbers("digits") == [1]


def test_a_removed_checkpoint_is_no_checkpoint_from_the_first_moment_on(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(catalogue, "digits", 1)
    removed: list[tuple[str, ...]] = []
    monkeypatch.setattr(catalogue.folder, "remove", lambda path: removed.append(tuple(path)))
    catalogue.remove("digits", 1)
    assert removed == [("digits", "00000001", "manifest.json"), ("digits", "00000001")]


def test_a_damaged_checkpoint_is_skipped_for_an_older_one(catalogue: Catalogue, tmp_path: Path) -> None:
    first = save(catalogue, "digits", 1)
    save(catalogue, "digits", 2)
    damaged = tmp_path / "digits" / "00000002" / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"step": 7', '"step": 8'))
    newest, older = catalogue.newest("digits")
    assert isinstance(newest, errors.CorruptCheckpoint)
    assert older == first


def test_best_checkpoints_are_found_newest_first(catalogue: Catalogue, tmp_path: Path) -> None:
    first, second = (save(catalogue, "digits", number, evaluation={"number": f"{number}"}) for number in (1, 2))
    for number in (3, 4):
        save(catalogue, "digits", number)
    assert list(catalogue.best("digits")) == [second, first]
    damaged = tmp_path / "digits" / "00000003" / "manifest.json"
    damaged.write_text(damaged.read_text().replace('"step": 7', '"step": 8'))
    perhaps, *rest = catalogue.best("digits")
    assert isinstance(perhaps, errors.CorruptCheckpoint)
    assert perhaps.details["checkpoint"] == "digits/3"
    assert rest == [second, first]
    assert list(catalogue.best("other")) == []


def test_a_file_of_tensors_that_is_damaged_fails_the_check(catalogue: Catalogue, tmp_path: Path) -> None:
    saved = save(catalogue, "digits", 1)
    file = tmp_path / "digits" / "00000001" / "shard-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(errors.CorruptCheckpoint, match="shard-0"):
        catalogue.verify(saved)
    file.unlink()
    with pytest.raises(errors.CorruptCheckpoint, match="missing"):
        catalogue.verify(saved)


def test_renamed_or_copied_checkpoint_raises_an_error(catalogue: Catalogue, tmp_path: Path) -> None:
    save(catalogue, "digits", 1)
    (tmp_path / "digits" / "00000001").rename(tmp_path / "digits" / "00000002")
    with pytest.raises(errors.CorruptCheckpoint, match="copied or renamed"):
        catalogue.manifest("digits", 2)


def test_a_huge_manifest_is_not_read(catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal._checkpoint.catalogue.MAX_BYTES", 10)
    save(catalogue, "digits", 1)
    with pytest.raises(errors.CorruptCheckpoint, match="more than a manifest can have"):
        catalogue.manifest("digits", 1)


def test_manifests_are_json_for_people(catalogue: Catalogue, tmp_path: Path) -> None:
    save(catalogue, "digits", 1)
    record = json.loads((tmp_path / "digits" / "00000001" / "manifest.json").read_text())
    assert (record["format"], record["schema"], record["step"]) == ("shoal-checkpoint", 4, 7)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [(1, 0, [1, 2, 3, 4, 5]), (3, 0, [1, 2, 3]), (9, 0, []), (2, 3, [1, 2, 4]), (0, 0, [1, 2, 3, 4, 5])],
)
def test_retention_keeps_the_newest_and_every_nth(keep_last: int, keep_every: int, gone: list[int]) -> None:
    assert expired_numbers([3, 1, 2, 6, 5, 4], keep_last=keep_last, keep_every=keep_every) == gone
