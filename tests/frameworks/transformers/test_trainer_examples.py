"""The examples with Transformers: one line more, and both workers have the model that they trained."""

import os
import subprocess
import sys
from pathlib import Path

import shoal
from support.clusters.local import ROOT

EXAMPLES = ROOT / "examples"


def lines(name: str) -> list[str]:
    """Returns the lines of an example, without its docstring and its imports."""
    text = (EXAMPLES / name).read_text()
    return text[text.index("WORDS") :].splitlines()


def test_one_line_is_added() -> None:
    before, after = lines("transformers_before.py"), lines("transformers_after.py")
    added = [line for line in after if line not in before]
    assert len(added) == 1
    assert [line for line in after if line not in added] == before


def test_two_workers_train(client: shoal.Client, tmp_path: Path) -> None:
    environ = {**os.environ, "SHOAL_COORDINATOR": client.address, "OMP_NUM_THREADS": "1"}
    places = [tmp_path / str(number) for number in range(2)]
    for folder in places:
        folder.mkdir()
    command = [sys.executable, str(EXAMPLES / "transformers_after.py")]
    workers = [subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL) for folder in places]
    assert [worker.wait(timeout=110) for worker in workers] == [0, 0]
    one, other = ((folder / "counting" / "model.safetensors").read_bytes() for folder in places)
    assert one == other
    assert client.job("counting").data().total.done == 20 * 48
