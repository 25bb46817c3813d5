"""The fuzzer: a short campaign over all targets, all inputs that once went wrong, and the fuzzer's own results."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal import errors
from support.fuzzing import targets
from support.fuzzing.campaign import GOLDEN, BadStatus, Hang, SimpleTarget, Target, attempt, fuzz, fuzz_all, reproduce
from support.fuzzing.mutator import mutated

SHORT_S = 15.0
# The most growth of the roles' memory in the short form. Their first calls have made most of what is kept by then; a
# port that keeps something of each connection grows by more.
ROLE_GROWTH = 0.2
TESTS = Path(__file__).parents[1]


@pytest.mark.timeout(180)
def test_no_target_crashes_in_a_short_campaign(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.fuzzing", "--seconds", str(SHORT_S), "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=150, check=False
    )
    rows = json.loads((tmp_path / "latest.json").read_text())["rows"]
    assert {row["target"] for row in rows} == {target.name for target in targets.all_targets()}, done.stderr[-3000:]
    assert all(row["inputs"] for row in rows), done.stdout
    assert not [row["found"] for row in rows if row["crashes"] or row["unexpected_status"]], done.stdout
    roles = {row["target"]: row["rss_growth"] for row in rows if row["target"] in ("sockets", "tls_ports")}
    assert len(roles) == 2
    assert max(roles.values()) < ROLE_GROWTH, done.stdout


def kept() -> list[Path]:
    return sorted(path for path in GOLDEN.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", kept(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_input_that_went_wrong_is_refused(path: Path) -> None:
    (target,) = targets.chosen(path.parent.name)
    target.start()
    try:
        attempt(target, path.read_bytes())
    finally:
        target.stop()


def test_mutations_and_inputs_are_reproducible() -> None:
    seeds = [b"abcdefgh" * 8, b"0123"]
    drawn = [mutated(random.Random(number), seeds) for number in range(200)]
    assert drawn == [mutated(random.Random(number), seeds) for number in range(200)]
    assert len({*drawn}) > 150
    (target,) = targets.chosen("chunks")
    target.start()
    assert reproduce(target, 3, 7) == reproduce(target, 3, 7) != reproduce(target, 3, 8)


def decoder(data: bytes) -> None:
    """A decoder with defects: it refuses most inputs, and fails on some."""
    if b"\xff" in data:
        raise KeyError("a defect")
    raise errors.BadRequest("not this one")


def planted(decode: Callable[[bytes], object]) -> Target:
    return SimpleTarget("planted", list, decode)


def test_the_fuzzer_finds_a_defect_and_keeps_its_input(tmp_path: Path) -> None:
    class Planted(SimpleTarget):
        def draw(self, draw: random.Random) -> bytes:
            return mutated(draw, [b"seed"])

    row = fuzz(Planted("planted", list, decoder), 1, 5.0, tmp_path)
    assert row.crashes
    assert b"\xff" in Path(row.found[0].partition(":")[0]).read_bytes()


def end_process(_data: bytes) -> None:
    os._exit(3)


class OneInput(SimpleTarget):
    """A target that draws the same input each time."""

    def draw(self, draw: random.Random) -> bytes:
        return b"input"


def test_an_input_that_ends_the_process_is_a_crash(tmp_path: Path) -> None:
    row = fuzz(OneInput("planted", list, end_process), 1, 5.0, tmp_path)
    assert (row.inputs, row.crashes) == (1, 1)
    assert Path(row.found[0].partition(":")[0]).read_bytes() == b"input"


def test_targets_that_are_fuzzed_at_the_same_time_have_a_row_each(tmp_path: Path) -> None:
    defective, right, longer = (
        OneInput("defective", list, end_process),
        OneInput("right", list, len),
        OneInput("longer", list, len),
    )
    seconds: dict[Target, float] = {defective: 5.0, right: 0.1, longer: 0.2}
    rows = {row.target: row for row in fuzz_all(seconds, 1, tmp_path, processes=2)}
    assert {name: row.crashes for name, row in rows.items()} == {"defective": 1, "right": 0, "longer": 0}
    assert all(row.inputs for row in rows.values())


def fail_inside(_data: bytes) -> None:
    raise errors.InternalError("a defect")


def busy(_data: bytes) -> None:
    begun = time.thread_time()
    while time.thread_time() < begun + 1.1:
        pass


@pytest.mark.parametrize(("decode", "what"), [(fail_inside, BadStatus), (busy, Hang), (decoder, None)])
def test_outcomes(decode: Callable[[bytes], object], what: type[BaseException] | None) -> None:
    if what is None:
        attempt(planted(decode), b"")
    else:
        with pytest.raises(what):
            attempt(planted(decode), b"")
