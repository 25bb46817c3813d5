"""`shoal submit`."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from shoal import consistency as modes
from shoal._cli import options
from shoal._cli.follow import follow as follow_job
from shoal._cli.follow import summary
from shoal._cli.output import INTERRUPTED, Output
from shoal._display import records
from shoal.callbacks import Callback
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.client import Client, JobHandle
from shoal.evaluation_policy import EvaluationPolicy, Goal
from shoal.job import Job, Wire


def submit(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="package.module:factory, which the workers import.")
    ],
    name: Annotated[str, typer.Option(help="Of the job. By default drawn from the program's name.")] = "",
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many are wanted.")] = 1,
    min_workers: Annotated[int, typer.Option(help="Enough to start with when no more are idle; 0: all wanted.")] = 0,
    max_workers: Annotated[int, typer.Option(help="Up to so many may join while it runs; 0: those wanted.")] = 0,
    consistency: Annotated[
        str, typer.Option(help="sync, sync:BACKUP_WORKERS, async, async:scaled, or ssp:BOUND.")
    ] = "sync",
    optimizer: Annotated[str, typer.Option(help=options.OPTIMIZER_HELP)] = "sgd:learning_rate=0.1",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Argument of the factory, as JSON or a string; repeatable."),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the data set.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Examples a step, of one worker.")] = 32,
    max_steps: Annotated[int, typer.Option(help="Steps after which a worker stops; 0: no limit.")] = 0,
    shards: Annotated[int, typer.Option(help="How many the variables are cut into; 0: four a server, or fewer.")] = 0,
    seed: Annotated[int, typer.Option(help="Of initial values and of the order of the data.")] = 0,
    wire: Annotated[
        Wire, typer.Option(help="What trainable float32 travels as; a half takes half the bytes, and rounds.")
    ] = "float32",
    in_turn: Annotated[
        bool,
        typer.Option("--in-turn", help="Pull, compute and push in turn, though the mode allows to overlap them."),
    ] = False,
    from_checkpoint: Annotated[
        str,
        typer.Option("--from", metavar="CHECKPOINT", help="Go on from it: JOB (its newest), JOB/NUMBER, or JOB/best."),
    ] = "",
    partial: Annotated[
        bool, typer.Option("--partial", help="With --from: take the values of variables that both have, no more.")
    ] = False,
    checkpoint_s: Annotated[
        float | None, typer.Option(help="Seconds from one checkpoint to the next; 0: none by time. By default 600.")
    ] = None,
    checkpoint_steps: Annotated[int | None, typer.Option(help="Steps from one checkpoint to the next.")] = None,
    no_checkpoint_at_end: Annotated[
        bool, typer.Option("--no-checkpoint-at-end", help="None when all workers are through.")
    ] = False,
    keep: Annotated[int | None, typer.Option(help="So many of the newest checkpoints stay. By default 3.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(help="Checkpoints whose number is a multiple of this stay as well.")
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Steps from one evaluation of the held-out examples to the next."),
    ] = None,
    no_evaluation_at_end: Annotated[
        bool, typer.Option("--no-evaluation-at-end", help="None when all workers are through.")
    ] = False,
    metric: Annotated[
        str | None, typer.Option(help="The figure that says which evaluation is the best. By default loss.")
    ] = None,
    goal: Annotated[
        Goal | None,
        typer.Option(help="Of the metric. By default as its name says: less of a loss, more of an accuracy."),
    ] = None,
    patience: Annotated[
        int | None, typer.Option(help="End after so many evaluations in a row that are no better; 0: never.")
    ] = None,
    least_gain: Annotated[
        float | None, typer.Option(help="By so much one has to be better to count as better.")
    ] = None,
    checkpoint_best: Annotated[
        bool, typer.Option("--checkpoint-best", help="A checkpoint at each that is the best so far: JOB/best.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Watch it to its end, and end as it does. Ctrl-C leaves it running.")
    ] = False,
    tensorboard: options.TensorBoardOption = None,
    coordinator: options.CoordinatorOption = options.DEFAULT_ADDRESS,
    retry_for: options.RetryOption = 20.0,
    as_json: options.JsonOption = False,
) -> None:
    """Starts a job.

    --json prints the job; with --follow then its events, and at last its result.
    """
    with (
        Output(as_json) as out,
        options.tensorboard(tensorboard, waiting=follow) as callbacks,
        Client(coordinator, retry_for_s=retry_for) as client,
    ):
        job = Job(
            program,
            name=name,
            workers=workers,
            min_workers=min_workers,
            max_workers=max_workers,
            consistency=modes.parse(consistency),
            optimizer=options.optimizer(optimizer),
            settings=options.settings(settings or []),
            epochs=epochs,
            batch_size=batch_size,
            max_steps=max_steps,
            shards=shards,
            seed=seed,
            wire=wire,
            overlap=not in_turn,
            checkpoints=_checkpoints(
                every_s=checkpoint_s,
                every_steps=checkpoint_steps,
                at_end=False if no_checkpoint_at_end else None,
                keep_last=keep,
                keep_every=keep_every,
            ),
            restore=from_checkpoint,
            partial_restore=partial,
            evaluation=_evaluation(
                every_steps=evaluate_every,
                at_end=False if no_evaluation_at_end else None,
                metric=metric,
                goal=goal,
                patience=patience,
                least_gain=least_gain,
                checkpoint_best=checkpoint_best or None,
            ),
        )
        handle = client.submit(job)
        if out.as_json:
            out.record(records.job(handle.status()))
        elif not follow:
            out.say(f"submitted {handle.name}; watch it with `shoal logs --follow {handle.name}`", {})
        if follow:
            _follow(handle, out, job, callbacks)


def _checkpoints(**given: Any) -> CheckpointPolicy | None:
    """What was said; None: nothing was."""
    said = _said(given)
    if said.get("every_steps") and "every_s" not in said:
        said["every_s"] = 0.0
    return CheckpointPolicy(**said) if said else None


def _evaluation(**given: Any) -> EvaluationPolicy | None:
    """What was said; None: nothing was, or that there is to be none."""
    said = _said(given)
    return EvaluationPolicy(**said) if said and said != {"at_end": False} else None


def _said(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _follow(handle: JobHandle, out: Output, job: Job, callbacks: Iterable[Callback]) -> None:
    try:
        result = follow_job(handle, out, callbacks)
    except KeyboardInterrupt:
        out.errors.print(f"{handle.name} goes on without you; `shoal cancel {handle.name}` ends it")
        raise typer.Exit(INTERRUPTED) from None
    metric = job.evaluation.metric if job.evaluation else ""
    out.say(summary(result, metric), records.result(result))


__all__ = ["submit"]
