"""Programs that fail, each in its own way, and some that are slow."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import shoal


class Numbers:
    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Any) -> Any:
        return indices


class Program:
    """A program that trains one vector on trivial data. Each subclass breaks one thing."""

    def __init__(self, size: int = 64) -> None:
        self.dataset = Numbers(size)

    def variables(self) -> Any:
        return {"w": np.zeros(4, np.float32)}

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        return 0.0, {"w": np.ones(4, np.float32)}


def fine(size: int = 64) -> "Program":
    return Program(size)


def factory_raises() -> Program:
    raise RuntimeError("the factory is out of order")


class Raises(Program):
    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        raise ValueError("the loss is out of order")


class Gradients(Program):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        right = np.ones(4, np.float32)
        wrong = {"name": {"v": right}, "shape": {"w": np.ones(5, np.float32)}, "dtype": {"w": np.ones(4)}}
        return 0.0, wrong[self.kind]


class NotFinite(Program):
    """Returns NaN once in `every` batches, or always with every=1."""

    def __init__(self, every: int, size: int = 64) -> None:
        super().__init__(size)
        self.every, self.calls = every, 0

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        self.calls += 1
        value = np.nan if self.calls % self.every == 0 else 1.0
        return 0.0, {"w": np.full(4, value, np.float32)}


class Exits(Program):
    """Ends its process by a signal, once. The file marks that it has done so."""

    def __init__(self, once: str, size: int = 64) -> None:
        super().__init__(size)
        self.once = Path(once)

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        if not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_and_gradients(params, batch)


class Hangs(Program):
    """Never returns from one step, after some others. The file marks that a worker has begun to hang."""

    def __init__(self, once: str, steps: int = 0, size: int = 64) -> None:
        super().__init__(size)
        self.once, self.steps = Path(once), steps

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        self.steps -= 1
        if self.steps < 0:
            with suppress(FileExistsError), self.once.open("x"):
                threading.Event().wait()
        return super().loss_and_gradients(params, batch)


class BadHost(Program):
    """Ends each process that the daemon which trains first starts. The file `bad` names the process of this daemon.

    The other workers wait for the file `gate`.
    """

    def __init__(self, bad: str, gate: str, size: int = 64) -> None:
        super().__init__(size)
        self.bad, self.gate = Path(bad), Path(gate)
        self.daemon = str(psutil.Process(os.getppid()).ppid())  # the parent is the guard

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        with suppress(FileExistsError), self.bad.open("x") as file:
            file.write(self.daemon)
        if self.bad.read_text() == self.daemon:
            os.kill(os.getpid(), signal.SIGKILL)
        while not self.gate.exists():
            threading.Event().wait(0.01)
        return super().loss_and_gradients(params, batch)


class Gated(Program):
    """Continues only while the file exists, and counts its samples in a variable."""

    def __init__(self, gate: str, size: int = 64) -> None:
        super().__init__(size)
        self.gate = Path(gate)

    def variables(self) -> Any:
        return {
            "w": np.zeros(4, np.float32),
            "seen": shoal.Variable((self.dataset.size,), trainable=False, aggregation="sum", dtype="int64"),
        }

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        pause = threading.Event()
        while not self.gate.exists():
            pause.wait(0.01)
        seen = np.zeros(self.dataset.size, np.int64)
        np.add.at(seen, batch, 1)
        return shoal.StepOutput(0.0, {"w": np.ones(4, np.float32)}, updates={"seen": seen})


class Accelerated(Program):
    """Computes each step for a number of seconds without using this machine's cores, as with an accelerator."""

    dataset: Any = None

    def __init__(self, elements: int, seconds: float) -> None:
        self.gradient = np.zeros(elements, np.float32)
        self.seconds, self.computed = seconds, threading.Event()

    def variables(self) -> Any:
        return {"w": shoal.Variable(self.gradient.shape)}

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        self.computed.wait(self.seconds)
        return 0.0, {"w": self.gradient}


class Paced(Gated):
    """Counts its samples in a variable. Each step takes `seconds` until the file exists."""

    def __init__(self, gate: str, seconds: float, size: int = 64) -> None:
        super().__init__(gate, size)
        self.seconds, self.computed = seconds, threading.Event()

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        if not self.gate.exists():
            self.computed.wait(self.seconds)
        seen = np.zeros(self.dataset.size, np.int64)
        np.add.at(seen, batch, 1)
        return shoal.StepOutput(0.0, {"w": np.ones(4, np.float32)}, updates={"seen": seen})


class Marked(Paced):
    """Creates a file for its process in the folder `marks` when its first push has been answered."""

    def __init__(self, marks: str, **options: Any) -> None:
        super().__init__(**options)
        self.mark, self.steps = Path(marks, str(os.getpid())), 0

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps == 2:  # in turn: this step was begun after the first one's push
            self.mark.touch()
        return super().loss_and_gradients(params, batch)


class OneSlow(Program):
    """Waits in each step. The first process that creates the file waits ten times as long, and prints "slow"."""

    def __init__(self, mark: str, seconds: float) -> None:
        super().__init__()
        self.dataset: Any = None
        self.seconds, self.computed = seconds, threading.Event()
        with suppress(FileExistsError):
            Path(mark).touch(exist_ok=False)
            self.seconds *= 10
            print("slow")

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        self.computed.wait(self.seconds)
        return super().loss_and_gradients(params, batch)
