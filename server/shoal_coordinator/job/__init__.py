"""One job's life: the state machine of a job, and the owners of the parts of its state.

`JobLife` is the state machine of one job, and `JobView` the part of it that other packages read; none sees the owners
behind it. Pure: no clock, no I/O, no thread. Which worker is sent where, and on which server a shard lies, `cluster`
decides. Each owner maps its own state to a message of `state.proto`; `persistence` keeps these. `cluster` and what is
above it may import this package; of the coordinator it imports `messages` alone.
"""

from shoal_coordinator.job.checkpointing import NO_FOLDER
from shoal_coordinator.job.ledger import Ledger, default_range_size
from shoal_coordinator.job.life import JobLife
from shoal_coordinator.job.parts import Submission
from shoal_coordinator.job.snapshot import JobSnapshot
from shoal_coordinator.job.tallies import Loss, Tallies

__all__ = ["NO_FOLDER", "JobLife", "JobSnapshot", "Ledger", "Loss", "Submission", "Tallies", "default_range_size"]
