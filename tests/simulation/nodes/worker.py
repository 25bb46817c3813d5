"""Worker of a simulation: a daemon with the real assignment machine, whose trainers are processes of their own."""

from typing import Any

from shoal import errors
from shoal._wire import ReportAck
from shoal.status import Role
from shoal_coordinator.messages import HeartbeatResult, events
from shoal_worker.assignment import (
    Assigned,
    AssignedJob,
    AssignmentEvent,
    AssignmentMachine,
    Finish,
    IncarnationChanged,
    JobOver,
    Renew,
    StartTrainer,
    StopTrainer,
    TrainerEnded,
)
from shoal_worker.messages import TrainerOutcome
from simulation.network import Context
from simulation.nodes.node import Member, Node, World
from simulation.nodes.trainer import Trainer
from simulation.plan import COORDINATOR
from simulation.scheduler import Life

_REPORT_S, _REPORT_TIMEOUT_S = 0.85, 2.0


class WorkerNode(Node):
    """A worker's machine."""

    def __init__(self, name: str, world: World, pace: float) -> None:
        super().__init__(name, world, pace)
        self._member: Member | None = None
        self._machine = AssignmentMachine()
        self._trainer: Trainer | None = None

    def begin(self, life: Life) -> None:
        self._machine = AssignmentMachine()
        self._member = Member(
            self,
            Role.WORKER,
            on_reply=self._on_heartbeat,
            on_incarnation=lambda incarnation: self._handle(IncarnationChanged(incarnation)),
            on_end=self._on_end,
        )
        self.scheduler.spawn(life, self._member.run())

    def crashed(self) -> None:
        self.checker.workers_lost = True
        self._kill_trainer()

    def stop(self, seconds: float) -> None:
        super().stop(seconds)
        if self._trainer:
            self._trainer.life.stopped_until = self.scheduler.now + seconds

    async def serve(self, request: Any, context: Context) -> Any:
        raise AssertionError("nobody calls a worker")

    def crash_trainer(self) -> None:
        """Kills the trainer."""
        if self.life and self._trainer:
            self.checker.workers_lost = True
            trainer = self._kill_trainer()
            self._handle(TrainerEnded(-9, None, trainer.accepted > 0))

    def _kill_trainer(self) -> Any:
        trainer, self._trainer = self._trainer, None
        if trainer:
            trainer.life.end()
        return trainer

    # The daemon.

    def _on_heartbeat(self, reply: HeartbeatResult) -> None:
        assert self._member
        assignment = reply.assignment
        part = AssignedJob(assignment.job, assignment.number, self._member.incarnation) if assignment else None
        self._handle(Assigned(part))

    def _on_end(self) -> None:
        self.checker.workers_lost = True

    def _handle(self, event: AssignmentEvent) -> None:
        for effect in self._machine.handle(event):
            match effect:
                case StartTrainer(assigned):
                    self._start_trainer(assigned)
                case StopTrainer():
                    self._kill_trainer()
                    self._handle(TrainerEnded(-15, None, False))
                case Finish():
                    self.scheduler.spawn(self.process, self._finish(effect))
                case Renew():
                    assert self._member
                    self.checker.workers_lost = True
                    self._member.renew()
        self._machine.validate()

    def _start_trainer(self, assigned: AssignedJob) -> None:
        trainer = Trainer(self, assigned, self.scheduler.new_life(self.name))
        trainer.life.stopped_until = self.process.stopped_until
        self._trainer = self._last = trainer

        def ended() -> None:
            if self.life and self._trainer is trainer:
                self._trainer = None
                trainer.life.end()
                outcome = task.result.value
                assert isinstance(outcome, TrainerOutcome)
                self._handle(TrainerEnded(0, outcome, trainer.accepted > 0))

        task = self.scheduler.spawn(trainer.life, trainer.run())
        task.result.then(ended)
        self.scheduler.spawn(self.process, self._report(trainer))

    async def _report(self, trainer: Trainer) -> None:
        """Sends reports while a trainer runs."""
        while self._trainer is trainer:
            await self.sleep(_REPORT_S)
            if await self._send_report(trainer) is ReportAck.DONE and self._trainer is trainer:
                self._handle(JobOver(trainer.assigned))

    async def _send_report(self, trainer: Trainer) -> ReportAck | None:
        """Sends a report. Returns None if it did not arrive."""
        report = events.WorkerReported(
            trainer.assigned.job,
            self.name,
            trainer.assigned.incarnation,
            step=trainer.step,
            accepted=trainer.accepted,
            dropped=trainer.dropped,
            samples=trainer.samples,
            assignment=trainer.assigned.assignment,
        )
        try:
            ack: ReportAck = await self.call(COORDINATOR, report, timeout_s=_REPORT_TIMEOUT_S)
        except (errors.Unreachable, errors.DeadlineExceeded):
            return None
        except errors.ShoalError:
            return ReportAck.CONTINUE
        return ack

    async def _finish(self, end: Finish) -> None:
        """Sends the last report, and then tells the coordinator that this worker has finished its job."""
        trainer, member = self._last, self._member
        assert member
        if end.shards_lost:
            self.checker.workers_lost = True
        while await self._send_report(trainer) is None:
            await self.sleep(0.25)
        assigned = trainer.assigned
        finished = events.WorkerFinished(
            assigned.job,
            self.name,
            assigned.incarnation,
            end.error,
            assigned.assignment,
            shards_lost=end.shards_lost,
            trainer_failed=end.trainer_failed,
            cursor=end.cursor,
        )
        while True:
            try:
                await self.call(COORDINATOR, finished)
                break
            except (errors.Unreachable, errors.DeadlineExceeded):
                await self.sleep(0.25)
            except errors.ShoalError:
                break
        member.wake()


__all__ = ["WorkerNode"]
