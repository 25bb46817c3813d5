"""Evaluation in jobs of real processes: all modes, early stopping, best checkpoints, and workers that die."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shoal
from shoal import optim
from shoal._cli.app import app
from shoal.consistency import Consistency
from shoal.events import EvaluationEnded
from shoal.status import Evaluation
from support.clusters.local import ROOT, local_cluster

pytestmark = pytest.mark.cluster

MODES = [shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[shoal.Client]:
    with local_cluster(2, 2, checkpoints=folder) as cluster, cluster.client() as client:
        yield client


def counted(
    mode: Consistency = MODES[0],
    policy: shoal.EvaluationPolicy | None = None,
    *,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> shoal.Job:
    """Returns a job in which 2 workers take 80 steps or a few more."""
    policy = policy or shoal.EvaluationPolicy(every_steps=20, metric="updates", mode="max")
    return shoal.Job(
        "support.programs.evaluated:Counted",
        workers=2,
        consistency=mode,
        optimizer=optim.SGD(1.0),
        settings=settings or {"size": 640},
        batch_size=4,
        evaluation=policy,
        **options,
    )


def evaluations(job: shoal.JobHandle) -> list[Evaluation]:
    return [event.result for event in job.events() if isinstance(event, EvaluationEnded)]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_job_is_evaluated_periodically_and_at_the_end(client: shoal.Client, mode: Consistency) -> None:
    job = client.submit(counted(mode))
    found = evaluations(job)
    result = job.result()
    assert [it.number for it in found] == [*range(1, len(found) + 1)]
    marks = [it.step // 20 for it in found[:-1]]
    assert marks == sorted(set(marks)), "once at each"
    assert len(found) >= 4
    assert result.evaluation == found[-1]
    assert found[-1].values["updates"] == job.pull()["w"][0], "the last one has seen all updates"
    if mode == shoal.Synchronous():
        assert marks == [1, 2, 3, 4][: len(marks)]
        assert all(it.values["updates"] == it.step for it in found[:-1])


def test_best_checkpoint_has_the_evaluated_values(client: shoal.Client, folder: Path) -> None:
    policy = shoal.EvaluationPolicy(every_steps=7, at_end=False, metric="updates", mode="max", checkpoint_best=True)
    keeping = shoal.CheckpointPolicy(every_s=0, keep_last=100, at_end=False)
    job = client.submit(counted(policy=policy, checkpoints=keeping))
    found = evaluations(job)
    checkpoints = shoal.Checkpoints(folder)
    saved = [it for it in checkpoints.list(job.name) if isinstance(it, shoal.Checkpoint)]
    values = sorted(checkpoints.read(str(it))["w"][0] for it in saved)
    assert values == [it.values["updates"] for it in found]


def test_best_checkpoint_is_kept_and_can_be_restored(client: shoal.Client, folder: Path) -> None:
    policy = shoal.EvaluationPolicy(every_steps=20, metric="updates", mode="min", checkpoint_best=True)
    keeping = shoal.CheckpointPolicy(every_s=0, every_steps=10, keep_last=1)
    job = client.submit(counted(policy=policy, checkpoints=keeping))
    first = evaluations(job)[0]
    best, newest = f"{job.name}/best", shoal.Checkpoints(folder).show(job.name)
    assert shoal.Checkpoints(folder).show(best).evaluation == first == job.status().best
    assert newest.step > first.step
    assert len(list(shoal.Checkpoints(folder).list(job.name))) == 2
    again = client.submit(counted(restore=best, partial_restore=True, max_steps=1))
    again.wait(60)
    assert again.pull()["w"][0] == first.values["updates"] + 1


def test_a_rerun_of_a_job_with_restore_auto_goes_on_where_it_was(client: shoal.Client) -> None:
    keeping = shoal.CheckpointPolicy(every_s=0)  # one at the end
    first = client.submit(counted(name="auto", restore="auto", checkpoints=keeping, max_steps=20))
    before = first.wait(60).progress
    assert before.earlier_steps == 0
    again = client.submit(counted(name="auto", restore="auto", checkpoints=keeping))
    progress = again.wait(60).progress
    assert progress.earlier_steps == before.steps
    assert progress.samples == 640, "each sample in one of the two runs"
    assert again.pull()["w"][0] >= 80


def test_missing_best_checkpoint_is_refused(client: shoal.Client) -> None:
    job = client.submit(counted())
    job.wait(60)
    with pytest.raises(shoal.UnknownCheckpoint, match=f"{job.name}/best"):
        client.submit(counted(restore=f"{job.name}/best"))


def test_a_job_that_gets_no_better_stops_early(client: shoal.Client) -> None:
    policy = shoal.EvaluationPolicy(every_steps=5, metric="constant", mode="max", patience=3)
    job = client.submit(counted(policy=policy))
    found = evaluations(job)
    result = job.result()
    assert result.reason == "stopped early: constant was no better than 1 (step 5) in 3 evaluations"
    assert [it.step for it in found[:4]] == [5, 10, 15, 20]
    assert job.pull()["w"][0] <= 25


def test_each_plateau_reduces_the_rate_from_the_next_step_on(client: shoal.Client) -> None:
    reduction = optim.ReduceOnPlateau(0.5, patience=1)
    policy = shoal.EvaluationPolicy(every_steps=5, metric="constant", mode="max", reduce_on_plateau=reduction)
    job = client.submit(counted(policy=policy))
    found = evaluations(job)[:15]  # one at step 80 may be the last, for which not all gradients count
    assert [it.step for it in found] == list(range(5, 76, 5))
    # Evaluations 2 and 3 get no better, then 4 and 5, and so on: the rate is halved at the steps 15, 25, 35, ...
    expected = [sum(0.5 ** max(0, (step - 5) // 10) for step in range(it.step)) for it in found]
    assert [it.values["updates"] for it in found] == expected


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_workers_stop_at_once_when_the_job_stops_early(client: shoal.Client, mode: Consistency) -> None:
    """Workers do not wait for the next evaluation or the next range."""
    policy = shoal.EvaluationPolicy(every_steps=20, at_end=False, metric="constant", mode="max", patience=1)
    settings = {"size": 64_000, "seconds": 0.02}
    job = client.submit(counted(mode, policy, settings=settings, range_size=32_000))
    assert len(evaluations(job)) == 2
    assert job.result().progress.samples < 2 * 4 * 200, "a second or two after it was decided"


@pytest.mark.parametrize("mode", MODES[:2], ids=str)
def test_a_worker_dies_while_it_evaluates(client: shoal.Client, tmp_path: Path, mode: Consistency) -> None:
    settings = {"size": 640, "kill": str(tmp_path / "died")}
    job = client.submit(counted(mode, settings=settings))
    found = evaluations(job)
    assert job.result().evaluation == found[-1]
    assert found[0].number > 1, "the first died with its worker"
    assert found[-1].values["updates"] == job.pull()["w"][0]


def test_others_wait_for_a_long_evaluation_of_a_synchronous_job(client: shoal.Client) -> None:
    """The evaluation takes longer than the heartbeat timeout and the time limit of a call."""
    policy = shoal.EvaluationPolicy(every_steps=40, at_end=False, metric="updates", mode="max")
    job = client.submit(counted(policy=policy, settings={"size": 640, "slow": 2.0}))
    [first, *_] = evaluations(job)
    assert first.seconds >= 6.0
    assert first.values["updates"] == first.step
    assert job.result().progress.samples == 640


def test_program_without_evaluation_fails_with_the_reason(client: shoal.Client) -> None:
    spec = shoal.Job("support.programs.broken:fine", workers=1, evaluation=shoal.EvaluationPolicy())
    with pytest.raises(shoal.JobFailed, match="lacks `held_out` or the method evaluate"):
        client.submit(spec).wait(60)


def test_samples_of_the_evaluation_guide_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test runs the guide's program, its job in Python, and its commands, all unchanged."""
    page = (ROOT / "docs" / "how-to" / "evaluation.md").read_text()
    program, submission, *_ = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    here = re.search(r"`(shoal\.evaluate\(.*?)` does the", page, re.DOTALL)
    assert here, "the page names no function"
    commands = [shlex.split(command) for command in re.findall(r"^shoal (.*)$", page, re.MULTILINE)]
    assert [command[0] for command in commands] == ["submit", "checkpoints", "submit"]
    (tmp_path / "halves.py").write_text(program)
    names: dict[str, Any] = {}
    folder = tmp_path / "checkpoints"
    exec(program, names)
    with (
        shoal.LocalCluster(servers=1, workers=2, path=[tmp_path], checkpoints=folder) as cluster,
        cluster.client() as client,
    ):
        names["client"] = client
        exec(submission, names)
        result = names["result"]
        assert result.best.values["accuracy"] > 0.9
        assert result.reason.startswith("stopped early: accuracy was no better than ")
        assert result.reason in capsys.readouterr().out
        assert shoal.Checkpoints(folder).show(f"{result.job}/best").evaluation == result.best
        assert eval(here[1], names) == pytest.approx(result.evaluation.values, rel=1e-4)
        environment = {"SHOAL_COORDINATOR": cluster.address, "SHOAL_CHECKPOINTS": str(folder)}
        told = [CliRunner().invoke(app, command, env=environment) for command in commands]
        assert [it.exit_code for it in told] == [0, 0, 0], [it.output for it in told]
        best = client.job("halves").status().best
        assert best
        assert f"best evaluation so far: accuracy {best.values['accuracy']:.4g}" in told[1].stdout
        [last] = [it for it in client.jobs() if it.job.restore == "halves/best"]
        assert last.checkpoint
        assert last.checkpoint.step == 6 * 512 // 32, "it went on from there"
