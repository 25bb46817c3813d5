"""The folder of a run, which all tasks share: job, certificates, checkpoints, coordinator's address, outcome.

    run.json            the plan: the job, the numbers of servers and workers, and the options of the roles
    plans/              the plan of each submission: a later one does not change those of earlier ones
    coordinator.json    the address of the coordinator, and whether the roles should run or leave
    certificates/       a CA, and a certificate and a key for each access role, as `shoal certs init` makes them
    checkpoints/        the checkpoints of the job, unless the plan has another storage
    outcomes/           the last status of the job, for each allocation in which it ended
    failures/           why a task failed
    claims/             the allocation that has the folder
    unfinished/         the newest checkpoint at the start of each allocation that ended before the job
    submitit/           the files and logs of submitit

Only the user of the run can access it. Files are replaced in one step, so that no task reads half of one.
"""

import base64
import enum
import json
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal import errors
from shoal._display import counted
from shoal._security import VARIABLES, Credentials
from shoal._system import atomic_write, private_files
from shoal.checkpoints import Checkpoint, Checkpoints
from shoal.client import Client
from shoal.job import Job
from shoal.slurm._allocation import Allocation
from shoal.slurm._claim import FolderClaim, refuse_other
from shoal.slurm._shared_files import files_in, patiently
from shoal.status import JobState, JobStatus
from shoal.v1 import job_pb2

_PLAN, _COORDINATOR = "run.json", "coordinator.json"
_CERTIFICATES, _CLAIMS = "certificates", "claims"
_OUTCOMES, _FAILURES, _UNFINISHED = "outcomes", "failures", "unfinished"
_CHECKPOINTS, _PLANS = "checkpoints", "plans"
_FOLDERS = (_CHECKPOINTS, _PLANS, _OUTCOMES, _FAILURES, _UNFINISHED, _CLAIMS)


class Phase(enum.Enum):
    """What the coordinator's task asks of the other tasks: to run, to save and leave, or to end."""

    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What a run consists of.

    Attributes:
        job: the job.
        servers: number of servers.
        workers: number of workers.
        path: folders from which workers import programs.
        flags: further options by role.
        checkpoints: URL of the checkpoint storage; empty for the folder of the run.
        start_timeout_s: how long tasks wait for each other, in seconds.
        save_timeout_s: how long servers may take to save the job before they leave, in seconds.
    """

    job: Job
    servers: int
    workers: int
    path: tuple[str, ...]
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    checkpoints: str = ""
    start_timeout_s: float = 300.0
    save_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises BadRequest if the job would wait forever."""
        if self.job.is_session:
            raise errors.BadRequest(
                "the job has no program, so its workers would be sessions; name one, such as shoal.Job('digits:Digits')"
            )
        for what, here, needed in (
            ("worker", self.workers, self.job.fewest_workers),
            ("server", self.servers, self.job.fewest_replicas),
        ):
            if here < needed:
                raise errors.BadRequest(
                    f"the run has {counted(here, what)}, but the job {self.job.name} waits for {needed}; ask for "
                    f"{counted(needed - here, what)} more"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What the coordinator's task tells the others.

    Attributes:
        run: id of what was submitted; see `Allocation`.
        attempt: id of the start of the tasks.
        address: host:port of the coordinator; empty if it has not started.
        page: URL of its page; empty without one.
        phase: what the other tasks should do.
    """

    run: str
    attempt: str
    address: str
    page: str = ""
    phase: Phase = Phase.RUNNING


class RunFolder:
    """The files of a run.

    Args:
        folder: the folder, on a file system that all nodes of the allocation share.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder).absolute()

    def checkpoints(self, plan: RunPlan) -> str:
        """Returns the URL of the checkpoint storage of a plan."""
        return plan.checkpoints or str(self.path / _CHECKPOINTS)

    @property
    def submitit(self) -> Path:
        """The folder of submitit's files and logs, which only this user can access."""
        return self.path / "submitit"

    def prepare(self, plan: RunPlan, run: str = "") -> None:
        """Creates what is missing in the folder, and writes the plan.

        Args:
            plan: the plan.
            run: id of the submission; see `Allocation`. "" means that there is only one.

        Raises:
            BadRequest: others can access the folder, it cannot be written, or it has the run of another job.
        """
        try:
            private_files.make_folder(self.path)
            if self.path.stat().st_uid == os.geteuid() and not any(self.path.iterdir()):
                self.path.chmod(0o700)  # nobody uses it yet
            self._check_private()
            if (self.path / _PLAN).exists() and (earlier := self.plan().job.name) != plan.job.name:
                raise errors.BadRequest(
                    f"{self.path} has the run of the job {earlier}, not of {plan.job.name}; give the job the name "
                    f"{earlier} to go on with it, or name another folder",
                    folder=self.path,
                )
            for folder in (self.submitit, *map(self.path.joinpath, _FOLDERS)):
                private_files.make_folder(folder)
            from shoal.slurm._certificates import ensure_certificates  # noqa: PLC0415 - slow

            ensure_certificates(self.path / _CERTIFICATES)
            wanted = {name: getattr(plan, name) for name in RunPlan.__slots__ if name != "job"}
            job = base64.b64encode(plan.job.to_proto().SerializeToString(deterministic=True)).decode()
            written = json.dumps({"name": plan.job.name, **wanted, "job": job}, indent=2).encode()
            if run:
                self._write(f"{_PLANS}/{run}.json", written)
            self._write(_PLAN, written)
        except OSError as error:
            raise errors.BadRequest(
                f"cannot write the run to {self.path}: {error.strerror}; name a folder that you may write to, on a "
                "file system that all nodes share",
                folder=self.path,
            ) from None

    def plan(self, run: str = "") -> RunPlan:
        """Returns the plan that `prepare` wrote.

        Args:
            run: id of the submission. "", or one without a plan of its own, means the latest one.

        Raises:
            BadRequest: the folder has no readable plan, or others can access it.
        """
        try:
            patiently(self._check_private)
            written = json.loads(patiently(lambda: self._plan_file(run).read_bytes()))
            job = Job.from_proto(job_pb2.JobSpec.FromString(base64.b64decode(written.pop("job"))))
            del written["name"]
            return RunPlan(job=job, **{**written, "path": tuple(written["path"])})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise errors.BadRequest(
                f"cannot read the run in {self.path}: {error}; name the folder of shoal.slurm.submit or of "
                "`python -m shoal.slurm prepare`, on a file system that all nodes share",
                folder=self.path,
            ) from None

    def _plan_file(self, run: str) -> Path:
        own = self.path / _PLANS / f"{run}.json"
        return own if run and own.exists() else self.path / _PLAN

    def announce(self, said: Announcement) -> None:
        """Tells the other tasks what to do."""
        self._write(_COORDINATOR, json.dumps(asdict(said) | {"phase": said.phase.value}).encode())

    def announced(self, attempt: str = "") -> Announcement | None:
        """Returns the latest announcement, or None if there is none of this attempt, or if it cannot be read now.

        Args:
            attempt: id of the start of the tasks. "" means any.
        """
        written = None
        with suppress(OSError):
            written = self._read(_COORDINATOR)
        if written is None:
            return None
        said = json.loads(written)
        found = Announcement(**{**said, "phase": Phase(said["phase"])})
        return found if attempt in ("", found.attempt) else None

    def end(self, run: str, status: job_pb2.JobStatus) -> None:
        """Keeps the status of the job, which has ended."""
        self._write(f"{_OUTCOMES}/{run}", status.SerializeToString())

    def outcome(self, run: str) -> JobStatus | None:
        """Returns the status of the job if it has ended in a run, else None."""
        written = patiently(lambda: self._read(f"{_OUTCOMES}/{run}"))
        return None if written is None else JobStatus.from_proto(job_pb2.JobStatus.FromString(written))

    def forget_failed_job(self, run: str) -> None:
        """Forgets that the job failed in a run, which is started again."""
        if (ended := self.outcome(run)) and ended.state is JobState.FAILED:
            (self.path / _OUTCOMES / run).unlink()

    def newest_checkpoint(self, plan: RunPlan) -> int:
        """Returns the number of the newest checkpoint of the job of a plan, 0 if there is none."""
        found = Checkpoints(self.checkpoints(plan)).list(plan.job.name)
        return max((each.number for each in found if isinstance(each, Checkpoint)), default=0)

    def mark_unfinished(self, attempt: str, checkpoint: int) -> None:
        """Notes that an attempt ends before the job.

        Args:
            attempt: id of the start of the tasks.
            checkpoint: number of the newest checkpoint at that time.
        """
        self._write(f"{_UNFINISHED}/{attempt}", str(checkpoint).encode())

    def unfinished(self, run: str) -> list[int]:
        """Returns the newest checkpoint at the start of each unfinished attempt of a run, or of one start of it."""
        files = patiently(lambda: files_in(self.path / _UNFINISHED, f"{run}."))
        return [int(patiently(file.read_text)) for file in files]

    def report_failure(self, attempt: str, name: str, reason: str) -> None:
        """Keeps the reason why a task failed, for the other tasks and for `SlurmRun.wait`."""
        self._write(f"{_FAILURES}/{attempt}.{name}", f"{name}: {reason}".encode())

    def failures(self, run: str) -> list[str]:
        """Returns why tasks of a run, or of one attempt of it, failed, as far as that can be read now."""
        with suppress(OSError):
            return [file.read_text() for file in files_in(self.path / _FAILURES, f"{run}.")]
        return []

    def tls(self, holder: str) -> dict[str, str]:
        """Returns the environment variables that name the TLS files of a holder, such as "server"."""
        folder = self.path / _CERTIFICATES
        return dict(zip(VARIABLES, map(str, (folder / "ca.pem", *self.pair(holder))), strict=True))

    def pair(self, holder: str) -> tuple[Path, Path]:
        """Returns the files of the certificate and the key of a holder."""
        folder = self.path / _CERTIFICATES
        return folder / f"{holder}.pem", folder / f"{holder}-key.pem"

    def client(self, address: str, *, retry_for_s: float = 20.0) -> Client:
        """Returns a client of the run's cluster, which presents the certificate of the admin and no token."""
        found = Credentials.find(environment=self.tls("admin"))
        return Client(address, retry_for_s=retry_for_s, credentials=found.with_token(lambda: ""))

    def claim(self, place: Allocation) -> FolderClaim:
        """Returns the claim of an attempt, without which it must not write to the folder; see `FolderClaim.take`."""
        return FolderClaim.take(self.path / _CLAIMS, place)

    def refuse_second(self, run: str = "") -> None:
        """Checks that no other submission of the run goes on: both would write the checkpoints.

        Args:
            run: id of the submission that asks; see `Allocation`.

        Raises:
            JobRunning: another one has the folder.
        """
        patiently(lambda: refuse_other(self.path / _CLAIMS, run))

    def _check_private(self) -> None:
        """Raises BadRequest if another user can access the folder, who could then act as a role of the run."""
        status = self.path.stat()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid() or mode & 0o077:
            raise errors.BadRequest(
                f"{self.path} belongs to user {status.st_uid} and has the mode {mode:o}, so others than user "
                f"{os.geteuid()} can access the run; name a new folder, or run: chmod 700 {self.path}",
                folder=self.path,
            )

    def _read(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return (self.path / name).read_bytes()
        return None

    def _write(self, name: str, content: bytes) -> None:
        patiently(lambda: self._write_once(name, content))

    def _write_once(self, name: str, content: bytes) -> None:
        with atomic_write(self.path / name) as unfinished, open(private_files.create(unfinished), "wb") as file:
            file.write(content)


__all__ = ["Announcement", "Phase", "RunFolder", "RunPlan"]
