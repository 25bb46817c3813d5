"""Fake programs of Slurm, and the environment variables of an allocation."""

import os
import shlex
import sys
from pathlib import Path

JOB_ID = "417"


class FakeSlurm:
    """A folder with programs of the names `srun`, `sbatch`, `scontrol`, `squeue` and `sacct`.

    `sbatch` starts nothing: a test starts the script itself. `scontrol` writes down what it is asked for. `squeue` and
    `sacct` fail, and hide those of a real Slurm.

    Args:
        folder: the folder, which exists.
    """

    def __init__(self, folder: Path) -> None:
        self._programs, self._asked = folder / "bin", folder / "scontrol.log"
        self._programs.mkdir()
        srun = shlex.join([sys.executable, str(Path(__file__).with_name("fake_srun.py"))])
        self.replace("srun", f'exec {srun} "$@"')
        self.replace("sbatch", f"echo Submitted batch job {JOB_ID}")
        for name in ("squeue", "sacct"):
            self.replace(name, "exit 1")
        self.replace("scontrol", f'echo "$@" >> {shlex.quote(str(self._asked))}')

    @property
    def path(self) -> str:
        """The value of PATH with which these programs are found first."""
        return f"{self._programs}:{os.environ['PATH']}"

    @property
    def asked(self) -> list[str]:
        """The arguments of each call of `scontrol`."""
        return self._asked.read_text().splitlines() if self._asked.exists() else []

    def variables(self, tasks: int, **changes: str) -> dict[str, str]:
        """Returns the environment variables of the script of an allocation on one node."""
        slurm = {"SLURM_JOB_ID": JOB_ID, "SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "localhost"}
        return {**os.environ, **slurm, "PATH": self.path, "SHOAL_PYTHON": sys.executable, **changes}

    def replace(self, name: str, lines: str) -> None:
        """Sets what a program does: lines of a shell."""
        (self._programs / name).write_text(f"#!/bin/sh\n{lines}\n")
        (self._programs / name).chmod(0o755)
