"""The cluster as a user's program sees it: submit jobs, watch them, fetch what they trained."""

import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike

from shoal import _rpc, _tracing, errors, events
from shoal._rpc import CoordinatorClient
from shoal._training import ParameterClient
from shoal._wire import Placement
from shoal._wire.limits import KEPT_TIMINGS
from shoal.events import CheckpointEnded, Event, LogLine
from shoal.job import Job, SessionOptions
from shoal.session import Session
from shoal.status import ClusterStatus, DataAccount, JobResult, JobStatus, SavedCheckpoint, Timings
from shoal.v1 import coordinator_pb2, job_pb2
from shoal.variables import Variable

DEFAULT_ADDRESS = "127.0.0.1:7070"


class JobHandle:
    """One job of a cluster, by name. Made by `Client.submit` and `Client.job`; valid as long as its client is open."""

    def __init__(self, coordinator: CoordinatorClient, name: str) -> None:
        self._coordinator = coordinator
        self._jobs = coordinator.jobs
        self.name = name

    def status(self) -> JobStatus:
        """The job as the coordinator sees it now.

        Raises:
            UnknownJob: there is no such job, or none any more.
        """
        return JobStatus.from_proto(self._coordinator.call(self._jobs.Get, job_pb2.GetRequest(job=self.name)).status)

    def wait(self, timeout_s: float | None = None, callbacks: Iterable[Callable[[Event], object]] = ()) -> JobResult:
        """Waits for the job's end and says what it did.

        Args:
            timeout_s: how long to wait; None: as long as it takes. The job goes on in any case.
            callbacks: called with each event, in this order; see `shoal.callbacks`. What one raises ends the waiting
                and is raised here; the job goes on.

        Raises:
            JobFailed: it failed; the message has the reason and the program's traceback.
            Cancelled: it was cancelled.
            DeadlineExceeded: it has not ended in time.
            Unreachable: the coordinator was away for longer than the client's `retry_for_s`.
        """
        callbacks = tuple(callbacks)
        for event in events.watch(self._coordinator, self.name, timeout_s=timeout_s):
            for callback in callbacks:
                callback(event)
        return self.result()

    def result(self) -> JobResult:
        """What the job did, without waiting.

        Raises:
            JobRunning: it has not ended.
            JobFailed, Cancelled: as for `wait`.
        """
        return self.status().result()

    def events(self, after: int = 0, *, follow: bool = True) -> Iterator[Event]:
        """What happens to the job, in order and each once, though the connection may break on the way.

        Args:
            after: the sequence number to begin behind; 0: from the oldest that is kept (20,000 log lines and figures of
                a job, and 20,000 others).
            follow: wait for more until the job has ended, instead of ending with what there is.

        Yields:
            `StateChanged`, `MetricsReported`, `EvaluationEnded`, `CheckpointEnded` and `LogLine`.
        """
        return events.watch(self._coordinator, self.name, after=after, follow=follow)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """The lines that the job's programs wrote, each with its worker's name in front.

        Args:
            follow: wait for more until the job has ended.
        """
        return (str(event) for event in self.events(follow=follow) if isinstance(event, LogLine))

    def data(self) -> DataAccount:
        """What became of the job's data: which samples are done, who holds which, and which still wait.

        Raises:
            UnknownJob: there is no such job, or none any more.
        """
        request = job_pb2.GetDataRequest(job=self.name)
        return DataAccount.from_proto(self._coordinator.call(self._jobs.GetData, request))

    def timings(self, *, last: int = 64) -> Timings:
        """Where the time of the job's latest steps went, and who is slower than the others: `Timings.straggler()`.

        Args:
            last: steps of each worker at most, 1 or more; the coordinator keeps 256, fewer in a job of more than 64
                workers.

        Raises:
            UnknownJob: there is no such job, or none any more.
            BadRequest: `last` is below 1.
        """
        if last < 1:
            raise errors.BadRequest(f"the last {last} steps; ask for 1 or more")
        request = job_pb2.GetTimingsRequest(job=self.name, last=min(last, KEPT_TIMINGS))
        return Timings.from_proto(self._coordinator.call(self._jobs.GetTimings, request))

    def cancel(self) -> JobStatus:
        """Ends the job. One that has ended stays as it is."""
        request = job_pb2.CancelRequest(job=self.name)
        with _tracing.root("cancel", job=self.name):
            return JobStatus.from_proto(self._coordinator.call(self._jobs.Cancel, request).status)

    def drop(self) -> None:
        """Frees the ended job's variables and forgets it.

        Raises:
            JobRunning: it has not ended; cancel it first.
        """
        with _tracing.root("drop", job=self.name):
            self._coordinator.call(self._jobs.Drop, job_pb2.DropRequest(job=self.name))

    def checkpoint(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Takes a checkpoint while training goes on, and waits until it is whole.

        Args:
            timeout_s: how long to wait; None: as long as it takes. It is finished in any case.

        Raises:
            StorageFailed: the cluster has no folder of checkpoints, or it could not be written; the job goes on.
            NotPlaced: the job's variables are not on servers.
            DeadlineExceeded: it is not whole in time.
        """
        with _tracing.root("checkpoint", job=self.name):
            reply = self._coordinator.call(self._jobs.TakeCheckpoint, job_pb2.TakeCheckpointRequest(job=self.name))
        watched = events.watch(self._coordinator, self.name, after=reply.after, timeout_s=timeout_s)
        try:
            ends = (event for event in watched if isinstance(event, CheckpointEnded) and event.attempt >= reply.attempt)
            end = next(ends, None)
        except errors.DeadlineExceeded:
            raise errors.DeadlineExceeded(
                f"the checkpoint of job {self.name} is not whole within {timeout_s:g} s; it is finished all the same, "
                "and the job's events say how it ended",
                job=self.name,
            ) from None
        if end and end.saved:
            return end.saved
        if end:
            raise errors.StorageFailed(f"a checkpoint of job {self.name} failed: {end.failure}", job=self.name)
        raise errors.NotPlaced(f"job {self.name} has ended before its checkpoint was whole", job=self.name)

    def pull(self) -> dict[str, np.ndarray]:
        """The job's variables as they are now; while it runs, shards may be some updates apart.

        Returns:
            Fresh arrays by name, in the variables' shapes and dtypes.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
            NotPlaced: its variables are not on servers yet.
        """
        with (
            _tracing.root("pull", job=self.name),
            ParameterClient(self._placement(), refresh=self._placement) as parameters,
        ):
            return parameters.pull()

    def _placement(self) -> Placement:
        request = job_pb2.GetPlacementRequest(job=self.name)
        return Placement.from_proto(self._coordinator.call(self._jobs.GetPlacement, request))

    def __repr__(self) -> str:
        return f"JobHandle({self.name!r})"


class Client:
    """A connection to a cluster's coordinator. May be used by several threads at once.

        with shoal.Client("127.0.0.1:7070") as client:
            job = client.submit(shoal.Job("regression:linear", workers=2))
            print(job.wait())
            weights = client.pull(job)["w"]

    Args:
        address: the coordinator's host:port; by default $SHOAL_COORDINATOR, else 127.0.0.1:7070.
        retry_for_s: how long a call is repeated while nobody answers, in seconds. Connects at the first call.

    Raises:
        Unreachable: the address is none.
        BadRequest: the environment asks for traces, and OpenTelemetry is not installed; see docs/how-to/tracing.md.
    """

    def __init__(self, address: str | None = None, *, retry_for_s: float = 20.0) -> None:
        self.address = address or os.environ.get("SHOAL_COORDINATOR") or DEFAULT_ADDRESS
        try:
            _rpc.parse_address(self.address)
        except errors.BadRequest:
            raise errors.Unreachable(
                f"{self.address!r} is no coordinator's address; give host:port, such as {DEFAULT_ADDRESS}",
                address=self.address,
            ) from None
        _tracing.start("client")
        self._coordinator = CoordinatorClient(self.address, retry_for_s=retry_for_s)

    def submit(self, job: Job) -> JobHandle:
        """Starts a job.

        Raises:
            InvalidJob: its specification contradicts itself.
            JobExists: a job of that name is running.
            UnknownCheckpoint: there is no such checkpoint to begin with.
        """
        request = job_pb2.SubmitRequest(spec=job.to_proto(), token=secrets.token_hex(8))
        with _tracing.root("submit", job=job.name):
            reply = self._coordinator.call(self._coordinator.jobs.Submit, request)
        return JobHandle(self._coordinator, reply.status.spec.name)

    def jobs(self) -> list[JobStatus]:
        """All jobs that the cluster knows, newest first."""
        reply = self._coordinator.call(self._coordinator.jobs.List, job_pb2.ListRequest())
        return [JobStatus.from_proto(status) for status in reply.jobs]

    def job(self, name: str) -> JobHandle:
        """The handle of a job that was submitted somewhere else. Not checked before its first use."""
        return JobHandle(self._coordinator, name)

    def status(self) -> ClusterStatus:
        """The cluster's members and what they hold."""
        reply = self._coordinator.call(self._coordinator.members.GetStatus, coordinator_pb2.GetStatusRequest())
        return ClusterStatus.from_proto(reply)

    def timings(self, job: JobHandle | str, *, last: int = 64) -> Timings:
        """Where the time of a job's latest steps went: see `JobHandle.timings`."""
        return self.job(_name(job)).timings(last=last)

    def cancel(self, job: JobHandle | str) -> JobStatus:
        """Ends a job: see `JobHandle.cancel`."""
        return self.job(_name(job)).cancel()

    def drop(self, job: JobHandle | str) -> None:
        """Forgets an ended job: see `JobHandle.drop`."""
        self.job(_name(job)).drop()

    def pull(self, job: JobHandle | str) -> dict[str, np.ndarray]:
        """A job's variables as NumPy arrays: see `JobHandle.pull`."""
        return self.job(_name(job)).pull()

    def session(
        self,
        job: str,
        *,
        variables: Mapping[str, Variable | ArrayLike] | None = None,
        worker: str = "",
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Opens a session: pull and push from a loop of your own, in any framework. See `Session`.

        Starts the job if none of that name is live, else joins the one that is.

        Args:
            job: name, 1 to 63 characters of [a-z0-9-], starting with a letter.
            variables: what is trained, by name; an array is a trainable variable's initial value. Needed to start a
                job; who joins one may leave it out.
            worker: member id of this session; by default a random one.
            options: fields of `Job`, by name: those of `shoal.job.SessionOptions`. The job's defaults hold for what is
                left out or None, except for overlap, which is then False: a loop of your own pulls and pushes in turn.
                Who joins a job gets its values, and may repeat them.

        Raises:
            UnknownJob: no such job is live, and there are no variables to start one with.
            InvalidJob: the job that runs is described in another way.
            UnknownCheckpoint: there is no such checkpoint to start it with.
        """
        if unknown := options.keys() - SessionOptions.__annotations__:
            raise TypeError(f"Client.session() got an unexpected keyword argument {min(unknown)!r}")
        given = {name: value for name, value in options.items() if value is not None}
        return Session(self._coordinator, job, variables, given, worker=worker)

    def close(self) -> None:
        """Closes the connection; calls in progress end with Cancelled."""
        self._coordinator.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(address: str | None = None, *, retry_for_s: float = 20.0) -> Client:
    """Opens a `Client` and makes sure that a coordinator answers.

    Raises:
        Unreachable: none did for `retry_for_s` seconds.
    """
    client = Client(address, retry_for_s=retry_for_s)
    try:
        client.status()
    except errors.ShoalError:
        client.close()
        raise
    return client


def _spelled_out(session: Callable[..., Session]) -> inspect.Signature:
    """The signature with each option by name, for `help` and for notebooks, which do not look into `**options`."""
    given = inspect.signature(session)
    named = [it for it in given.parameters.values() if it.kind is not it.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in SessionOptions.__annotations__.items()
    ]
    return given.replace(parameters=[*named, *options])


Client.session.__signature__ = _spelled_out(Client.session)  # type: ignore[attr-defined] # it is a function's


def _name(job: JobHandle | str) -> str:
    return job if isinstance(job, str) else job.name


__all__ = ["DEFAULT_ADDRESS", "Client", "JobHandle", "connect"]
