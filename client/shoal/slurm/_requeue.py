"""The decision whether an allocation that has ended should start again, for scripts of sbatch.

srun's status does not say it: that is the highest one of all tasks. Slurm kills the tasks that still run when task 0
has ended, so it is often the status of a killed one.
"""

from shoal import errors
from shoal._display import counted
from shoal.slurm._run_folder import RunFolder


def refusal(folder: RunFolder, run: str, restarts: str, most: int) -> str:
    """Returns why the run should not be requeued, "" if it should.

    Args:
        folder: the folder of the run.
        run: id of the run, which is that of Slurm's job.
        restarts: how often Slurm has started it again.
        most: number of attempts in a row without a new checkpoint after which the run ends.

    Raises:
        BadRequest: the folder has no run.
    """
    if ended := folder.outcome(run):
        return f"the job {ended.name} has ended: {ended.state.value}"
    if not folder.unfinished(f"{run}.{restarts}"):
        return "the run is not requeued: its tasks were not asked to end, so one has failed; its log above says why"
    try:
        newest = folder.newest_checkpoint(folder.plan(run))
    except errors.ShoalError:  # the storage does not answer now, and the next start may fare better
        return ""
    stalled = folder.unfinished(run).count(newest)
    if stalled < most:
        return ""
    return (
        f"the run is not requeued: {counted(stalled, 'allocation')} in a row ended without a new checkpoint; give the "
        "allocation more time, or --signal more seconds before its end, and start the run again"
    )


__all__ = ["refusal"]
