"""The notebooks of `examples/notebooks`, which a kernel of this Python executes from the first to the last cell."""

import asyncio
import importlib.util
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from support.leaks import MARK, marked_processes
from support.waiting import wait_until

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
# By notebook: what it needs besides the kernel.
NEEDS = {"pytorch": ["torch"], "jax": ["flax", "optax"], "keras": ["keras"]}
LONGEST_S = 60
PROGRESS = re.compile(r"<progress value=(\d+) max=(\d+)>")


def execute(name: str, folder: Path) -> tuple[str, list[str]]:
    """Executes a notebook in a folder. Returns what its cells print, and each update of its display."""
    import nbformat  # noqa: PLC0415 - may be missing
    from jupyter_client import AsyncKernelManager  # noqa: PLC0415
    from jupyter_client.kernelspec import KernelSpecManager  # noqa: PLC0415
    from nbclient import NotebookClient  # noqa: PLC0415

    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    # Without folders of registered kernels, "python3" is the Python that runs this.
    kernel = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    client = NotebookClient(book, km=kernel, timeout=LONGEST_S, resources={"metadata": {"path": str(folder)}})
    updates: list[str] = []
    process = client.process_message

    def noted(message: Any, *arguments: Any) -> Any:
        if message["msg_type"] == "update_display_data":
            updates.append(message["content"]["data"]["text/html"])
        return process(message, *arguments)

    client.process_message = noted
    asyncio.run(client.async_execute(cleanup_kc=True))
    outputs = [it for cell in book.cells if cell.cell_type == "code" for it in cell.outputs]
    return "".join(it.text for it in outputs if it.output_type == "stream" and it.name == "stdout"), updates


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The mark of the processes of a notebook, whose own files are in the temporary folder, too."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, f"{os.environ.get(MARK, '')} {mark}".strip())
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    return mark


@pytest.mark.parametrize(("name", "backend"), [("pytorch", ""), ("jax", ""), ("keras", "jax"), ("keras", "torch")])
def test_notebook(name: str, backend: str, tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["nbclient", "ipykernel", *NEEDS[name], *filter(None, [backend])]
    if missing := [it for it in needed if not importlib.util.find_spec(it)]:
        pytest.skip(f"{missing[0]} is not installed")
    if backend:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    begin = time.monotonic()
    printed, updates = execute(name, tmp_path)
    assert time.monotonic() - begin < LONGEST_S
    (accuracy,) = re.findall(r"accuracy (\S+)", printed)
    assert float(accuracy) >= 0.93
    shown = [(int(value), int(most)) for value, most in PROGRESS.findall("".join(updates))]
    assert len(shown) == len(updates)
    assert shown == sorted(shown)
    assert len({value for value, _ in shown}) > 1, "the display was not updated during the training"
    wait_until(lambda: not marked_processes(mark), what="the end of the kernel and of all that it started")
