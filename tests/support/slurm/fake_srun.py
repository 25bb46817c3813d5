"""A fake `srun`: it starts the tasks on this machine, and passes signals on to each of them.

    fake_srun.py [--kill-on-bad-exit=1] [--wait=0] [--output FILE] [--error FILE] COMMAND ...

It takes the number of tasks from SLURM_NTASKS, and ends with the highest exit status of them. With
--kill-on-bad-exit=1, it kills all tasks when one has failed, as Slurm does. In the names of files, %j is the id of the
job and %t the number of the task.
"""

import argparse
import os
import signal
import subprocess
import sys
import time


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("--wait", type=int)
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--output", default="")
    parser.add_argument("--error", default="")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    tasks = [_start(options, rank) for rank in range(int(os.environ["SLURM_NTASKS"]))]

    def pass_on(number: int, _frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, pass_on)
    while None in (statuses := [task.poll() for task in tasks]):
        if options.kill_on_bad_exit and any(statuses):
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    return max(128 - status if status < 0 else status for status in (task.wait() for task in tasks))


def _start(options: argparse.Namespace, rank: int) -> "subprocess.Popen[bytes]":
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0"}
    names = [name.replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", str(rank)) for name in _files(options)]
    files = [open(name, "ab") if name else None for name in names]  # noqa: SIM115 - closed below
    try:
        environment = {**os.environ, **place, "SLURMD_NODENAME": "localhost"}
        return subprocess.Popen(options.command, env=environment, stdout=files[0], stderr=files[1])
    finally:
        for file in files:
            if file:
                file.close()


def _files(options: argparse.Namespace) -> tuple[str, str]:
    return options.output, options.error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
