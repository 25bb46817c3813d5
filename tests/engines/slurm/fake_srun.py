"""A program that stands for `srun` in tests: it starts the tasks on this machine, and passes signals on to each.

    fake_srun.py [--kill-on-bad-exit=1] COMMAND ...

It takes the number of tasks from SLURM_NTASKS, and ends with the highest exit status of them. With
--kill-on-bad-exit=1, it kills all tasks when one has failed, as Slurm does.
"""

import os
import signal
import subprocess
import sys
import time


def main(arguments: list[str]) -> int:
    kills = "--kill-on-bad-exit=1" in arguments
    command = [argument for argument in arguments if not argument.startswith("--kill-on-bad-exit")]
    tasks = [subprocess.Popen(command, env=_environment(rank)) for rank in range(int(os.environ["SLURM_NTASKS"]))]

    def pass_on(number: int, _frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, pass_on)
    while any(task.poll() is None for task in tasks):
        if kills and any(task.returncode for task in tasks):
            for task in tasks:
                task.kill()
        time.sleep(0.05)
    return max(128 - status if status < 0 else status for status in (task.wait() for task in tasks))


def _environment(rank: int) -> dict[str, str]:
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "0"}
    return {**os.environ, **place, "SLURMD_NODENAME": "localhost"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
