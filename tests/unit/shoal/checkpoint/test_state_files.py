"""States of optimizers in checkpoints and in safetensors files."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shoal import errors, optim
from shoal.checkpoints import Checkpoints
from shoal.optim import OptimizerState
from support.training.optimizer_states import same_state

VALUES = {"w": np.arange(6.0).reshape(2, 3), "layers/0/b": np.ones(2, np.float32), "n": np.arange(2)}
SLOTS = {
    "exp_avg": {"w": -VALUES["w"], "layers/0/b": np.full(2, 0.5, np.float32)},
    "exp_avg_sq": {"w": VALUES["w"], "layers/0/b": np.full(2, 0.25, np.float32)},
}
STATE = OptimizerState(SLOTS, 41)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(VALUES, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_a_state_goes_round(tmp_path: Path, file: Path) -> None:
    found = Checkpoints(tmp_path / "checkpoints")
    saved = found.import_file(file, "m", optimizer=optim.Adam(), optimizer_state=STATE)
    assert saved.version == 41
    assert found.verify("m") == saved
    assert same_state(found.optimizer_state("m"), STATE)
    assert found.read("m").keys() == VALUES.keys()

    assert found.export_state("m", tmp_path / "state.safetensors") == saved
    tensors = load_file(tmp_path / "state.safetensors")
    assert tensors.keys() == {f"{slot}/{name}" for slot, of in SLOTS.items() for name in of}
    found.import_file(file, "n", optimizer=optim.Adam(), optimizer_state=tmp_path / "state.safetensors")
    assert same_state(found.optimizer_state("n"), STATE)


def test_variables_without_slots_get_the_initial_ones(tmp_path: Path, file: Path) -> None:
    found = Checkpoints(tmp_path / "checkpoints")
    given = OptimizerState({"accumulator": {"w": VALUES["w"]}})
    optimizer = optim.Adagrad(initial_accumulator_value=0.5)
    found.import_file(file, "m", optimizer=optimizer, optimizer_state=given)
    assert found.optimizer_state("m").slots["accumulator"]["layers/0/b"].tolist() == [0.5, 0.5]


def test_halves_have_float32_slots(tmp_path: Path) -> None:
    save_file({"h": np.ones(2, ml_dtypes.bfloat16)}, tmp_path / "in")
    found = Checkpoints(tmp_path / "checkpoints")
    given = OptimizerState({"momentum_buffer": {"h": np.full(2, 2.0, ml_dtypes.bfloat16)}}, 3)
    found.import_file(tmp_path / "in", "m", optimizer=optim.Momentum(), optimizer_state=given)
    slot = found.optimizer_state("m").slots["momentum_buffer"]["h"]
    assert (slot.dtype, slot.tolist()) == (np.float32, [2, 2])


def test_a_checkpoint_without_a_state_has_none(tmp_path: Path, file: Path) -> None:
    found = Checkpoints(tmp_path / "checkpoints")
    found.import_file(file, "m")
    assert found.optimizer_state("m") == OptimizerState()
    found.import_file(file, "m", optimizer=optim.SGD(), optimizer_state=OptimizerState(updates=9))
    assert found.optimizer_state("m") == OptimizerState(updates=9)


def test_what_is_refused(tmp_path: Path, file: Path) -> None:
    found = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(errors.InvalidOptimizer, match="momentum has no slot 'exp_avg'"):
        found.import_file(file, "m", optimizer=optim.Momentum(), optimizer_state=STATE)
    assert not (tmp_path / "checkpoints").exists()
    for given in ({"optimizer": optim.Adam()}, {"optimizer_state": STATE}):
        with pytest.raises(errors.BadRequest, match="optimizer and optimizer_state belong together"):
            found.import_file(file, "m", **given)
    with pytest.raises(errors.CorruptCheckpoint, match=r"in\.safetensors has no state of an optimizer; give a file of"):
        found.import_file(file, "m", optimizer=optim.Adam(), optimizer_state=file)
