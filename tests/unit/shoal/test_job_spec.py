from typing import Any

import pytest

from shoal import errors, optim
from shoal._wire.limits import MAX_STEP
from shoal.consistency import Asynchronous, BoundedStaleness, Consistency, Synchronous
from shoal.evaluation_policy import EvaluationPolicy
from shoal.job import Job
from shoal.v1 import job_pb2, tensor_pb2

PLATEAU = EvaluationPolicy(every_steps=5, reduce_on_plateau=optim.ReduceOnPlateau(0.5, patience=3, relative=False))


@pytest.mark.parametrize(
    "job",
    [
        Job("models.digits:classifier"),
        Job(name="mine"),
        Job(
            "m:f",
            name="a-1",
            workers=4,
            consistency=Synchronous(backup_workers=1),
            optimizer=optim.Adam(1e-3),
            settings={"hidden": 64, "rates": [0.5, None], "deep": {"a": True}},
            epochs=3,
            batch_size=16,
            range_size=64,
            max_steps=100,
            shards=7,
            seed=2**64 - 1,
            wire_dtype="bfloat16",
            overlap=False,
        ),
        Job("m:f", evaluation=PLATEAU),
        Job("m:f", wire_dtype="float16"),
        Job("m:f", replicas=2),
        Job("m:f", replicas=2, min_replicas=1, optimizer=optim.SGD(clip_norm=1.0), shards=1),
        Job("m:f", workers=3, min_workers=2, max_workers=9),
        Job("m:f", consistency=Asynchronous(scale_by_staleness=True)),
        Job("m:f", consistency=BoundedStaleness(4)),
    ],
)
def test_a_job_survives_the_wire(job: Job) -> None:
    assert Job.from_proto(job.to_proto()) == job


def test_missing_field_of_a_message_takes_its_default() -> None:
    message = job_pb2.JobSpec(name="a", program="m:f", workers=1, consistency=Asynchronous().to_proto())
    job = Job.from_proto(message)
    assert (job.epochs, job.batch_size, job.settings) == (1, 32, {})
    assert job.optimizer == Job("m:f").optimizer
    assert (job.wire_dtype, job.overlap) == ("float32", True)


def test_worker_limits_default_to_the_number_of_workers() -> None:
    assert (Job("m:f", workers=3).fewest_workers, Job("m:f", workers=3).most_workers) == (3, 3)
    elastic = Job("m:f", workers=3, min_workers=1, max_workers=5)
    assert (elastic.fewest_workers, elastic.most_workers) == (1, 5)


@pytest.mark.parametrize("numbers", [{"min_workers": 1}, {"max_workers": 1}])
def test_worker_limits_do_not_apply_to_session_jobs(numbers: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidJob, match="do not apply to session jobs"):
        Job(name="mine", **numbers)


def test_a_name_is_drawn_from_the_program() -> None:
    first, second = Job("models.My_Digits2:classifier"), Job("models.My_Digits2:classifier")
    assert first.name.startswith("my-digits2-")
    assert first.name != second.name
    assert Job().name.startswith("session-")
    assert Job("_9:f").name.startswith("job-")
    assert len(Job("m" * 200 + ":f").name) <= 63


def test_settings_are_a_copy() -> None:
    settings = {"hidden": [1]}
    job = Job("m:f", settings=settings)
    settings["hidden"].append(2)
    assert job.settings == {"hidden": [1]}


@pytest.mark.parametrize("name", ["A", "1a", "a_b", "a/b", "a" * 64, "-a", "ä", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(errors.InvalidJob, match="job name"):
        Job("m:f", name=name)


@pytest.mark.parametrize("program", ["m", "m:", ":f", "m.:f", "m:f:g", "m:f()", "a b:f", "../m:f", "m:1"])
def test_bad_programs(program: str) -> None:
    with pytest.raises(errors.InvalidJob, match=r"package\.module:factory"):
        Job(program)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"workers": True}, "workers is True"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"max_steps": -1}, "max_steps"),
        ({"max_steps": MAX_STEP}, f"max_steps is {MAX_STEP}.*the limit MAX_STEP is 2.53"),
        ({"max_steps": 2**64 - 1}, "the limit MAX_STEP"),
        ({"shards": -1}, "shards"),
        ({"replicas": 0}, "replicas is 0; it must be a whole number from 1 to 2"),
        ({"replicas": 3}, "replicas is 3"),
        ({"min_replicas": 2}, r"min_replicas is 2; it must be from 1 to replicas \(1\)"),
        ({"replicas": 2, "min_replicas": 3}, "min_replicas is 3"),
        ({"seed": 2**64}, "seed"),
        ({"batch_size": 32, "range_size": 48}, "multiple of batch_size"),
        ({"workers": 2, "consistency": Synchronous(backup_workers=2)}, "backup workers"),
        (
            {"evaluation": PLATEAU, "optimizer": optim.SGD(optim.StepLR(1, 2))},
            "optimizer has the schedule step",
        ),
        ({"workers": 2, "min_workers": 3}, r"workers is 2; it must be from min_workers \(3\) to max_workers \(2\)"),
        ({"workers": 3, "max_workers": 2}, r"workers is 3; it must be from min_workers \(3\) to max_workers \(2\)"),
        ({"workers": 2, "min_workers": -1}, "min_workers is -1"),
        (
            {"workers": 3, "min_workers": 1, "consistency": Synchronous(backup_workers=1)},
            "1 backup workers are too many for 1",
        ),
        ({"consistency": "sync"}, "consistency"),
        ({"wire_dtype": "float64"}, "wire_dtype is 'float64'; it must be one of float32, bfloat16, float16"),
        ({"wire_dtype": ["bfloat16"]}, "wire_dtype is"),
        ({"overlap": 1}, "overlap is 1; it must be True or False"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"settings": {"x": object()}}, "not JSON"),
        ({"settings": {"x": float("nan")}}, "not JSON"),
        ({"settings": {1: 2}}, "mapping of argument names"),
        ({"settings": [1]}, "mapping of argument names"),
    ],
)
def test_contradictions(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidJob, match=said):
        Job("m:f", **arguments)


def test_settings_have_a_limit() -> None:
    with pytest.raises(errors.LimitExceeded, match="settings are 1048585 bytes of JSON; the limit SETTINGS_BYTES is"):
        Job("m:f", settings={"x": "y" * (1 << 20)})


def test_the_number_of_steps_may_be_the_largest_step() -> None:
    job = Job("m:f", max_steps=MAX_STEP - 1, consistency=BoundedStaleness(MAX_STEP - 1))
    assert Job.from_proto(job.to_proto()) == job


@pytest.mark.parametrize(
    "change",
    [
        {"name": ""},
        {"max_steps": MAX_STEP},
        {"consistency": job_pb2.Consistency(bounded_staleness=job_pb2.BoundedStaleness(bound=MAX_STEP))},
        {"evaluation": job_pb2.EvaluationPolicy(every_steps=MAX_STEP, metric="loss")},
        {"workers": 0},
        {"settings_json": "{"},
        {"settings_json": "[1]"},
        {"settings_json": '{"x": NaN}'},
        {"consistency": job_pb2.Consistency()},
        {"wire_dtype": tensor_pb2.FLOAT32},
        {"wire_dtype": tensor_pb2.INT64},
        {"wire_dtype": 99},
    ],
)
def test_a_message_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    message = Job("m:f").to_proto()
    field: Any
    for field in change:
        message.ClearField(field)
    message.MergeFrom(job_pb2.JobSpec(**change))
    with pytest.raises(errors.InvalidJob):
        Job.from_proto(message)


def test_an_unknown_optimizer_is_refused() -> None:
    message = Job("m:f").to_proto()
    message.optimizer.name = "lion"
    with pytest.raises(errors.InvalidOptimizer):
        Job.from_proto(message)


@pytest.mark.parametrize(
    ("mode", "overlaps"),
    [
        (Synchronous(), False),
        (Synchronous(backup_workers=1), False),
        (Asynchronous(), True),
        (BoundedStaleness(0), False),
        (BoundedStaleness(1), True),
    ],
)
def test_mode_tells_whether_pulls_may_pass_pushes(mode: Consistency, overlaps: bool) -> None:
    assert mode.overlaps is overlaps


@pytest.mark.parametrize(
    ("mode", "needs"),
    [
        (Synchronous(), True),
        (Synchronous(backup_workers=1), False),
        (Asynchronous(), False),
        (BoundedStaleness(0), False),  # gradients are applied one by one
    ],
)
def test_mode_tells_whether_one_paused_worker_blocks_changes(mode: Consistency, needs: bool) -> None:
    assert mode.needs_every_worker is needs
