"""A job that can be written down and restored: its records now, and one made of them. Pure."""

from collections.abc import Callable, Iterator

from google.protobuf.message import Message

from shoal.events import from_proto as event_from_proto
from shoal.job import Job
from shoal.status import JobState
from shoal.v1 import state_pb2
from shoal_coordinator.api import codecs
from shoal_coordinator.job.event_log import Kept
from shoal_coordinator.job.life import JobLife
from shoal_coordinator.job.progress import told_from_proto
from shoal_coordinator.job.tallies import Tallies
from shoal_coordinator.messages.refs import JobRef
from shoal_coordinator.persistence.records import Part, SavedJob


class DurableJob(JobLife):
    """A job that knows its records (`shoal_coordinator.persistence.records`).

    Args:
        ref, spec, now, token, changed, checkpoints, tallies: as for `JobLife`.
        saved: what an earlier coordinator knew of it; None: it is new.
    """

    def __init__(
        self,
        ref: JobRef,
        spec: Job,
        now: float,
        token: str = "",
        saved: SavedJob | None = None,
        changed: Callable[[str], None] = lambda _: None,
        *,
        checkpoints: bool = False,
        tallies: Tallies | None = None,
    ) -> None:
        begins = saved is None
        super().__init__(ref, spec, now, token, changed, checkpoints=checkpoints, tallies=tallies, begins=begins)
        if saved:
            self._restore(saved)

    @property
    def parts(self) -> Iterator[str]:
        """The names of all records that it may have."""
        yield from (Part.SPEC, Part.PLAN, Part.STATE, Part.LEDGER, Part.TALLY, Part.CHECKPOINTS, Part.EVALUATION)
        yield from (f"{Part.EVENT}/{number}" for number in self.log.kept)

    def record(self, part: str) -> Message | None:
        """The record of that name as it should be now; None: it should not be there."""
        kind, _, number = part.partition("/")
        match kind:
            case Part.SPEC:
                return state_pb2.SubmissionRecord(spec=self.spec.to_proto(), token=self.token)
            case Part.PLAN:
                return self.plan.to_proto()
            case Part.STATE:
                return self._state_record()
            case Part.LEDGER:
                return self.accounting.ledger.to_proto() if self.accounting.ledger else None
            case Part.TALLY:
                parts = self.crew.active.values()
                return self.accounting.tally.to_proto({part.assignment: part.told for part in parts if part.told})
            case Part.CHECKPOINTS:
                return self.checkpoints.to_proto()
            case Part.EVALUATION:
                return self.evaluating.to_proto() if self.evaluating else None
        event = self.log.find(int(number))
        return codecs.event_message(event) if event else None

    def _state_record(self) -> state_pb2.JobRecord:
        record = state_pb2.JobRecord(
            state=codecs.state_code(self.state),
            reason=self._reason,
            lack=self._lack,
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            finished_at=self._finished_at,
            numbered=self.log.numbered,
            closing=self.closing,
        )
        self.plan.write_to(record)
        self.crew.write_to(record)
        self.recovery.write_to(record)
        return record

    def _restore(self, saved: SavedJob) -> None:
        state = saved.state
        self.state = JobState.from_proto(state.state)
        self._reason, self._lack = state.reason, state.lack
        self._submitted_at, self._started_at, self._finished_at = (
            state.submitted_at,
            state.started_at,
            state.finished_at,
        )
        self.closing = state.closing
        self.plan.take_up(state, saved.plan)
        self.crew.take_up(state)
        self.recovery.take_up(state)
        if saved.checkpoints:
            self.checkpoints.take_up(saved.checkpoints)
        else:  # an earlier Shoal kept none of a job in a cluster without a folder of them
            self._changed(Part.CHECKPOINTS)
        if self.evaluating and saved.evaluation:
            self.evaluating.take_up(saved.evaluation)
        self.accounting.take_up(saved)
        for participant in self.crew.active.values():
            if participant.assignment in saved.tally.told:
                participant.told = told_from_proto(saved.tally.told[participant.assignment])
        events = [event_from_proto(event) for event in saved.events]
        self.log.restore([event for event in events if isinstance(event, Kept)], state.numbered)
