"""The entry point of `python -m shoal.slurm`."""

from shoal.slurm._commands import app

if __name__ == "__main__":
    app(prog_name="python -m shoal.slurm")
