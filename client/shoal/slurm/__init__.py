"""Slurm: a job with a cluster of its own in one allocation, and each role as a task of it.

    run = shoal.slurm.submit(job, folder="/shared/digits", servers=2, path="examples", timeout_min=240)
    print(run.wait())

A preempted run goes on from its checkpoint when it is requeued. `submit` needs the extra `slurm`, which installs
submitit. `deploy/slurm/shoal.sbatch` starts the same tasks without it, by `python -m shoal.slurm`.
"""

from shoal.slurm._submission import SlurmRun, submit

__all__ = ["SlurmRun", "submit"]
