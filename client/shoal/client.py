"""The client of a cluster: submit jobs, watch them, and fetch the trained variables."""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack

import numpy as np

from shoal import _rpc, _tracing, errors, events
from shoal._limits.catalogue import PAGE_SIZE
from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials
from shoal._session.checkpoint_calls import take_checkpoint
from shoal._session.group_queries import GroupQueries
from shoal._session.job_variables import JobVariables
from shoal._session.job_waits import events_with_notices, start_notice
from shoal._session.open_sessions import warn_of_open
from shoal._session.server_drains import ServerDrains
from shoal._system import check_count, check_seconds, check_type
from shoal._training import SessionOptions, check_options, spelled_out, submit
from shoal._wire.limits import KEPT_TIMINGS
from shoal.events import Event, LogLine
from shoal.job import Job
from shoal.optim import OptimizerState
from shoal.session import Session
from shoal.status import ClusterStatus, DataAccount, JobResult, JobStatus, SavedCheckpoint, Timings
from shoal.v1 import coordinator_pb2, job_pb2

_Page = TypeVar("_Page", job_pb2.ListReply, coordinator_pb2.GetStatusReply)

DEFAULT_ADDRESS = "127.0.0.1:7070"


class JobHandle(JobVariables):
    """One job of a cluster. `Client.submit` and `Client.job` return it; it is valid while its client is open.

    Attributes:
        name: name of the job.
    """

    def __init__(self, coordinator: CoordinatorClient, name: str) -> None:
        super().__init__(coordinator, name)
        self._jobs, self._credentials = coordinator.jobs, coordinator.credentials

    def status(self) -> JobStatus:
        """Returns the current status of the job.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
        """
        return JobStatus.from_proto(self._coordinator.call(self._jobs.Get, job_pb2.GetRequest(job=self.name)).status)

    def wait(self, timeout_s: float | None = None, callbacks: Iterable[Callable[[Event], object]] = ()) -> JobResult:
        """Waits until the job has ended, and returns its result.

        Args:
            timeout_s: how long to wait, in seconds. None means no limit. The job continues after a timeout.
            callbacks: called with each event, in the order of the list; see `shoal.callbacks`. An exception of a
                callback ends the wait and is raised here; the job continues.

        Returns:
            The result of the job, which has succeeded.

        Raises:
            JobFailed: the job failed. The message has the reason and the program's traceback.
            Cancelled: the job was cancelled.
            UnknownJob: there is no such job, or it was dropped.
            DeadlineExceeded: the job has not ended within `timeout_s`. The message says what it waits for.
            Unreachable: the coordinator did not answer for longer than the client's `retry_for_s`.
        """
        callbacks = events.checked(callbacks)
        with start_notice(self._coordinator, self.name) as started:
            for event in events.watch(self._coordinator, self.name, timeout_s=timeout_s):
                for observe in (started.observe, *callbacks):
                    observe(event)
        return self.result()

    def result(self) -> JobResult:
        """Returns the result of the job, without waiting.

        Raises:
            JobRunning: the job has not ended.
            JobFailed, Cancelled, UnknownJob: see `wait`.
        """
        return self.status().result()

    def events(self, after: int = 0, *, follow: bool = True) -> Iterator[Event]:
        """Yields the events of the job in order, each once, even if the connection breaks.

        The coordinator keeps the latest 20,000 log lines and metrics of a job, and its latest 20,000 other events. All
        events together have at most 20 MiB.

        Args:
            after: sequence number of the last event to leave out. 0 starts with the oldest event.
            follow: whether to wait for more events until the job has ended. Otherwise the iterator ends with the last
                event so far.

        Yields:
            `StateChanged`, `MetricsReported`, `EvaluationEnded`, `CheckpointEnded` and `LogLine`.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
            Unreachable: see `wait`.
        """
        watched = events.watch(self._coordinator, self.name, after=after, follow=follow)
        return events_with_notices(watched, self._coordinator, self.name) if follow else watched

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yields the lines that the job's programs wrote, each prefixed with its worker's id.

        Args:
            follow: whether to wait for more lines until the job has ended.
        """
        return (str(event) for event in self.events(follow=follow) if isinstance(event, LogLine))

    def data(self) -> DataAccount:
        """Returns the account of the job's data: samples that are done, leased, requeued and unleased.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
        """
        return DataAccount.from_proto(self._coordinator.call(self._jobs.GetData, job_pb2.GetDataRequest(job=self.name)))

    def timings(self, *, last: int = 64) -> Timings:
        """Returns the time of each phase of the latest steps. `Timings.straggler()` names a slow worker.

        Args:
            last: largest number of steps of each worker, 1 or more. The coordinator keeps 256, fewer in a job of more
                than 64 workers.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
            BadRequest: `last` is below 1.
        """
        request = job_pb2.GetTimingsRequest(job=self.name, last=min(check_count("last", last, 1), KEPT_TIMINGS))
        return Timings.from_proto(self._coordinator.call(self._jobs.GetTimings, request))

    def cancel(self) -> JobStatus:
        """Cancels the job. Does nothing if it has ended.

        Returns:
            The status of the job afterwards.

        Raises:
            UnknownJob: there is no such job, or it was dropped.
        """
        request = job_pb2.CancelRequest(job=self.name)
        with _tracing.root("cancel", job=self.name):
            return JobStatus.from_proto(self._coordinator.call(self._jobs.Cancel, request).status)

    def drop(self) -> None:
        """Drops an ended job: the servers free its variables, and the coordinator removes its status and events.

        Raises:
            JobRunning: the job has not ended; cancel it first.
            UnknownJob: there is no such job, or it was dropped.
        """
        with _tracing.root("drop", job=self.name):
            self._coordinator.call(self._jobs.Drop, job_pb2.DropRequest(job=self.name))

    def checkpoint(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Takes a checkpoint while training continues, and waits until it is complete.

        Args:
            timeout_s: how long to wait, in seconds. None means no limit. The checkpoint continues after a timeout.

        Returns:
            The complete checkpoint.

        Raises:
            StorageFailed: the cluster has no checkpoint storage, or writing to it failed. The job continues.
            JobEnded: the job has ended.
            NotPlaced: the job's variables are not on servers.
            UnknownJob: there is no such job, or it was dropped.
            DeadlineExceeded: the checkpoint was not complete within `timeout_s`.
        """
        return take_checkpoint(self._coordinator, self.name, timeout_s)

    def __repr__(self) -> str:
        return f"JobHandle({self.name!r})"


class Client(GroupQueries, ServerDrains):
    """A connection to a cluster's coordinator. Several threads can use it at the same time.

        with shoal.Client("127.0.0.1:7070") as client:
            job = client.submit(shoal.Job("regression:linear", workers=2))
            print(job.wait())
            weights = client.pull(job)["w"]

    Args:
        address: host:port of the coordinator. The default is $SHOAL_COORDINATOR, or else 127.0.0.1:7070. The client
            connects at its first call.
        retry_for_s: how long to retry a call while the coordinator does not answer, in seconds.
        credentials: what the client presents. The default is that of the environment, such as $SHOAL_TLS_CA; see
            "Security" in the documentation.

    Raises:
        BadRequest: the address or a file for TLS is invalid, or tracing is on without OpenTelemetry.
    """

    def __init__(
        self, address: str | None = None, *, retry_for_s: float = 20.0, credentials: Credentials | None = None
    ) -> None:
        self.address = address or os.environ.get("SHOAL_COORDINATOR") or DEFAULT_ADDRESS
        _rpc.parse_address(self.address, "the address of a coordinator")
        check_seconds("retry_for_s", retry_for_s)
        _tracing.start("client")
        presented = (credentials or Credentials.find()).for_coordinator(self.address, AccessRole.ADMIN)
        self._coordinator = CoordinatorClient(self.address, retry_for_s=retry_for_s, credentials=presented)

    def submit(self, job: Job) -> JobHandle:
        """Submits a job.

        Args:
            job: the specification.

        Returns:
            The handle of the new job.

        Raises:
            BadRequest: `job` is not a `Job`.
            InvalidJob: the specification is invalid.
            ProgramNotAllowed: the program is in Python's standard library.
            JobExists: a job of that name is running.
            UnknownCheckpoint: the checkpoint in `Job.restore` does not exist.
            StorageFailed: the job has `restore="auto"`, and the cluster has no checkpoint storage.
        """
        check_type("job", job, Job, "a shoal.Job, such as shoal.Job('digits:Digits', workers=2)")
        with _tracing.root("submit", job=job.name):
            reply = submit(self._coordinator, job)
        return JobHandle(self._coordinator, reply.status.spec.name)

    def jobs(self, *, ended: int | None = None) -> list[JobStatus]:
        """Returns the status of the jobs of the cluster, newest first.

        In this list, `JobStatus.job` has no settings, and `JobStatus.members` is empty. The middle of a long `reason`,
        `checkpoint_failure` or `restore_note` is left out. `JobHandle.status` returns all of them completely.

        Args:
            ended: how many of the newest ended jobs to list, beside all that have not ended: 0 to 1,000. Default: all.
        """
        pages = self._pages(partial(self._list, ended))
        return [JobStatus.from_proto(status) for page in pages for status in page.jobs]

    def job(self, name: str) -> JobHandle:
        """Returns the handle of a submitted job, without checking that the job exists."""
        return JobHandle(self._coordinator, _name(name))

    def status(self) -> ClusterStatus:
        """Returns the members of the cluster and their load."""
        pages = [ClusterStatus.from_proto(page) for page in self._pages(self._get_status)]
        members = tuple(member for page in pages for member in page.members)
        return ClusterStatus(pages[-1].cluster, pages[-1].generation, members)

    def timings(self, job: JobHandle | str, *, last: int = 64) -> Timings:
        """Returns the time of each phase of a job's latest steps: see `JobHandle.timings`."""
        return self.job(_name(job)).timings(last=last)

    def cancel(self, job: JobHandle | str) -> JobStatus:
        """Cancels a job: see `JobHandle.cancel`."""
        return self.job(_name(job)).cancel()

    def drop(self, job: JobHandle | str) -> None:
        """Drops an ended job: see `JobHandle.drop`."""
        self.job(_name(job)).drop()

    def pull(self, job: JobHandle | str) -> dict[str, np.ndarray]:
        """Returns a job's variables as NumPy arrays: see `JobHandle.pull`."""
        return self.job(_name(job)).pull()

    def session(
        self,
        job: str,
        *,
        variables: Any = None,
        worker: str = "",
        on_error: Literal["leave", "fail"] = "leave",
        optimizer_state: OptimizerState | None = None,
        **options: Unpack[SessionOptions],
    ) -> Session:
        """Opens a session, which pulls and pushes in your own training loop, in any framework. See `Session`.

        Joins the running job of that name, or starts it if there is none. If the job is full, one of its sessions may
        have died. The call then waits for a place, at most for the heartbeat timeout plus two seconds.

        Args:
            job: name of the job: 1 to 63 characters of a-z, 0-9 and -, starting with a letter.
            variables: the job's variables: a dict by name, or a tree of dicts, lists, tuples and named tuples, or of
                containers that JAX knows. The variable at `tree["layers"][0]["w"]` is named "layers/0/w". An array is
                the initial value of a variable, which is trainable if its dtype is a float; `Variable.of` makes other
                variables. Required to start a job, optional to join one.
            worker: member id of this session. "" means a random one.
            on_error: what happens to the job if the `with` block ends with an exception or Ctrl-C. "leave": the other
                sessions go on, and the job fails only if there are none. "fail": the job fails.
            optimizer_state: slots and number of updates of the optimizer of a new job, for variables whose values are
                arrays. Each session that gives variables has to give the same. A job that restores a checkpoint does
                not use it. None means that of a new optimizer.
            options: fields of `Job`, which describes them. An option that is left out or None has the default of `Job`,
                except that `overlap` is then False. A session that joins a job may repeat the job's values.

                - `workers`: number of sessions. Training begins when all of them are open.
                - `optimizer`, `consistency`: how updates are computed, and in which order pushes and pulls happen.
                - `seed`, `shards`: seed of the initial values, and number of shards of the variables.
                - `replicas`, `min_replicas`: number of copies of each shard, and with how many the job may begin.
                - `wire_dtype`, `overlap`: dtype of float32 values on the wire; whether calls overlap with computing.
                - `epochs`, `batch_size`, `range_size`: how `Session.batches` divides the data.
                - `checkpoints`: a `CheckpointPolicy`.
                - `restore`, `partial_restore`: the checkpoint to start from, and whether it may have other variables.
                  With "auto", a rerun starts from the newest checkpoint of the job's name.

        Returns:
            The open session.

        Raises:
            UnknownJob: no such job is running, and there are no variables to start one.
            InvalidJob: the running job has other variables or options.
            InvalidOptimizer: the optimizer state does not fit the optimizer or the variables.
            Overloaded: the running job has all its sessions, and all of them are alive.
            UnknownCheckpoint: the checkpoint in `restore` does not exist.
            StorageFailed: the checkpoint in `restore` cannot be read.
            JobFailed: the job failed before it began, for example because the checkpoint has other variables.
            Unreachable: the coordinator or a server did not answer for too long.
            TypeError: sessions do not have this option. The message names the nearest option, or all of them.
        """
        check_options(options)
        given = {name: value for name, value in options.items() if value is not None}
        ends: dict[str, Any] = {"worker": worker, "on_error": on_error, "optimizer_state": optimizer_state}
        return Session(self._coordinator, job, variables, given, **ends)

    def _list(self, ended: int | None, token: str) -> job_pb2.ListReply:
        request = job_pb2.ListRequest(page_size=PAGE_SIZE.default, page_token=token, ended=ended)
        return self._coordinator.call(self._coordinator.jobs.List, request)

    def _get_status(self, token: str) -> coordinator_pb2.GetStatusReply:
        request = coordinator_pb2.GetStatusRequest(page_token=token)
        return self._coordinator.call(self._coordinator.members.GetStatus, request)

    @staticmethod
    def _pages(get: Callable[[str], _Page]) -> Iterator[_Page]:
        """Yields the pages of a list; `get` returns the page of a token."""
        page = get("")
        yield page
        while token := page.next_page_token:
            page = get(token)
            yield page

    def close(self) -> None:
        """Closes the connection. Calls in progress raise `Cancelled`."""
        warn_of_open(self._coordinator)
        self._coordinator.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(address: str | None = None, *, retry_for_s: float = 20.0) -> Client:
    """Opens a `Client` and checks that the coordinator answers.

    Args:
        address: see `Client`.
        retry_for_s: see `Client`.

    Raises:
        BadRequest: see `Client`.
        Unreachable: the coordinator did not answer for `retry_for_s` seconds.
    """
    client = Client(address, retry_for_s=retry_for_s)
    try:
        client.status()
    except errors.ShoalError:
        client.close()
        raise
    return client


Client.session.__signature__ = spelled_out(Client.session)  # type: ignore[attr-defined] # valid on functions


def _name(job: JobHandle | str) -> str:
    check_type("job", job, (str, JobHandle, Job), "the name of a job, such as 'digits-1', or what `submit` returned")
    return job if isinstance(job, str) else job.name


__all__ = ["DEFAULT_ADDRESS", "Client", "JobHandle", "connect"]
