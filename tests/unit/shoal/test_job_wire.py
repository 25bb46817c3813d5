"""Bytes of a job on the wire and in the store, compared with recorded ones."""

import json
import typing
from pathlib import Path
from unittest import mock

import pytest

from shoal import optim
from shoal.checkpoint_policy import NEVER, CheckpointPolicy
from shoal.consistency import Asynchronous, BoundedStaleness, Synchronous
from shoal.evaluation_policy import EvaluationPolicy
from shoal.job import Job
from shoal.v1 import job_pb2

# Deterministic serializations in hexadecimal, written before the fields of a job had a description.
RECORDED = json.loads((Path(__file__).parents[2] / "golden" / "job_specs.json").read_text())
JOBS = {
    "plain": Job("models.digits:classifier", name="plain"),
    "session": Job(
        name="session", consistency=Asynchronous(scale_by_staleness=True), wire_dtype="float16", overlap=False
    ),
    "all": Job(
        "m:f",
        name="all",
        workers=4,
        min_workers=2,
        max_workers=9,
        consistency=Synchronous(backup_workers=1),
        optimizer=optim.AdamW(optim.CosineLR(1e-3, steps=100, warmup_steps=10), decay_exclude=("*bias",)),
        settings={"hidden": 64, "rates": [0.5, None], "deep": {"a": True}, "text": "ö"},
        epochs=3,
        batch_size=16,
        range_size=64,
        max_steps=100,
        shards=7,
        seed=2**64 - 1,
        wire_dtype="bfloat16",
        overlap=False,
        checkpoints=CheckpointPolicy(every_s=30.5, every_steps=50, at_end=False, keep_last=5, keep_every=10),
        restore="base/7",
        partial_restore=True,
        evaluation=EvaluationPolicy(
            every_steps=50,
            at_end=False,
            metric="accuracy",
            mode="max",
            patience=3,
            min_delta=0.001,
            checkpoint_best=True,
        ),
    ),
    "newest": Job("m:f", name="newest", consistency=BoundedStaleness(4), restore="base", checkpoints=NEVER),
    "best": Job("m:f", name="best", restore="base/best", evaluation=EvaluationPolicy(metric="error", mode="min")),
    "defaults": Job("m:f", name="defaults", checkpoints=CheckpointPolicy(), evaluation=EvaluationPolicy()),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_bytes_of_a_job_are_the_recorded_ones(name: str) -> None:
    assert JOBS[name].to_proto().SerializeToString(deterministic=True).hex() == RECORDED[name]


@pytest.mark.parametrize("name", JOBS)
def test_recorded_bytes_are_read_as_the_job_that_they_were_made_of(name: str) -> None:
    assert Job.from_proto(job_pb2.JobSpec.FromString(bytes.fromhex(RECORDED[name]))) == JOBS[name]


def test_many_jobs_read_the_type_hints_of_each_class_once() -> None:
    with mock.patch.object(typing, "get_type_hints", wraps=typing.get_type_hints) as read:
        for _ in range(20):
            for job in JOBS.values():
                Job.from_proto(job.to_proto())
    seen = [call.args[0] for call in read.call_args_list]
    assert len(seen) == len(set(seen))


def test_each_recording_has_its_job() -> None:
    assert RECORDED.keys() == JOBS.keys()
