"""Job specification. The client checks a job when it is created, and the coordinator checks it again.

The metadata of each field of `Job` defines its check, its encoding, its option of `shoal submit` and its JSON; see
`shoal._job.description`. The code that runs jobs is elsewhere.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias

from shoal import checkpoint_policy, errors, evaluation_policy, optim
from shoal import consistency as modes
from shoal._job import rules
from shoal._job import settings as settings_
from shoal._job.checks import MOST_STEPS, STEPS, UINT32, UINT64, Instance, Number, OneOf, flag, program_name
from shoal._job.codecs import EncodedElsewhere, Named, Negated, Nested, Scalar, Text
from shoal._job.description import JsonField, Option, OptionGroup, check, decode, encode, field_metadata
from shoal._job.names import advising, draw_name
from shoal.checkpoint_policy import AUTO, JOB_NAME, CheckpointChoice, CheckpointPolicy
from shoal.evaluation_policy import EvaluationPolicy
from shoal.optim import _text as optimizer_text
from shoal.v1 import job_pb2, tensor_pb2

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
WireDtype = Literal["float32", "bfloat16", "float16"]

_WIRE_DTYPES: Mapping[WireDtype, tensor_pb2.DType.ValueType] = {
    "float32": tensor_pb2.DTYPE_UNSPECIFIED,
    "bfloat16": tensor_pb2.BFLOAT16,
    "float16": tensor_pb2.FLOAT16,
}
_MAX_WORKERS, _MAX_REPLICAS = 100_000, 2


class _Restore:
    """The codec of `restore`. Its message also carries `partial_restore`."""

    def encode(self, name: str, owner: "Job") -> Mapping[str, Any]:
        return {name: owner.source.to_proto()} if owner.source else {}

    def decode(self, name: str, message: Any) -> Mapping[str, Any]:
        if not message.HasField(name):
            return {}
        choice = CheckpointChoice.from_proto(getattr(message, name))
        return {name: str(choice), "partial_restore": choice.partial}


def _check_name(_field: str, name: object) -> None:
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise errors.InvalidJob(
            f"job name {name!r} is not 1 to 63 characters of a-z, 0-9 and -, starting with a letter", name=name
        )


def _check_restore(field: str, checkpoint: object) -> None:
    if not isinstance(checkpoint, str):
        raise errors.InvalidJob(f"{field} is {checkpoint!r}; it must be the text JOB, JOB/NUMBER or JOB/best")
    if checkpoint:
        CheckpointChoice.parse(checkpoint)


@advising("shoal.Job", optim.Optimizer.__dataclass_fields__)
@dataclass(frozen=True)
class Job:
    """A training job.

        job = Job("digits:Digits", workers=2, consistency=BoundedStaleness(4), settings={"hidden": 64})

    Args:
        program: `package.module:factory`, which the workers import. "" means that the workers are sessions of users.
        name: 1 to 63 characters of a-z, 0-9 and -, starting with a letter. A name can be used again after its job has
            ended. "" means a name made from the program's name and a random suffix.
        workers: number of workers wanted. The job starts when all of them are available.
        min_workers: number of workers with which the job may start if no more are idle. If workers leave or are lost
            later, the job continues even with fewer than this. 0 means `workers`. Only for jobs with a program.
        max_workers: largest number of workers. Idle workers join a running job, up to this number, if no other job
            waits for them. 0 means `workers`. Only for jobs with a program.
        consistency: the rule that orders the workers' pushes and pulls.
        optimizer: the rule that turns gradients into updates.
        settings: keyword arguments of the factory. They travel as JSON, so tuples arrive as lists.
        epochs: number of passes over the data set.
        batch_size: samples in a step of one worker.
        range_size: samples in one lease, a multiple of batch_size. 0 means that the coordinator chooses.
        max_steps: maximum steps of a worker, including those before the checkpoint of `restore`. 0 means no limit.
        step_timeout_s: if no worker takes a step for this many seconds, the workers that the others wait for are
            restarted. 0 lets Shoal choose.
        shards: number of shards of the variables. 0 lets Shoal choose: one, on one server, if the variables take at
            most 4 MiB and none has a partitioner. Otherwise one to 16 per server: more for larger variables.
        replicas: copies of each shard, on different servers: 1 or 2. With 2, a server may be lost, and the job goes on
            with every update that was acknowledged.
        min_replicas: copies with which the job may begin, 1 to `replicas`; the others follow when servers join. 0 means
            `replicas`.
        seed: seed of the initial values and of the order of the data, 0 to 2^64 - 1.
        wire_dtype: dtype in which values and gradients of trainable float32 variables travel. "bfloat16" and "float16"
            take half the bytes and round every gradient and value; the servers keep and update float32. "bfloat16" has
            the range of float32; "float16" has more precision, but a gradient above 65,504 is rejected as Inf.
        overlap: whether the next pull and the previous push run while the worker computes. The pulled values then lack
            the worker's own last push. Only Asynchronous, and BoundedStaleness with a bound of 1 or more, allow this.
        restore: the checkpoint that the job starts from: "JOB" for the newest one of a job, "JOB/NUMBER", or "JOB/best"
            for the newest one of a best evaluation. The job restores variables, optimizer slots, worker clocks and the
            position in the data. Without `partial_restore`, the job fails if its variables are not those of the
            checkpoint. "" means initial values; "auto" the newest one of this job's name, or else initial values.
        partial_restore: whether to restore only the variables that checkpoint and job both have, for fine-tuning.
        checkpoints: when they are taken and kept. None means every ten minutes and at the end, if storage exists.
        evaluation: when held-out samples are evaluated, and what follows from it. None means no evaluation.

    Raises:
        InvalidJob: an argument is invalid, or two contradict each other. The message says which, and how to fix it.
        TypeError: a job has no argument of this name. The message names the nearest argument, or says that an optimizer
            has it.
    """

    program: str = field(
        default="",
        metadata=field_metadata(program_name, Option("package.module:factory, which the workers import.", ["PROGRAM"])),
    )
    _: KW_ONLY
    name: str = field(
        default="",
        metadata=field_metadata(
            _check_name,
            Option("Name of the job. Default: the program's name and a random suffix."),
            json=JsonField(label=None),
        ),
    )
    workers: int = field(
        default=1,
        metadata=field_metadata(
            Number(1, _MAX_WORKERS),
            Option("Number of workers.", ["--workers", "-w"]),
            json=JsonField(
                "workers_wanted", shown=lambda job: f"{job.workers} ({job.fewest_workers} to {job.most_workers})"
            ),
        ),
    )
    min_workers: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, _MAX_WORKERS),
            Option("Number of workers with which the job may start. 0 means --workers."),
            json=JsonField(value=lambda job: job.fewest_workers, label=None),
        ),
    )
    max_workers: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, _MAX_WORKERS),
            Option("Largest number of workers: idle workers join the running job. 0 means --workers."),
            json=JsonField(value=lambda job: job.most_workers, label=None),
        ),
    )
    consistency: modes.Consistency = field(
        default=modes.Synchronous(),
        metadata=field_metadata(
            Instance(modes.Consistency, "give a mode, such as Synchronous()"),
            Option(
                "Consistency mode: sync, sync:BACKUP_WORKERS, async, async:scaled, or ssp:BOUND.",
                takes=str,
                read=modes.parse,
                default="sync",
            ),
            Nested(modes.from_proto, needed=True),
            json=JsonField(value=lambda job: str(job.consistency)),
        ),
    )
    optimizer: optim.Optimizer = field(
        default=optim.SGD(0.1),
        metadata=field_metadata(
            Instance(optim.Optimizer, "give one of shoal.optim, such as SGD(0.1)"),
            Option(optimizer_text.SYNTAX, takes=str, read=optimizer_text.parse, default="sgd:learning_rate=0.1"),
            Nested(optim.from_proto),
            json=JsonField(value=lambda job: job.optimizer.name),
        ),
    )
    settings: Mapping[str, JSON] = field(
        default_factory=dict,
        metadata=field_metadata(
            None,
            Option(
                "Argument of the factory, as JSON or a string. Repeatable.",
                ["--set"],
                "KEY=VALUE",
                takes=list[str] | None,
                read=settings_.parse,
            ),
            Text("settings_json", settings_.dumped, settings_.loaded),
            json=JsonField(value=lambda job: dict(job.settings), label=None),
        ),
    )
    epochs: int = field(
        default=1,
        metadata=field_metadata(
            Number(1, UINT32), Option("Number of passes over the data set."), Scalar(zero_is_default=True)
        ),
    )
    batch_size: int = field(
        default=32,
        metadata=field_metadata(
            Number(1, UINT32), Option("Number of samples in one step of one worker."), Scalar(zero_is_default=True)
        ),
    )
    range_size: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, UINT32),
            Option("Number of samples in one lease, a multiple of --batch-size. 0 lets Shoal choose."),
            json=JsonField(label=None),
        ),
    )
    max_steps: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, MOST_STEPS, STEPS),
            Option("Maximum steps of a worker, including those before the checkpoint of --from. 0 means no limit."),
            json=JsonField(label="Most steps", shown=lambda job: job.max_steps or "no limit"),
        ),
    )
    step_timeout_s: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, UINT32),
            Option(
                "If no worker takes a step for this many seconds, the workers that the others wait for are restarted. "
                "0 lets Shoal choose.",
                ["--step-timeout"],
            ),
            json=JsonField(label=None),
        ),
    )
    shards: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, UINT32),
            Option(
                "Number of shards of the variables. 0 lets Shoal choose: one shard if the variables have at most 4 "
                "MiB and no partitioner, otherwise one to 16 shards per server (more for larger variables)."
            ),
            json=JsonField(label=None),
        ),
    )
    replicas: int = field(
        default=1,
        metadata=field_metadata(
            Number(1, _MAX_REPLICAS),
            Option("Number of copies of each shard, 1 or 2. With 2, training goes on if a server is lost."),
            Scalar(zero_is_default=True, unset=1),
            json=JsonField(label=None),
        ),
    )
    min_replicas: int = field(
        default=0,
        metadata=field_metadata(
            Number(0, _MAX_REPLICAS),
            Option("Number of copies with which the job may begin. 0 means --replicas."),
            json=JsonField(value=lambda job: job.fewest_replicas, label=None),
        ),
    )
    seed: int = field(
        default=0,
        metadata=field_metadata(Number(0, UINT64), Option("Seed of initial values and of the order of the data.")),
    )
    wire_dtype: WireDtype = field(
        default="float32",
        metadata=field_metadata(
            OneOf(_WIRE_DTYPES),
            Option("Dtype in which trainable float32 values travel. float16 and bfloat16 halve the bytes, but round."),
            Named(_WIRE_DTYPES, "the job's wire dtype is {}; it must be FLOAT16, BFLOAT16, or left out for float32"),
            json=JsonField(label=None),
        ),
    )
    overlap: bool = field(
        default=True,
        metadata=field_metadata(
            flag,
            Option("Runs pull, compute and push one after another, without overlap.", ["--no-overlap"], turns_off=True),
            Negated("no_overlap"),
            json=JsonField(label=None),
        ),
    )
    restore: str = field(
        default="",
        metadata=field_metadata(
            _check_restore,
            Option(
                "Checkpoint to start from: JOB (its newest), JOB/NUMBER, JOB/best, or auto: the newest of --name.",
                ["--from"],
                "CHECKPOINT",
            ),
            _Restore(),
            json=None,
        ),
    )
    partial_restore: bool = field(
        default=False,
        metadata=field_metadata(
            flag,
            Option(
                "With --from: restores only the values of variables that the checkpoint and the job both have.",
                ["--partial-restore"],
            ),
            EncodedElsewhere("restore"),
            json=None,
        ),
    )
    checkpoints: CheckpointPolicy | None = field(
        default=None,
        metadata=field_metadata(
            Instance(CheckpointPolicy, "give a CheckpointPolicy, or None", optional=True, verb="are"),
            OptionGroup(CheckpointPolicy, checkpoint_policy.from_options),
            Nested(CheckpointPolicy.from_proto),
            json=None,
        ),
    )
    evaluation: EvaluationPolicy | None = field(
        default=None,
        metadata=field_metadata(
            Instance(EvaluationPolicy, "give an EvaluationPolicy, or None", optional=True),
            OptionGroup(EvaluationPolicy, evaluation_policy.from_options),
            Nested(EvaluationPolicy.from_proto),
            json=None,
        ),
    )

    def __post_init__(self) -> None:
        if self.restore == AUTO and not self.name:
            raise errors.InvalidJob('restore is "auto", but the job has no name; give it the same name in each run')
        if not self.name and isinstance(self.program, str):
            object.__setattr__(self, "name", draw_name(self.program))
        check(self)
        rules.check_ranges(self)
        rules.check_session(self)
        evaluation_policy.check_schedule(self.evaluation, self.optimizer.schedule)
        rules.check_workers(self)
        rules.check_replicas(self)
        if self.partial_restore and not self.restore:
            raise errors.InvalidJob("partial_restore is set without restore; set restore (--from) to a checkpoint")
        self.consistency.check(self.fewest_workers)
        object.__setattr__(self, "settings", json.loads(settings_.dumped(self.settings)))

    @property
    def is_session(self) -> bool:
        """Whether the job's workers are sessions of users, not daemons that run a program."""
        return not self.program

    @property
    def source(self) -> CheckpointChoice | None:
        """The checkpoint that the job starts from. None means initial values."""
        return CheckpointChoice.parse(self.restore, partial=self.partial_restore) if self.restore else None

    @property
    def fewest_workers(self) -> int:
        """The number of workers that the job needs to start."""
        return self.min_workers or self.workers

    @property
    def most_workers(self) -> int:
        """The largest number of workers of the job."""
        return self.max_workers or self.workers

    @property
    def fewest_replicas(self) -> int:
        """The number of copies with which the job may begin."""
        return self.min_replicas or self.replicas

    def to_proto(self) -> job_pb2.JobSpec:
        """Returns the message that carries this specification."""
        return encode(self, job_pb2.JobSpec)

    @classmethod
    def from_proto(cls, message: job_pb2.JobSpec) -> "Job":
        """Returns the specification that a message carries.

        Raises:
            InvalidJob: the name is missing, or a field is invalid or unknown to this version of Shoal.
            InvalidOptimizer: the optimizer is unknown, or its parameters are out of range.
        """
        if not message.name:
            raise errors.InvalidJob(
                "the job has no name; the client must choose one, so that a repeated request submits the same job"
            )
        return cls(**decode(cls, message))


__all__ = ["JSON", "Job", "WireDtype"]
