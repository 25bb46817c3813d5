"""Fuzzing campaign: feeds drawn inputs to targets, each in a process of its own, and records what goes wrong.

An input has a number. The seed of the campaign, the target's name and the number reproduce it. An outcome is right if
the target returns, or raises one of its documented errors, within a second of processor time.
"""

import json
import multiprocessing
import os
import random
import signal
import statistics
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from shoal import errors

HANG_S = 1.0  # of processor time: other processes may take the cores
BLOCKED_S = 20.0  # of real time, without which an input that waits would never end
_MOST_CRASHES = 5  # of one target: further ones are mostly the same
_WARM_UP, _LATE = 0.25, 0.75  # parts of the time: memory is compared before the half and after the second number
_BAD_STATUS = ("INTERNAL", "UNKNOWN")
GOLDEN = Path(__file__).parents[2] / "golden" / "fuzz"


class BadStatus(Exception):
    """A call ended with INTERNAL or UNKNOWN, which is a defect of the receiver whatever the caller has sent."""


class Hang(BaseException):
    """An input took too long. No decoder catches it."""


class Target(Protocol):
    """Something that decodes inputs. `start` is called in the process that fuzzes it.

    Attributes:
        name: name of the target.
        allowed: documented errors beside ShoalError.
    """

    name: str
    allowed: tuple[type[Exception], ...]

    def start(self) -> None:
        """Starts what the target needs, and makes its seeds."""

    def draw(self, draw: random.Random) -> bytes:
        """Returns an input."""
        ...

    def run(self, data: bytes) -> None:
        """Decodes an input; raises ShoalError, one of `allowed`, or an error that is a crash."""

    def stop(self) -> None:
        """Frees what `start` has made."""


@dataclass
class Row:
    """The result of one target.

    Attributes:
        target: its name.
        inputs: number of inputs that it has decoded.
        crashes: inputs that raised an undocumented error, ended the process or hung.
        unexpected_status: inputs that ended with INTERNAL or UNKNOWN.
        rss_growth: growth of the median of resident memory from the second quarter of the time to the last, as a share.
        seconds: how long it ran.
        found: files of the inputs that went wrong, each with what happened.
    """

    target: str
    inputs: int = 0
    crashes: int = 0
    unexpected_status: int = 0
    rss_growth: float = 0.0
    seconds: float = 0.0
    found: list[str] = field(default_factory=list)


def reproduce(target: Target, seed: int, number: int) -> bytes:
    """Returns the input of a number.

    Args:
        target: the target, started.
        seed: seed of the campaign.
        number: number of the input.
    """
    return target.draw(random.Random(((seed << 32 | zlib.crc32(target.name.encode())) << 40) + number))


def attempt(target: Target, data: bytes) -> None:
    """Feeds one input to a target.

    Raises:
        BaseException: whatever is not right; see the module.
    """
    start = time.thread_time()
    try:
        target.run(data)
    except errors.InternalError as error:
        raise BadStatus(str(error)) from error
    except errors.ShoalError as error:
        if error.status in _BAD_STATUS:
            raise BadStatus(str(error)) from error
    except target.allowed:
        pass
    if (took := time.thread_time() - start) > HANG_S:
        raise Hang(f"took {took:.1f} s of processor time")


class FuzzProcess:
    """The child process that fuzzes one target, so that an input that ends the process is a result, too.

    Args:
        target: the target, not started.
        seed: seed of the campaign.
        seconds: how long to draw inputs.
        out: folder for the inputs that go wrong.

    Attributes:
        receiver: can be read when the process has ended.
    """

    def __init__(self, target: Target, seed: int, seconds: float, out: Path) -> None:
        self._target, self._seed, self._out = target, seed, out
        context = multiprocessing.get_context("fork")
        self._number = context.Value("Q", 0, lock=False)
        self.receiver, sender = context.Pipe(duplex=False)
        self._child = context.Process(target=_in_child, args=(target, seed, seconds, out, self._number, sender))
        self._child.start()
        sender.close()

    def row(self) -> Row:
        """Waits for the end, and returns the result."""
        row = Row(self._target.name)
        with self.receiver, suppress(EOFError):
            row = self.receiver.recv()
        self._child.join()
        if self._child.exitcode:
            number: int = self._number.value
            row.inputs, row.crashes = number + 1, row.crashes + 1
            self._target.start()
            data = reproduce(self._target, self._seed, number)
            what = f"the process ended with {self._child.exitcode}"
            row.found.append(_keep(self._out, self._target, number, data, what))
        return row


def fuzz(target: Target, seed: int, seconds: float, out: Path) -> Row:
    """Fuzzes one target. The arguments are those of `FuzzProcess`."""
    return FuzzProcess(target, seed, seconds, out).row()


def fuzz_all(seconds: Mapping[Target, float], seed: int, out: Path, processes: int) -> Iterator[Row]:
    """Fuzzes targets, and yields the result of each at its end. Those that take longest begin.

    Args:
        seconds: how long to draw inputs, by target.
        seed: seed of the campaign.
        out: folder for the inputs that go wrong.
        processes: how many targets are fuzzed at a time.
    """
    waiting = sorted(seconds, key=lambda target: seconds[target])
    running: list[FuzzProcess] = []
    while waiting or running:
        while waiting and len(running) < processes:
            target = waiting.pop()
            running.append(FuzzProcess(target, seed, seconds[target], out))
        ended = connection.wait([process.receiver for process in running])
        for process in [process for process in running if process.receiver in ended]:
            running.remove(process)
            yield process.row()


def _in_child(target: Target, seed: int, seconds: float, out: Path, number: Any, sender: Any) -> None:
    target.start()
    row = Row(target.name)
    begun = time.monotonic()
    early: list[int] = []
    late: list[int] = []
    # A target whose inputs go to another process measures that one.
    measure: Callable[[], int] = getattr(target, "resident_bytes", resident_bytes)
    with _interrupted(number):
        while (passed := time.monotonic() - begun) < seconds and len(row.found) < _MOST_CRASHES:
            if _WARM_UP < passed / seconds < 0.5:
                early.append(measure())
            elif passed / seconds > _LATE:
                late.append(measure())
            for _ in range(32):
                _one(target, seed, number.value, row, out)
                number.value += 1
    row.inputs, row.seconds = number.value, round(time.monotonic() - begun, 1)
    row.rss_growth = round(statistics.median(late) / statistics.median(early) - 1, 4) if early and late else 0.0
    target.stop()
    sender.send(row)
    sender.close()
    os._exit(0)  # threads of a target that do not end must not keep the process


def _one(target: Target, seed: int, number: int, row: Row, out: Path) -> None:
    data = reproduce(target, seed, number)
    try:
        attempt(target, data)
    except BadStatus as error:
        row.unexpected_status += 1
        row.found.append(_keep(out, target, number, data, str(error)))
    except (Exception, Hang) as error:
        row.crashes += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        row.found.append(_keep(out, target, number, data, f"{type(error).__name__}: {error} ({where})"))


def _keep(out: Path, target: Target, number: int, data: bytes, what: str) -> str:
    folder = out / target.name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number}"
    path.write_bytes(data)
    return f"{path}: {what[:300]}"


@contextmanager
def _interrupted(number: Any) -> Iterator[None]:
    """Raises `Hang` in an input that does not end."""
    seen = [(-1, 0.0)]

    def tick(_signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if seen[0][0] != number.value:
            seen[0] = number.value, now
        elif now - seen[0][1] > BLOCKED_S:
            seen[0] = -1, now
            raise Hang(f"no end after {BLOCKED_S:g} s")

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def resident_bytes() -> int:
    """Returns the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def write(rows: list[Row], seed: int, path: Path) -> None:
    """Writes the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"seed": seed, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def table(rows: list[Row]) -> str:
    """Returns the results as a table."""
    lines = [f"{'target':<20}{'inputs':>10}{'crashes':>9}{'unexpected_status':>19}{'rss_growth':>12}"]
    lines += [
        f"{row.target:<20}{row.inputs:>10,}{row.crashes:>9}{row.unexpected_status:>19}{row.rss_growth:>12.1%}"
        for row in rows
    ]
    total = [sum(getattr(row, name) for row in rows) for name in ("inputs", "crashes", "unexpected_status")]
    lines.append(f"{'all':<20}{total[0]:>10,}{total[1]:>9}{total[2]:>19}")
    return "\n".join(lines + [f"  {row.target}: {found}" for row in rows for found in row.found])


class SimpleTarget:
    """A target of seeds and one function.

    Args:
        name: name of the target.
        seeds: returns valid inputs.
        decode: decodes an input.
        allowed: documented errors beside ShoalError.
    """

    def __init__(
        self,
        name: str,
        seeds: Callable[[], list[bytes]],
        decode: Callable[[bytes], object],
        *allowed: type[Exception],
    ) -> None:
        self.name, self.allowed = name, allowed
        self._make, self._decode = seeds, decode
        self._seeds: list[bytes] = []

    def start(self) -> None:
        self._seeds = self._make()
        for seed in self._seeds:
            self._decode(seed)  # a seed that is refused would hide what lies behind

    def draw(self, draw: random.Random) -> bytes:
        from support.fuzzing.mutator import mutated  # noqa: PLC0415

        return mutated(draw, self._seeds)

    def run(self, data: bytes) -> None:
        self._decode(data)

    def stop(self) -> None:
        """Nothing to free."""
