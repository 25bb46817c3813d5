"""Public API of checkpoints: naming, listing and verification, and export and import of other frameworks' files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import json_format
from safetensors.numpy import load, load_file, save_file
from typer.testing import CliRunner, Result

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import VERSION, FileEntry, Manifest
from shoal._checkpoint.slices import SavedVariables, tensor_name
from shoal._checkpoint.tensor_files import write_tensors
from shoal._cli.app import app
from shoal.checkpoints import Checkpoints
from shoal.status import Evaluation

KERNEL = np.arange(60, dtype=np.float32).reshape(10, 6)
BIAS = np.arange(6, dtype=np.float32) + 100
COUNT = np.int64(7)


def shard(folder: LocalStorage, number: int, name: str, tensors: dict[str, np.ndarray]) -> FileEntry:
    named = [(key, array.dtype, array.shape) for key, array in tensors.items()]
    data = (np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in tensors.values())
    return write_tensors(folder, (*path_of("digits", number), name), named, data)


BEST = Evaluation(5, 12, {"accuracy": 0.93, "loss": float("nan")}, samples=360, seconds=0.5, time=9.0)


def save(root: Path, number: int = 1, *, best: Evaluation | None = None) -> Manifest:
    """A kernel in three slices on two shards, with a slot beside its values."""
    folder = LocalStorage(root)
    first: dict[str, np.ndarray] = {
        tensor_name("value", 0, "dense/kernel"): KERNEL[:4],
        tensor_name("value", 7, "dense/kernel"): KERNEL[7:],
        tensor_name("exp_avg", 0, "dense/kernel"): -KERNEL[:4],
        tensor_name("exp_avg", 7, "dense/kernel"): -KERNEL[7:],
        tensor_name("value", 0, "count"): np.asarray(COUNT),
    }
    second = {
        tensor_name("value", 4, "dense/kernel"): KERNEL[4:7],
        tensor_name("exp_avg", 4, "dense/kernel"): -KERNEL[4:7],
        tensor_name("value", 0, "bias"): BIAS,
    }
    files = (shard(folder, number, "a.safetensors", first), shard(folder, number, "b.safetensors", second))
    variables = ({"name": "dense/kernel", "shape": ["10", "6"], "dtype": "FLOAT32"},)
    evaluation = json_format.MessageToDict(best.to_proto()) if best else {}
    manifest = Manifest("digits", number, 1e9, 12, 34, {}, variables, files, evaluation=evaluation)
    Catalogue(folder).publish(manifest)
    return manifest


def damage(root: Path, number: int, name: str) -> None:
    file = root / "digits" / f"{number:08}" / name
    text = bytearray(file.read_bytes())
    text[-1] ^= 1
    file.write_bytes(text)


@pytest.mark.parametrize(("start", "rows"), [(0, 10), (0, 4), (3, 2), (4, 3), (5, 5), (9, 1), (2, 0)])
def test_rows_are_read_across_slices(tmp_path: Path, start: int, rows: int) -> None:
    with SavedVariables(LocalStorage(tmp_path), save(tmp_path)) as saved:
        for kind, sign in (("value", 1), ("exp_avg", -1)):
            target = np.empty(rows * 6, np.float32)
            saved.read((kind, "dense/kernel", start, target))
            assert np.array_equal(target.reshape(rows, 6), sign * KERNEL[start : start + rows])
        assert saved.kinds("dense/kernel") == ["value", "exp_avg"]
        assert saved.kinds("bias") == ["value"]
        assert saved.kinds("other") == []


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"value/1/w": np.zeros((2, 3))}, "missing or duplicate at row 0"),
        ({"value/0/w": np.zeros((2, 3)), "value/3/w": np.zeros((2, 3))}, "missing or duplicate at row 2"),
        ({"value/0/w": np.zeros((2, 3)), "value/1/w": np.zeros((2, 3))}, "missing or duplicate at row 2"),
        ({"value/0/w": np.zeros((2, 3)), "value/2/w": np.zeros((2, 4))}, "do not fit together"),
        ({"value/0/w": np.zeros((2, 3)), "value/2/w": np.zeros((2, 3), np.float32)}, "do not fit together"),
        ({"w": np.zeros(3)}, "not named as a slice"),
        ({"value/w": np.zeros(3)}, "not named as a slice"),
        ({"value/-1/w": np.zeros(3)}, "not named as a slice"),
    ],
)
def test_slices_that_do_not_fit_together_are_damage(tmp_path: Path, tensors: dict[str, Any], said: str) -> None:
    entry = shard(LocalStorage(tmp_path), 1, "a.safetensors", tensors)
    manifest = Manifest("digits", 1, 0.0, 0, 0, {}, (), (entry,))
    with pytest.raises(errors.CorruptCheckpoint, match=said):
        SavedVariables(LocalStorage(tmp_path), manifest)


class TestTheFolder:
    def test_checkpoints_are_named_by_job_and_number(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        found = Checkpoints(str(tmp_path))
        assert [str(it) for it in found.list()] == ["digits/2", "digits/1"]
        assert str(found.list("digits")[0]) == "digits/2"
        assert str(found.show("digits")) == "digits/2"
        first = found.show("digits/1")
        assert (first.step, first.version, first.variables) == (12, 34, {"dense/kernel": ((10, 6), "float32")})
        for name in ("other", "digits/3"):
            for use in (found.show, found.verify, found.read):
                with pytest.raises(errors.UnknownCheckpoint, match=f"there is no checkpoint {name} in .* lists them"):
                    use(name)
        for name in ("digits/", "digits/x", "digits/1/2", "../digits", "digits/-1", "digits/²", "digits/0", "Digits"):
            with pytest.raises(errors.BadRequest, match="does not name"):
                found.show(name)
        for name in ("digits/1", "Digits", "../digits"):
            for listed in (found.list, found.incomplete):
                with pytest.raises(errors.BadRequest, match="give JOB only"):
                    listed(name)

    def test_a_folder_that_does_not_exist_is_no_empty_storage(self, tmp_path: Path) -> None:
        missing = Checkpoints(tmp_path / "none")
        for listed in (missing.list, missing.incomplete):
            with pytest.raises(errors.StorageFailed, match=r"there is no folder .*none; name the cluster's checkpoint"):
                listed()

    def test_values_are_read_whole(self, tmp_path: Path) -> None:
        save(tmp_path)
        values = Checkpoints(f"file://{tmp_path}").read("digits")
        assert values.keys() == {"dense/kernel", "bias", "count"}
        assert np.array_equal(values["dense/kernel"], KERNEL)
        assert values["count"].shape == ()

    def test_damaged_checkpoint_is_reported_and_others_are_shown(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        damage(tmp_path, 2, "b.safetensors")
        found = Checkpoints(str(tmp_path))
        found.verify("digits/1")
        for use in (found.verify, found.read, lambda name: found.export(name, tmp_path / "out")):
            with pytest.raises(errors.CorruptCheckpoint, match=r"b\.safetensors"):
                use("digits/2")
        assert not (tmp_path / "out").exists()
        damage(tmp_path, 2, "manifest.json")
        corrupt, first = found.list("digits")
        assert isinstance(corrupt, errors.CorruptCheckpoint)
        assert corrupt.details["checkpoint"] == "digits/2"
        assert str(first) == "digits/1"
        with pytest.raises(errors.CorruptCheckpoint):
            found.show("digits/2")
        found.remove("digits/2")
        assert str(found.show("digits")) == "digits/1"

    @pytest.mark.parametrize("damaged", ["manifest.json", "b.safetensors"])
    def test_job_name_selects_its_newest_complete_checkpoint(self, tmp_path: Path, damaged: str) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        damage(tmp_path, 2, damaged)
        found = Checkpoints(str(tmp_path))
        uses: list[Callable[[str], Any]] = [found.verify, lambda name: found.export(name, tmp_path / "out")]
        for use in [found.show, *uses] if damaged == "manifest.json" else uses:
            used = use("digits")
            assert str(used) == "digits/1"
            (problem,) = used.skipped
            assert problem.startswith("digits/2: ")
            assert damaged in problem
        with pytest.warns(UserWarning, match="digits/1 is read in place of digits/2: ") as warned:
            assert np.array_equal(found.read("digits")["dense/kernel"], KERNEL)
        assert warned[0].filename == __file__
        damage(tmp_path, 1, damaged)
        with pytest.raises(errors.CorruptCheckpoint, match=r"no checkpoint of digits can be used: .*2: .*digits/1: "):
            found.verify("digits")

    def test_the_best_is_the_newest_that_was_taken_at_the_best_evaluation(self, tmp_path: Path) -> None:
        for number, best in enumerate((BEST, BEST, None, None), start=1):
            save(tmp_path, number, best=best)
        found = Checkpoints(str(tmp_path))
        shown = found.show("digits/best")
        assert shown.evaluation
        assert (str(shown), shown.evaluation.number, shown.evaluation.time) == ("digits/2", 5, 9.0)
        assert repr(sorted(shown.evaluation.values.items())) == "[('accuracy', 0.93), ('loss', nan)]"
        assert found.show("digits").evaluation is None
        assert str(found.verify("digits/best")) == "digits/2"
        assert np.array_equal(found.read("digits/best")["bias"], BIAS)
        damage(tmp_path, 4, "manifest.json")  # which may have been one
        damage(tmp_path, 2, "b.safetensors")
        skipped = found.verify("digits/best").skipped
        assert [problem.partition(":")[0] for problem in skipped] == ["digits/4", "digits/2"]
        with pytest.raises(errors.BadRequest, match=r"give digits/NUMBER"):
            found.remove("digits/best")

    def test_without_an_evaluation_there_is_no_best(self, tmp_path: Path) -> None:
        save(tmp_path)
        with pytest.raises(errors.UnknownCheckpoint, match="there is no checkpoint digits/best in"):
            Checkpoints(str(tmp_path)).show("digits/best")

    def test_one_of_a_later_shoal_is_not_skipped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path, 1)
        with monkeypatch.context() as patch:
            patch.setattr("shoal._checkpoint.manifest.VERSION", VERSION + 1)
            save(tmp_path, 2)
        with pytest.raises(errors.IncompatibleCheckpoint):
            Checkpoints(str(tmp_path)).show("digits")

    def test_incomplete_checkpoints_are_listed_and_removed(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        save(tmp_path, 3)
        (tmp_path / "digits" / "00000003" / "manifest.json").unlink()
        (tmp_path / "gone" / "00000001").mkdir(parents=True)
        (tmp_path / "notes.txt").write_text("of the user")
        found = Checkpoints(str(tmp_path))
        assert [str(it) for it in found.list()] == ["digits/1"]
        assert [*found.incomplete()] == ["digits/3", "gone/1"]
        assert [*found.incomplete("digits")] == ["digits/3"]
        found.remove("gone/1")
        found.remove("digits/3")
        assert [*found.incomplete()] == []
        assert str(found.show("digits")) == "digits/1"

    def test_remove_all_removes_the_checkpoints_of_a_job(self, tmp_path: Path) -> None:
        for number in (1, 2, 3):
            save(tmp_path, number)
        damage(tmp_path, 2, "manifest.json")
        (tmp_path / "digits" / "00000003" / "manifest.json").unlink()
        (tmp_path / "digits" / "notes.txt").write_text("of the user")
        found = Checkpoints(str(tmp_path))
        found.import_file(tmp_path / "digits" / "00000001" / "a.safetensors", "other")
        with pytest.raises(errors.BadRequest, match="JOB only"):
            found.remove_all("digits/1")
        assert found.remove_all("digits") == ("digits/1", "digits/2", "digits/3")
        assert [path.name for path in (tmp_path / "digits").iterdir()] == ["notes.txt"]
        assert [str(it) for it in found.list()] == ["other/1"]
        with pytest.raises(errors.UnknownCheckpoint, match="there is no checkpoint digits"):
            found.remove_all("digits")

    def test_remove_requires_a_number(self, tmp_path: Path) -> None:
        save(tmp_path)
        found = Checkpoints(str(tmp_path))
        with pytest.raises(errors.BadRequest, match=r"digits/NUMBER, or .* --all"):
            found.remove("digits")
        found.remove("digits/1")
        with pytest.raises(errors.UnknownCheckpoint):
            found.remove("digits/1")

    def test_other_files_are_ignored(self, tmp_path: Path) -> None:
        save(tmp_path)
        (tmp_path / "notes.txt").write_text("of the user")
        (tmp_path / "empty").mkdir()
        (tmp_path / "digits" / "00000009").write_text("no folder")
        assert [str(it) for it in Checkpoints(str(tmp_path)).list()] == ["digits/1"]

    @pytest.mark.parametrize("url", ["nothing://bucket", "github://needs-more-than-a-url"])
    def test_a_url_of_no_storage_is_refused(self, url: str) -> None:
        with pytest.raises(errors.BadRequest, match=f"cannot be stored at {url}"):
            Checkpoints(url)


class TestOtherFrameworks:
    def test_an_export_is_read_by_the_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal._checkpoint.safetensors_files.PIECE_BYTES", 70)
        save(tmp_path)
        Checkpoints(str(tmp_path)).export("digits", tmp_path / "model.safetensors")
        exported = load_file(tmp_path / "model.safetensors")
        assert exported.keys() == {"dense/kernel", "bias", "count"}
        assert exported["dense/kernel"].tobytes() == KERNEL.tobytes()
        assert exported["count"] == 7

    def test_export_to_an_unwritable_path_raises_an_error(self, tmp_path: Path) -> None:
        save(tmp_path)
        with pytest.raises(errors.StorageFailed, match="cannot be written"):
            Checkpoints(str(tmp_path)).export("digits", tmp_path / "none" / "model.safetensors")

    def test_imported_tensors_are_exported_unchanged(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shoal._checkpoint.safetensors_files.PIECE_BYTES", 50)
        tensors: dict[str, np.ndarray] = {
            "a": np.arange(40, dtype=np.float64).reshape(8, 5),
            "b.c": KERNEL,
            "half": np.arange(33).astype(np.float16),
            "ids": np.arange(3),
            "scalar": np.array(3, np.float32),
        }
        save_file(tensors, tmp_path / "in.safetensors")
        found = Checkpoints(str(tmp_path / "checkpoints"))
        imported = found.import_file(tmp_path / "in.safetensors", "model")
        assert str(imported) == "model/1"
        assert imported.variables["half"] == ((33,), "float16")
        assert str(found.import_file(tmp_path / "in.safetensors", "model")) == "model/2"
        found.verify("model")
        found.export("model/1", tmp_path / "out.safetensors")
        exported = load_file(tmp_path / "out.safetensors")
        for name, array in tensors.items():
            kept = array.astype(np.float32) if array.dtype == np.float16 else array
            assert exported[name].dtype == kept.dtype
            assert exported[name].tobytes() == kept.tobytes()

    def test_bfloat16_is_imported(self, tmp_path: Path) -> None:
        data = np.arange(4).astype(ml_dtypes.bfloat16)
        write_tensors(LocalStorage(tmp_path), ["in.safetensors"], [("w", data.dtype, (4,))], [data.view(np.uint8).data])
        found = Checkpoints(str(tmp_path / "checkpoints"))
        assert found.import_file(tmp_path / "in.safetensors", "model").variables == {"w": ((4,), "bfloat16")}
        assert found.read("model")["w"].tolist() == [0, 1, 2, 3]

    @pytest.mark.parametrize("text", [b"", b"no tensors at all", b"\xff" * 100])
    def test_import_of_an_invalid_file_is_refused(self, tmp_path: Path, text: bytes) -> None:
        (tmp_path / "in").write_bytes(text)
        with pytest.raises(errors.CorruptCheckpoint):
            Checkpoints(str(tmp_path / "checkpoints")).import_file(tmp_path / "in", "model")
        assert not (tmp_path / "checkpoints").exists()

    @pytest.mark.parametrize(
        ("name", "seems"),
        [
            ("in.npz", r" \(it looks like a zip archive, such as the \.npz file of `shoal pull`.*\)"),
            ("in.npy", r" \(it looks like a \.npy file\)"),
            ("in.txt", ""),
            ("empty", ""),
        ],
    )
    def test_a_file_of_another_format_is_not_called_damaged(self, tmp_path: Path, name: str, seems: str) -> None:
        file = tmp_path / name
        file.write_bytes(b"weights: 1, 2, 3" if name == "in.txt" else b"")
        if name == "in.npz":
            np.savez(file, w=KERNEL)
        if name == "in.npy":
            np.save(file, KERNEL)
        with pytest.raises(errors.CorruptCheckpoint, match=rf"{name} is not a safetensors file{seems}; .*shoal export"):
            Checkpoints(str(tmp_path / "c")).import_file(file, "model")

    def test_a_file_that_was_cut_off_is_damaged(self, tmp_path: Path) -> None:
        save_file({"a": KERNEL}, tmp_path / "in")
        (tmp_path / "in").write_bytes((tmp_path / "in").read_bytes()[:20])
        with pytest.raises(errors.CorruptCheckpoint, match="in is damaged: its header has"):
            Checkpoints(str(tmp_path / "c")).import_file(tmp_path / "in", "model")

    def test_import_of_an_unsupported_dtype_is_refused(self, tmp_path: Path) -> None:
        save_file({"mask": np.zeros(3, np.bool_)}, tmp_path / "in.safetensors")
        with pytest.raises(errors.IncompatibleCheckpoint, match=r"'mask' is bool.*--skip mask"):
            Checkpoints(str(tmp_path / "c")).import_file(tmp_path / "in.safetensors", "model")

    def test_tensors_are_left_out(self, tmp_path: Path) -> None:
        tensors = {"a": np.arange(3), "b": np.zeros(3, ml_dtypes.float8_e4m3fn), "c": np.zeros(2, bool), "d": KERNEL}
        shard(LocalStorage(tmp_path), 1, "in.safetensors", tensors)
        file, found = tmp_path / "digits" / "00000001" / "in.safetensors", Checkpoints(str(tmp_path / "c"))
        assert found.import_file(file, "model", skip=["c", "b"]).variables.keys() == {"a", "d"}
        values = found.read("model")
        assert values["a"].tolist() == [0, 1, 2]
        assert np.array_equal(values["d"], KERNEL)
        with pytest.raises(errors.BadRequest, match="has no tensor 'x'"):
            found.import_file(file, "model", skip=["x"])

    @pytest.mark.parametrize("job", ["Base", "a/1", "../a", "", "a" * 64])
    def test_a_name_that_no_job_may_have_is_refused(self, tmp_path: Path, job: str) -> None:
        save_file({"a": KERNEL}, tmp_path / "in.safetensors")
        with pytest.raises(errors.BadRequest, match="is not a job name"):
            Checkpoints(str(tmp_path / "c")).import_file(tmp_path / "in.safetensors", job)
        assert not (tmp_path / "c").exists()

    @pytest.mark.parametrize("meanwhile", ["before", "after", "another"])
    def test_an_import_that_a_running_job_swept_is_no_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
    ) -> None:
        """A job of that name tidies up while the manifest is written, or has a checkpoint of that number."""
        save_file({"a": KERNEL}, tmp_path / "in.safetensors")
        found, publish = Checkpoints(str(tmp_path / "c")), Catalogue.publish

        def disturbed(catalogue: Catalogue, manifest: Manifest) -> None:
            if meanwhile == "before":
                catalogue.remove_incomplete("digits", below=9)
            publish(catalogue, manifest)
            if meanwhile == "after":
                catalogue.remove("digits", 1)
            if meanwhile == "another":
                monkeypatch.setattr(Catalogue, "publish", publish)
                save(tmp_path / "c")

        monkeypatch.setattr(Catalogue, "publish", disturbed)
        with pytest.raises(errors.JobExists, match="digits/1 was not imported: the running job digits takes"):
            found.import_file(tmp_path / "in.safetensors", "digits")
        assert [str(it) for it in found.list()] == (["digits/1"] if meanwhile == "another" else [])
        assert [*found.incomplete()] == []

    def test_import_of_a_missing_file_raises_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(errors.StorageFailed, match="No such file"):
            Checkpoints(str(tmp_path)).import_file(tmp_path / "in.safetensors", "model")


class TestTheCommands:
    @pytest.fixture
    def run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
        monkeypatch.setenv("SHOAL_CHECKPOINTS", str(tmp_path))
        monkeypatch.setenv("COLUMNS", "240")
        return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])

    def test_ls_shows_complete_checkpoints_and_the_errors_of_others(
        self, tmp_path: Path, run: Callable[..., Result]
    ) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        damage(tmp_path, 2, "manifest.json")
        result = run("checkpoints", "ls")
        assert result.exit_code == 0, result.output
        assert "digits/1" in result.stdout
        assert {"step", "updates"} < set(result.stdout.split())
        assert "version" not in result.stdout
        assert "damaged" in result.stdout
        assert "has no manifest" not in result.stdout
        (tmp_path / "digits" / "00000003").mkdir()
        assert "digits/3: has no manifest" in run("checkpoints", "ls").stdout
        damaged, record, torn = map(json.loads, run("checkpoints", "ls", "digits", "--json").stdout.splitlines())
        assert (record["number"], record["step"], record["version"]) == (1, 12, 34)
        assert "error" not in record
        assert (damaged["job"], damaged["number"], damaged["error"]["code"]) == ("digits", 2, "CORRUPT_CHECKPOINT")
        assert (torn["job"], torn["number"], torn["error"]["code"]) == ("digits", 3, "UNKNOWN_CHECKPOINT")
        assert "is damaged" in damaged["error"]["message"]
        assert "has no manifest" in torn["error"]["message"]

    def test_ls_of_a_missing_checkpoint_raises_an_error(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        shown = run("checkpoints", "ls")
        assert (shown.exit_code, f"{tmp_path} has no complete checkpoint" in shown.stdout) == (0, True)
        assert run("checkpoints", "ls", "--json").stdout == ""
        unknown = run("checkpoints", "ls", "nobody")
        assert (unknown.exit_code, "has no checkpoint of nobody" in unknown.stderr) == (4, True)
        numbered = run("checkpoints", "ls", "digits/1")
        assert (numbered.exit_code, "give JOB only" in numbered.stderr) == (2, True)
        (tmp_path / "file").touch()
        no_storage_message = run("checkpoints", "ls", "--checkpoints", tmp_path / "file")
        assert (no_storage_message.exit_code, "is not a folder" in no_storage_message.stderr) == (1, True)

    def test_a_folder_that_does_not_exist_is_an_error(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        folder = tmp_path / "none"
        for command in (["checkpoints", "ls"], ["checkpoints", "verify", "digits"], ["export", "digits", "-"]):
            result = run(*command, "--checkpoints", folder)
            assert (result.exit_code, f"there is no folder {folder}; name" in result.stderr) == (1, True)
        save_file({"w": KERNEL}, tmp_path / "m.safetensors")
        assert run("import", tmp_path / "m.safetensors", "tuned", "--checkpoints", folder).exit_code == 0, "it makes it"

    def test_no_folder_is_not_the_working_directory(self, run: Callable[..., Result]) -> None:
        result = run("checkpoints", "ls", "--checkpoints", "")
        assert (result.exit_code, "--checkpoints is empty; name the folder or URL" in result.stderr) == (2, True)

    def test_skipped_damaged_checkpoint_is_reported(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        damage(tmp_path, 2, "manifest.json")
        for command in (["checkpoints", "show"], ["checkpoints", "verify"], ["export"]):
            rest = [tmp_path / "out"] if command == ["export"] else []
            result = run(*command, "digits", *rest)
            assert (result.exit_code, "skipped digits/2: " in result.stderr) == (0, True)
            assert "digits/1" in result.stdout
            (problem,) = json.loads(run(*command, "digits", *rest, "--json").stdout)["skipped"]
            assert "is damaged" in problem
            assert run(*command, "digits/2", *rest).exit_code == 1

    def test_show_verify_and_rm(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        save(tmp_path)
        assert "dense/kernel" in run("checkpoints", "show", "digits").stdout
        assert json.loads(run("checkpoints", "show", "digits", "--json").stdout)["variables"]["dense/kernel"]
        assert "is complete" in run("checkpoints", "verify", "digits/1").stdout
        damage(tmp_path, 1, "a.safetensors")
        result = run("checkpoints", "verify", "digits/1")
        assert (result.exit_code, "is damaged" in result.stderr) == (1, True)
        assert run("checkpoints", "rm", "digits/1").exit_code == 0
        assert run("checkpoints", "show", "digits").exit_code == 4
        (tmp_path / "digits" / "00000007").mkdir()
        assert run("checkpoints", "rm", "digits/7").stdout == "digits/7 is removed\n"
        for number in (1, 2):
            save(tmp_path, number)
        assert run("checkpoints", "rm", "digits").exit_code == 2
        assert run("checkpoints", "rm", "digits", "--all").stdout == "digits/1 is removed\ndigits/2 is removed\n"
        assert run("checkpoints", "rm", "digits", "--all").exit_code == 4

    def test_best_checkpoint_shows_its_evaluation(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        save(tmp_path, 1, best=BEST)
        save(tmp_path, 2)
        titles, last, best = run("checkpoints", "ls").stdout.splitlines()
        assert titles.split()[-2:] == ["best", "evaluation"]
        assert best.endswith("accuracy 0.93, loss nan")
        assert last.rstrip().endswith("-")
        told = "best evaluation so far: accuracy 0.93, loss nan"
        assert f"{told}\n" in run("checkpoints", "show", "digits/best").stdout
        record = json.loads(run("checkpoints", "show", "digits/best", "--json").stdout)
        assert record["number"] == 1
        assert record["evaluation"] == {
            **{"number": 5, "step": 12, "values": {"accuracy": 0.93, "loss": None}},
            **{"samples": 360, "seconds": 0.5, "time": 9.0},
        }
        assert json.loads(run("checkpoints", "show", "digits", "--json").stdout)["evaluation"] is None
        save(tmp_path, 3, best=replace(BEST, step=1_010))
        assert f"{told} (evaluated at step 1,010)\n" in run("checkpoints", "show", "digits/best").stdout
        assert "(evaluated at step 1,010)" in run("checkpoints", "ls").stdout.splitlines()[1]

    def test_export_and_import(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        save(tmp_path)
        assert run("export", "digits", tmp_path / "m.safetensors").exit_code == 0
        result = run("import", tmp_path / "m.safetensors", "tuned")
        assert "as tuned/1: " in result.stdout
        assert "tuned/1" in run("checkpoints", "ls").stdout
        assert run("import", tmp_path / "m.safetensors", "Tuned").exit_code == 2
        result = run("import", tmp_path / "m.safetensors", "part", "--skip", "bias", "--skip", "count", "--json")
        assert json.loads(result.stdout)["variables"].keys() == {"dense/kernel"}

    def test_export_to_standard_output(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        damage(tmp_path, 2, "a.safetensors")  # it is found out before a byte is written
        result = run("export", "digits", "-")
        assert result.exit_code == 0
        assert load(result.stdout_bytes)["dense/kernel"].tobytes() == KERNEL.tobytes()
        assert "skipped digits/2: " in result.stderr
        assert result.stderr.endswith("-: 1 variable of digits/1\n")
        (record,) = map(json.loads, run("export", "digits", "-", "--json").stderr.splitlines())
        assert (record["file"], record["number"]) == ("-", 1)
        assert run("export", "digits/2", "-").stdout_bytes == b""
        assert not Path("-").exists()

    def test_export_into_nowhere_is_refused(self, tmp_path: Path, run: Callable[..., Result]) -> None:
        save(tmp_path)
        result = run("export", "digits", tmp_path / "none" / "m.safetensors")
        assert (result.exit_code, f"there is no folder {tmp_path / 'none'}" in result.stderr) == (2, True)
