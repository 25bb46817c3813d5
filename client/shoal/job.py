"""What users submit: a job's specification, checked when it is made and again when the coordinator receives it."""

import json
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from shoal import consistency as modes
from shoal import errors, optim
from shoal.checkpoint_policy import JOB_NAME, CheckpointChoice, CheckpointPolicy
from shoal.evaluation_policy import EvaluationPolicy
from shoal.v1 import job_pb2, tensor_pb2

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Wire = Literal["float32", "bfloat16", "float16"]

_WIRES: Mapping[Wire, tensor_pb2.DType.ValueType] = {
    "float32": tensor_pb2.DTYPE_UNSPECIFIED,
    "bfloat16": tensor_pb2.BFLOAT16,
    "float16": tensor_pb2.FLOAT16,
}
_WIRE_NAMES = {code: name for name, code in _WIRES.items()}
_MAX_SETTINGS_BYTES = 1 << 20
_MAX_WORKERS = 100_000
# The wire's widths.
_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1
# The smallest and the largest value of each number.
_RANGES: Mapping[str, tuple[int, int]] = {
    "workers": (1, _MAX_WORKERS),
    "min_workers": (0, _MAX_WORKERS),
    "max_workers": (0, _MAX_WORKERS),
    "epochs": (1, _UINT32),
    "batch_size": (1, _UINT32),
    "range_size": (0, _UINT32),
    "max_steps": (0, _UINT64),
    "shards": (0, _UINT32),
    "seed": (0, _UINT64),
}


@dataclass(frozen=True)
class Job:
    """A training job.

        job = Job("digits:Digits", workers=2, consistency=BoundedStaleness(4), settings={"hidden": 64})

    Args:
        program: `package.module:factory`, which the workers import. Empty: a job whose workers are sessions of users.
        name: 1 to 63 characters of a-z, 0-9 and -, starting with a letter; may be used again once the job has ended.
            Empty: drawn from the program's name, with a random ending.
        workers: how many are wanted; it starts when all of them are there.
        min_workers: so many are enough to start with when no more are idle; for programs, not for sessions. 0: as many
            as `workers`. It goes on with fewer, should some die or leave.
        max_workers: up to so many may join at any time while it runs, whenever no job waits for them, and stay until
            its end, or until they leave; for programs, not for sessions. 0: as many as `workers`.
        consistency: how their pushes and pulls are ordered.
        optimizer: what turns gradients into updates.
        settings: keyword arguments of the factory; they travel as JSON, so tuples arrive as lists.
        epochs: passes over the data set.
        batch_size: examples a step, of one worker.
        range_size: examples that a worker leases at a time, a multiple of batch_size. 0: the coordinator chooses.
        max_steps: steps after which a worker stops, though data is left. 0: no limit.
        shards: how many the variables are cut into. 0: four a server, or one if they would be smaller than 1 MiB.
        seed: of initial values and of the order of the data.
        wire: what trainable float32 variables travel as, both ways. A half takes half the bytes and rounds every
            gradient and value on its way; the servers keep and update float32. "bfloat16" has the range of float32.
            "float16" is finer and ends at 65,504: a larger gradient is refused as Inf. All other variables travel as
            they are.
        overlap: the next pull and the previous push run while the worker computes, where the consistency mode allows
            it (Asynchronous, and BoundedStaleness with a bound of 1 or more); a worker's values then lack its own
            last push. False: pull, compute and push in turn.
        checkpoints: when they are taken and which are kept. None: every ten minutes and at the end, in a cluster that
            has a folder of checkpoints.
        restore: the checkpoint to begin with, "JOB" for its newest one, "JOB/NUMBER", or "JOB/best" for the newest that
            was taken at its best evaluation. The job goes on from there:
            variables, optimizer slots, clocks, and the place in the data. Variables that only one of the two has are
            an error. Empty: initial values.
        partial_restore: take the values of those variables that both have, and begin anew otherwise: fine-tuning.
        evaluation: when the program's held-out examples are evaluated, and what follows: early stopping, checkpoints of
            the best. None: never.

    Raises:
        InvalidJob: any of these contradicts the above; the message says which and how to mend it.
    """

    program: str = ""
    name: str = field(default="", kw_only=True)
    workers: int = field(default=1, kw_only=True)
    min_workers: int = field(default=0, kw_only=True)
    max_workers: int = field(default=0, kw_only=True)
    consistency: modes.Consistency = field(default=modes.Synchronous(), kw_only=True)
    optimizer: optim.Optimizer = field(default=optim.SGD(0.1), kw_only=True)
    settings: Mapping[str, JSON] = field(default_factory=dict, kw_only=True)
    epochs: int = field(default=1, kw_only=True)
    batch_size: int = field(default=32, kw_only=True)
    range_size: int = field(default=0, kw_only=True)
    max_steps: int = field(default=0, kw_only=True)
    shards: int = field(default=0, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    wire: Wire = field(default="float32", kw_only=True)
    overlap: bool = field(default=True, kw_only=True)
    checkpoints: CheckpointPolicy | None = field(default=None, kw_only=True)
    restore: str = field(default="", kw_only=True)
    partial_restore: bool = field(default=False, kw_only=True)
    evaluation: EvaluationPolicy | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_program(self.program)
        if not self.name:
            object.__setattr__(self, "name", _draw_name(self.program))
        _check_name(self.name)
        for name, (least, most) in _RANGES.items():
            _check_number(name, getattr(self, name), least, most)
        if self.range_size % self.batch_size:
            raise errors.InvalidJob(
                f"range_size is {self.range_size}; it must be a multiple of batch_size ({self.batch_size}), "
                "or 0 to let the coordinator choose",
                range_size=self.range_size,
                batch_size=self.batch_size,
            )
        if not isinstance(self.consistency, modes.Consistency):
            raise errors.InvalidJob(f"consistency is {self.consistency!r}; give a mode, such as Synchronous()")
        if not isinstance(self.optimizer, optim.Optimizer):
            raise errors.InvalidJob(f"optimizer is {self.optimizer!r}; give one of shoal.optim, such as SGD(0.1)")
        _check_wire(self.wire)
        if not isinstance(self.overlap, bool):
            raise errors.InvalidJob(f"overlap is {self.overlap!r}; it must be True or False", overlap=self.overlap)
        if self.checkpoints is not None and not isinstance(self.checkpoints, CheckpointPolicy):
            raise errors.InvalidJob(f"checkpoints are {self.checkpoints!r}; give a CheckpointPolicy, or None")
        self._check_evaluation()
        self._check_restore()
        self._check_workers()
        self.consistency.check(self.fewest_workers)
        # A copy as the factory will get it: later changes to the caller's own do not reach a job.
        object.__setattr__(self, "settings", json.loads(_settings_json(self.settings)))

    @property
    def is_session(self) -> bool:
        """Whether its workers are sessions of users, not daemons that run a program."""
        return not self.program

    @property
    def source(self) -> CheckpointChoice | None:
        """The checkpoint to begin with; None: initial values."""
        return CheckpointChoice.parse(self.restore, partial=self.partial_restore) if self.restore else None

    def _check_evaluation(self) -> None:
        if self.evaluation is not None and not isinstance(self.evaluation, EvaluationPolicy):
            raise errors.InvalidJob(f"evaluation is {self.evaluation!r}; give an EvaluationPolicy, or None")
        if self.evaluation and self.is_session:
            raise errors.InvalidJob("evaluation is for jobs with a program; a session evaluates in its own loop")

    def _check_restore(self) -> None:
        if not isinstance(self.partial_restore, bool):
            raise errors.InvalidJob(f"partial_restore is {self.partial_restore!r}; it must be True or False")
        if self.partial_restore and not self.restore:
            raise errors.InvalidJob("partial_restore without restore; name the checkpoint to take values from")
        if not isinstance(self.restore, str):
            raise errors.InvalidJob(
                f"restore is {self.restore!r}; name a checkpoint as text, JOB, JOB/NUMBER or JOB/best"
            )
        if self.restore:
            CheckpointChoice.parse(self.restore)

    @property
    def fewest_workers(self) -> int:
        """How many it needs to start."""
        return self.min_workers or self.workers

    @property
    def most_workers(self) -> int:
        """How many it may have."""
        return self.max_workers or self.workers

    def _check_workers(self) -> None:
        if self.is_session and (self.min_workers or self.max_workers):
            raise errors.InvalidJob(
                "min_workers and max_workers are for jobs with a program; sessions come and go as their users like",
                min_workers=self.min_workers,
                max_workers=self.max_workers,
            )
        if not self.fewest_workers <= self.workers <= self.most_workers:
            raise errors.InvalidJob(
                f"workers is {self.workers}; it must be from min_workers ({self.fewest_workers}) to max_workers "
                f"({self.most_workers})",
                workers=self.workers,
                min_workers=self.min_workers,
                max_workers=self.max_workers,
            )

    def to_proto(self) -> job_pb2.JobSpec:
        """The message that carries this specification."""
        return job_pb2.JobSpec(
            name=self.name,
            program=self.program,
            settings_json=_settings_json(self.settings),
            workers=self.workers,
            min_workers=self.min_workers,
            max_workers=self.max_workers,
            consistency=self.consistency.to_proto(),
            optimizer=self.optimizer.to_proto(),
            shards=self.shards,
            seed=self.seed,
            epochs=self.epochs,
            batch_size=self.batch_size,
            range_size=self.range_size,
            max_steps=self.max_steps,
            wire=_WIRES[self.wire],
            in_turn=not self.overlap,
            checkpoints=self.checkpoints.to_proto() if self.checkpoints else None,
            restore=self.source.to_proto() if self.source else None,
            evaluation=self.evaluation.to_proto() if self.evaluation else None,
        )

    @classmethod
    def from_proto(cls, message: job_pb2.JobSpec) -> "Job":
        """The specification that a message carries.

        Raises:
            InvalidJob: it has no name, or contradicts itself, or its wire is none of the halves.
            InvalidOptimizer: its optimizer is unknown or out of range.
        """
        if not message.name:
            raise errors.InvalidJob(
                "the job has no name; whoever submits it gives one, so that a retry is the same job"
            )
        if message.wire not in _WIRE_NAMES:
            raise errors.InvalidJob(
                f"the job's wire is {message.wire}; it must be FLOAT16, BFLOAT16, or left out for float32 as it is"
            )
        defaults: dict[str, Any] = {}
        if message.HasField("optimizer"):
            defaults["optimizer"] = optim.from_proto(message.optimizer)
        if message.HasField("checkpoints"):
            defaults["checkpoints"] = CheckpointPolicy.from_proto(message.checkpoints)
        if message.HasField("restore"):
            choice = CheckpointChoice.from_proto(message.restore)
            defaults["restore"], defaults["partial_restore"] = str(choice), choice.partial
        if message.HasField("evaluation"):
            defaults["evaluation"] = EvaluationPolicy.from_proto(message.evaluation)
        return cls(
            message.program,
            name=message.name,
            workers=message.workers,
            min_workers=message.min_workers,
            max_workers=message.max_workers,
            consistency=modes.from_proto(message.consistency),
            settings=_parsed_settings(message.settings_json),
            epochs=message.epochs or 1,
            batch_size=message.batch_size or 32,
            range_size=message.range_size,
            max_steps=message.max_steps,
            shards=message.shards,
            seed=message.seed,
            wire=_WIRE_NAMES[message.wire],
            overlap=not message.in_turn,
            **defaults,
        )


def _draw_name(program: str, draw: Callable[[int], int] = random.getrandbits) -> str:
    module = program.partition(":")[0].rpartition(".")[2].lower()
    stem = "".join(letter if letter in string.ascii_lowercase + string.digits else "-" for letter in module)
    stem = stem.lstrip("-0123456789")[:48].rstrip("-") or ("job" if program else "session")
    return f"{stem}-{draw(24):06x}"


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise errors.InvalidJob(
            f"job name {name!r} is not 1 to 63 characters of a-z, 0-9 and -, starting with a letter", name=name
        )


def _check_program(program: object) -> None:
    if not isinstance(program, str):
        raise errors.InvalidJob(f"program is {program!r}; give its name as text, package.module:factory")
    module, colon, factory = program.partition(":")
    named = bool(colon) and all(part.isidentifier() for part in [*module.split("."), factory])
    if program and not named:
        raise errors.InvalidJob(
            f"program {program!r} does not name a factory; write package.module:factory", program=program
        )


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise errors.InvalidJob(
            f"{name} is {value!r}; it must be a whole number from {least} to {most}", **{name: value}
        )


def _check_wire(wire: object) -> None:
    if not isinstance(wire, str) or wire not in _WIRES:
        raise errors.InvalidJob(f"wire is {wire!r}; it must be one of {', '.join(_WIRES)}", wire=wire)


def _settings_json(settings: object) -> str:
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        raise errors.InvalidJob(f"settings are {settings!r}; give a mapping of argument names to JSON values")
    try:
        text = json.dumps(dict(settings), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise errors.InvalidJob(
            f"settings are not JSON: {error}; use strings, finite numbers, booleans, None, lists and mappings"
        ) from None
    if len(text) > _MAX_SETTINGS_BYTES:
        raise errors.InvalidJob(
            f"settings are {len(text)} bytes of JSON; at most {_MAX_SETTINGS_BYTES} travel with a job, "
            "so put large data where the program can load it",
            bytes=len(text),
        )
    return text


def _parsed_settings(text: str) -> Mapping[str, JSON]:
    try:
        settings = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise errors.InvalidJob(f"settings_json is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise errors.InvalidJob("settings_json is not a JSON object of keyword arguments")
    return settings


__all__ = ["JSON", "Job", "Wire"]
