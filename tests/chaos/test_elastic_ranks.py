"""Processes of elastic groups that are killed or stopped: the others go on within seconds, with right values."""

import itertools
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from support import run_lengths
from support.faults.killable_role import KillableRole, heard_from
from support.faults.killable_roles import Nursery
from support.run_lengths import count_runs
from support.waiting import stop_process

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

WORKERS = 3
LONGEST_S = 10.0


@pytest.fixture(scope="module")
def coordinator(nursery: Nursery) -> Iterator[str]:
    running = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), CollectorRegistry())
    yield running.address
    running.stop()


class Steps:
    """What processes say about their steps: the weights are equal, and each step adds the number of processes."""

    def __init__(self) -> None:
        self._weights = {0: 0}  # by progress

    def check_next(self, process: KillableRole) -> int:
        """Checks the next step of a process. Returns the number of processes that have taken it."""
        said = process.hear()
        assert said, "it has ended"
        progress, weight, size = map(int, said.split())
        assert self._weights.setdefault(progress, weight) == weight
        if progress - 1 in self._weights:
            assert weight - self._weights[progress - 1] in {1, 2, 3}
        return size

    def check_until(self, processes: Sequence[KillableRole], size: int) -> None:
        """Waits until all processes have taken three steps in a row with so many processes.

        It reads whichever process has said something. A process whose lines nobody reads stops at its 280th: it takes
        no more steps, and does not join the next generation.
        """
        in_a_row = dict.fromkeys(processes, 0)
        while min(in_a_row.values()) < 3:
            for process in heard_from(processes):
                in_a_row[process] = in_a_row[process] + 1 if self.check_next(process) == size else 0


def test_lines_of_all_processes_are_read_while_one_waits_for_another() -> None:
    turn = threading.Barrier(2, timeout=LONGEST_S)

    def take_steps(reports: socket.socket) -> None:
        for step in range(1, 1_001):  # more lines than a socket holds
            turn.wait()  # as in an all-reduce
            reports.sendall(f"{step} {step} {2 if step < 998 else 3}".encode())

    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    threads = [threading.Thread(target=take_steps, args=(theirs,), daemon=True) for _, theirs in pairs]
    for thread in threads:
        thread.start()
    Steps().check_until([KillableRole(0, ours, lambda: 0, Path()) for ours, _ in pairs], 3)
    for thread in threads:
        thread.join(LONGEST_S)
    for each in itertools.chain(*pairs):
        each.close()


def end(processes: Sequence[KillableRole]) -> None:
    for process in processes:
        assert process.kill() == -signal.SIGKILL


def test_survivors_go_on_without_a_killed_process(nursery: Nursery, coordinator: str) -> None:
    draw = random.Random(2)
    with count_runs("elastic_kill", count := run_lengths.runs(1, 20), "s") as counted:
        for number in range(count):
            steps, name = Steps(), f"kill-{number}"
            *others, doomed = nursery.elastic_ranks(coordinator, name, WORKERS, WORKERS, doom=draw.randrange(1, 1_500))
            for process in others:
                steps.check_next(process)
            assert doomed.end() == -signal.SIGKILL
            began = time.monotonic()
            steps.check_until(others, WORKERS - 1)
            waited = time.monotonic() - began
            assert waited < LONGEST_S
            others += nursery.elastic_ranks(coordinator, name, WORKERS, 1)  # as a supervisor starts it again
            steps.check_until(others, WORKERS)
            end(others)
            counted.passes(waited)


@run_lengths.long_only
def test_survivors_go_on_without_a_stopped_process(nursery: Nursery, coordinator: str) -> None:
    with count_runs("elastic_stop", count := run_lengths.runs(1, 10), "s") as counted:
        for number in range(count):
            steps = Steps()
            processes = nursery.elastic_ranks(coordinator, f"stop-{number}", WORKERS, WORKERS)
            for process in processes:
                steps.check_next(process)
            stopped = processes.pop(number % WORKERS)
            stop_process(stopped.pid)
            began = time.monotonic()
            steps.check_until(processes, WORKERS - 1)
            waited = time.monotonic() - began
            assert waited < LONGEST_S
            os.kill(stopped.pid, signal.SIGCONT)
            processes.append(stopped)
            steps.check_until(processes, WORKERS)  # it has joined again
            end(processes)
            counted.passes(waited)


@run_lengths.long_only
def test_a_generation_goes_on_while_the_coordinator_is_away(nursery: Nursery) -> None:
    first = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), CollectorRegistry())
    steps = Steps()
    processes = nursery.elastic_ranks(first.address, "away", WORKERS, WORKERS)
    steps.check_until(processes, WORKERS)
    first.stop()
    for _ in range(20):
        for process in processes:
            assert steps.check_next(process) == WORKERS
    second = start_coordinator(CoordinatorConfig(listen=first.address), CollectorRegistry())
    try:
        assert processes.pop().kill() == -signal.SIGKILL
        steps.check_until(processes, WORKERS - 1)
        processes += nursery.elastic_ranks(first.address, "away", WORKERS, 1)
        steps.check_until(processes, WORKERS)
    finally:
        end(processes)
        second.stop()
