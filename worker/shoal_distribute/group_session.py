"""GroupSession: a session of a job that a group of processes shares, so that servers see one push for all of them."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np

import shoal
from shoal import _rpc, errors
from shoal._numerics import Aggregation
from shoal._system import check_count
from shoal.v1 import header_pb2
from shoal.variables import Variable, variable_from_array
from shoal_distribute.collectives import Group
from shoal_distribute.group_arrays import Packing, bytes_from
from shoal_worker.arrays import on_host

_OUTCOMES: tuple[Literal["accepted", "dropped_late", "skipped", "sent"], ...] = (
    "accepted",
    "dropped_late",
    "skipped",
    "sent",
)
_END = -1  # instead of the length of a batch

Names = tuple[tuple[str, ...], ...]


class GroupSession:
    """A session that the processes of a group share. All of them make the same calls, at the same time.

    The first process of the group has the session. It pulls for all. A push first computes the mean of the gradients
    within the group, weighted by samples. The first process then pushes it, with the sum of the weights. So a job of
    eight processes in groups of two has four sessions, and servers get half the pulls and pushes.

        with Group.open(rank, addresses, security=security) as group, shoal.connect() as client:
            with GroupSession(group, client, "my-job", variables, workers=4, batch_size=64) as session:
                for numbers in session.batches(len(images)):
                    gradients = gradients_of(session.pull(), images[numbers])
                    session.push(gradients, weight=len(numbers))

    The member id of the session, its incarnation and the step identify a push. If `worker` names the group, a group
    that starts again has the same member id and the next incarnation, so no push counts twice.

    If a process of the group ends, the others get `RankLost` with its number, and the session leaves the job. The other
    groups go on. The ranges of data that the group had leased go to them. Start all processes of the group again.

    Args:
        group: the group, which is closed with the session.
        client: client of the cluster. Only the first process uses it.
        job: name of the job.
        variables: variables of the job by name, the same in all processes: arrays, or `shoal.Variable`s.
        worker: member id of the session. "" means a random one.
        options: further options of `shoal.Client.session`. `workers` is the number of groups, and a batch of
            `batch_size` samples is one of the whole group.

    Attributes:
        job: name of the job.
        group: the group.
        session: the session, in the first process; None in the others. Checkpoints are taken with it.
        rank: rank of the session in the job.
        step: number of the next step.

    Raises:
        InvalidVariable: a variable has an unsupported dtype or shape.
        RankLost: a process of the group has ended.
        RanksDisagree: the processes have different variables.
        ShoalError: the session could not be opened; see `shoal.Client.session`.
    """

    def __init__(
        self,
        group: Group,
        client: shoal.Client,
        job: str,
        variables: Mapping[str, Any],
        *,
        worker: str = "",
        **options: Any,
    ) -> None:
        self.job, self.group = job, group
        self.session: shoal.Session | None = None
        self._variables = {
            name: it if isinstance(it, Variable) else variable_from_array(np.asarray(it))
            for name, it in variables.items()
        }
        self._packing = Packing((it.shape, it.dtype) for it in self._variables.values())
        self._closed = False
        kinds = [[name, it.dtype.name, it.shape, it.aggregation.name] for name, it in sorted(self._variables.items())]
        self._agree(_checksum(kinds), "other variables")

        def opened() -> Sequence[int]:
            self.session = client.session(job, variables=dict(variables), worker=worker, **options)
            self.session.report_ranks(lambda: group.timings().ranks)
            return self.session.rank, self.session.step

        self.rank, self.step = self._led(opened, 2)

    def pull(self) -> dict[str, np.ndarray]:
        """Returns the values of all variables by name: new arrays, which the first process has pulled.

        Raises:
            RankLost: a process of the group has ended.
            ShoalError: see `shoal.Session.pull`. All processes get its errors.
        """
        values: dict[str, np.ndarray] = {}

        def pulled() -> Sequence[int]:
            assert self.session
            values.update(self.session.pull())
            return (self.session.step,)

        (self.step,) = self._led(pulled, 1)
        flats = self._packing.empty()
        received = dict(zip(self._variables, self._packing.parts(flats), strict=True))
        for name, value in values.items():
            received[name][...] = value
        for flat in flats:
            self.group.broadcast(flat)
        return received

    def push(
        self,
        gradients: Mapping[str, Any],
        *,
        updates: Mapping[str, Any] | None = None,
        weight: float = 1.0,
        metrics: Mapping[str, float] | None = None,
        samples: int | None = None,
    ) -> shoal.PushResult:
        """Pushes the mean of the gradients of all processes of the group, as one push.

        Args:
            gradients: this process's gradients by name: of the same variables in all processes.
            updates: values, or increments, of variables that are not trainable; see `shoal.Session.push`. For a
                variable with the aggregation "last", the value of the last process that does not skip the step counts.
            weight: weight of this process's gradients: usually its number of samples.
            metrics: metrics of this process's samples. Their mean is reported.
            samples: number of this process's samples, for the progress of the job. None means the weight.

        Returns:
            The outcome, in all processes.

        Raises:
            BadRequest: the weight of this process is not above 0, or `samples` is below 0. Nothing was pushed.
            InvalidGradient: a process gave gradients that do not fit. Nothing was pushed.
            RankLost: a process of the group has ended.
            RanksDisagree: the processes gave gradients, updates or metrics of other names. Nothing was pushed.
            ShoalError: see `shoal.Session.push`. All processes get its errors.
        """
        refused: Exception | None = None
        given: dict[str, np.ndarray] = {}
        numbers: dict[str, float] = {}
        counted = 0.0
        try:
            numbers = {name: float(it) for name, it in (metrics or {}).items()}
            _check_weight(weight)
            counted = weight if samples is None else check_count("samples", samples)
            given = self._checked(gradients, trainable=True) | self._checked(updates or {}, trainable=False)
        except Exception as error:  # the others wait for this process: `_joined` tells them, then raises it
            refused, weight = error, 0.0
        return self._joined(given, numbers, weight, counted, refused)

    def skip(self) -> shoal.PushResult:
        """Takes no part in this step, for example because this process's part of a batch is empty.

        The other processes may push. If none does, the session skips the step.

        Raises:
            InvalidGradient, RankLost, RanksDisagree, ShoalError: see `push`.
        """
        return self._joined({}, {}, 0.0, 0.0, None)

    def batches(self, n_samples: int) -> Iterator[np.ndarray]:
        """Yields this process's part of each batch of the group, until all samples of the job are read.

        The session leases the ranges, and its pushes carry the position in them, so the coordinator's account contains
        the samples of all processes. If the group ends, other groups get its ranges. See `shoal.Session.batches`.

        Args:
            n_samples: samples in one epoch, the same in all processes.

        Yields:
            Numbers of samples: each process gets a different part of the batch. If the batch is smaller than the group,
            some parts are empty. `skip` the step then.

        Raises:
            RankLost: a process of the group has ended.
            ShoalError: see `shoal.Session.batches`. All processes get its errors.
        """
        batches = self.session.batches(n_samples) if self.session else iter(())
        batch = np.empty(0, np.int64)

        def drawn() -> Sequence[int]:
            nonlocal batch
            found = next(batches, None)
            batch = batch if found is None else found
            return (_END if found is None else len(found),)

        while True:
            (length,) = self._led(drawn, 1)
            if length == _END:
                return
            numbers = self.group.broadcast(np.array(batch) if self.session else np.empty(length, np.int64))
            yield np.array_split(numbers, self.group.ranks)[self.group.rank]

    def set_learning_rate(self, learning_rate: float | shoal.optim.Schedule) -> None:
        """Sets the learning rate of the job; see `shoal.Session.set_learning_rate`. All processes call it.

        Args:
            learning_rate: a constant, or a schedule.
        """

        def done() -> Sequence[int]:
            assert self.session
            self.session.set_learning_rate(learning_rate)
            return ()

        self._led(done, 0)

    def close(self, error: str = "") -> None:
        """Closes the session and the group. The other processes do so too.

        Args:
            error: why this process ends, for the job's log. "" means that it has finished its work.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self.session:
                self.session.close(error)
        finally:
            self.group.close()

    def __enter__(self) -> "GroupSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.session and error is not None:
            self.session.__exit__(kind, error, trace)
        self.close()

    def _joined(
        self,
        given: dict[str, np.ndarray],
        metrics: dict[str, float],
        weight: float,
        samples: float,
        refused: Exception | None,
    ) -> shoal.PushResult:
        names: Names = (tuple(sorted(given)), tuple(sorted(metrics)))
        row = np.array([_checksum(names), weight, refused is not None, samples], np.float64)
        rows = self.group.all_gather(row)
        if rows[:, 2].any():
            raise refused or errors.InvalidGradient(
                f"rank {int(rows[:, 2].argmax())} of the group gave gradients that do not fit; nothing was pushed"
            )
        pushing = np.flatnonzero(rows[:, 1])
        if len({*rows[pushing, 0]}) > 1:
            raise errors.RanksDisagree(
                f"ranks {', '.join(map(str, pushing))} of the group push gradients, updates or metrics of different "
                "names; nothing was pushed"
            )
        total = float(rows[:, 1].sum())
        if total == 0:
            return self._pushed(lambda session: session.skip())
        if len(pushing) < self.group.ranks:  # those that skip the step do not know what the others push
            names = self._told(names, int(pushing[0]))
        shares = weight / total if weight else 0.0, float(self.group.rank == pushing[-1])
        found, numbers = self._reduced(names, given, metrics, *shares)
        updates = {name: it for name, it in found.items() if not self._variables[name].trainable}
        whole = {name: found.get(name) for name, it in self._variables.items() if it.trainable}
        options: dict[str, Any] = {"weight": total, "metrics": numbers or None, "samples": round(rows[:, 3].sum())}
        return self._pushed(lambda session: session.push(whole, updates=updates or None, **options))

    def _reduced(
        self, names: Names, given: Mapping[str, np.ndarray], metrics: Mapping[str, float], share: float, last: float
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Returns the sum of what all processes add, by name."""
        kinds = [(self._variables[name].shape, self._variables[name].dtype) for name in names[0]]
        packing = Packing([*kinds, ((len(names[1]),), np.dtype(np.float64))])
        flats = packing.empty()
        *arrays, numbers = packing.parts(flats)
        for name, array in zip(names[0], arrays, strict=True):
            factor = {Aggregation.SUM: 1.0, Aggregation.LAST: last}.get(self._variables[name].aggregation, share)
            if name in given and factor:
                np.multiply(given[name], array.dtype.type(factor), out=array)
            else:
                array[...] = 0  # also if this process has NaN
        numbers[...] = [metrics.get(name, 0.0) * share for name in names[1]]
        for flat in filter(len, flats):
            self.group.all_reduce(flat)
        return dict(zip(names[0], arrays, strict=True)), dict(zip(names[1], numbers.tolist(), strict=True))

    def _pushed(self, push: Callable[[shoal.Session], shoal.PushResult]) -> shoal.PushResult:
        def pushed() -> Sequence[int]:
            assert self.session
            result = push(self.session)
            return _OUTCOMES.index(result.outcome), result.staleness, result.step

        self.group.times.steps += 1
        outcome, staleness, self.step = self._led(pushed, 3)
        return shoal.PushResult(_OUTCOMES[outcome], staleness, self.step)

    def _checked(self, arrays: Mapping[str, Any], *, trainable: bool) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, it in arrays.items():
            if it is None:
                continue
            variable, array = self._variables.get(name), on_host(it)
            if variable is None or variable.trainable is not trainable:
                kind = "trainable variable" if trainable else "variable that is not trainable"
                raise errors.InvalidGradient(f"job {self.job} has no {kind} {name}", variable=name)
            if (array.shape, array.dtype) != (variable.shape, variable.dtype):
                raise errors.InvalidGradient(
                    f"the array for variable {name} is {array.dtype}{array.shape}; it must be "
                    f"{variable.dtype}{variable.shape}",
                    variable=name,
                )
            found[name] = array
        return found

    def _agree(self, number: int, what: str) -> None:
        given = self.group.all_gather(np.array(number, np.int64))
        if other := np.flatnonzero(given != given[0]).tolist():
            raise errors.RanksDisagree(f"rank {other[0]} of the group has {what} than rank 0", rank=other[0])

    def _told(self, names: Names, root: int) -> Names:
        first, second = json.loads(bytes_from(self.group, root, json.dumps(names).encode()))
        return tuple(first), tuple(second)

    def _led(self, work: Callable[[], Sequence[int]], count: int) -> list[int]:
        """Does something in the first process, and returns its numbers, or raises its error, in all of them.

        Args:
            work: what the first process does.
            count: how many numbers `work` returns.
        """
        answer, raised = np.zeros(count + 1, np.int64), None
        said = b""
        if self.group.rank == 0:
            try:
                answer[1:] = work()
            except Exception as error:  # the others wait for this process
                answer[0], raised = 1, error
                named = f"rank 0 of the group has raised {type(error).__name__}: {error}"
                told = error if isinstance(error, errors.ShoalError) else errors.InternalError(named)
                said = _rpc.detail_of(told).SerializeToString()
        self.group.broadcast(answer)
        if not answer[0]:
            return [int(it) for it in answer[1:]]
        said = bytes_from(self.group, 0, said)
        raise raised or _rpc.error_of(header_pb2.ErrorDetail.FromString(said))


def _check_weight(weight: float) -> None:
    if not 0 < weight < float("inf"):
        raise errors.BadRequest(f"the weight of a push is {weight}; it must be finite and above 0")


def _checksum(told: object) -> int:
    return zlib.crc32(json.dumps(told).encode())


__all__ = ["GroupSession"]
