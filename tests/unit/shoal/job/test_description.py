"""Descriptions of a job's fields: every field has one, and a new field needs nothing else to be used everywhere."""

import dataclasses
import inspect
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message

import shoal
from shoal import errors
from shoal._job.checks import Number, flag
from shoal._job.codecs import Negated, Scalar
from shoal._job.description import (
    JsonField,
    Option,
    check,
    decode,
    descriptions,
    encode,
    field_metadata,
    labelled_values,
    to_json,
)
from shoal._training import SessionOptions
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.evaluation_policy import EvaluationPolicy
from shoal.job import Job
from shoal.optim import ReduceOnPlateau
from shoal.v1 import job_pb2

WRONG_FLAG: Any = 1
KINDS = [
    (
        Job("m:f", restore="a", checkpoints=CheckpointPolicy(), evaluation=EvaluationPolicy()),
        job_pb2.JobSpec,
    ),
    (CheckpointPolicy(), job_pb2.CheckpointPolicy),
    (EvaluationPolicy(every_steps=1, reduce_on_plateau=ReduceOnPlateau()), job_pb2.EvaluationPolicy),
]


@dataclass(frozen=True)
class Scratch:
    """A job of a few fields."""

    priority: int = field(
        default=3, metadata=field_metadata(Number(1, 9), Option("Priority."), Scalar(zero_is_default=True))
    )
    loud: bool = field(
        default=True,
        metadata=field_metadata(flag, None, Negated("quiet"), json=JsonField("volume", lambda it: 10 * it.loud)),
    )
    hidden: int = field(default=0, metadata=field_metadata(None, None, json=None))


# Fields of a JobSpec that only manifests of checkpoints have: users do not set them.
OF_MANIFESTS = {"learning_rate_set", "plateau_state"}


@pytest.mark.parametrize(("owner", "message"), KINDS)
def test_every_field_of_a_message_is_carried_by_a_field_that_is_described(
    owner: CheckpointPolicy | EvaluationPolicy | Job, message: type[Message]
) -> None:
    carried = {key for name, each in descriptions(type(owner)).items() for key in each.codec.encode(name, owner)}
    assert carried == set(message.DESCRIPTOR.fields_by_name) - OF_MANIFESTS


@pytest.mark.parametrize("owner", [owner for owner, _ in KINDS])
def test_every_field_is_in_the_docstring_of_its_class(owner: CheckpointPolicy | EvaluationPolicy | Job) -> None:
    text = inspect.getdoc(type(owner))
    assert text
    assert [it.name for it in dataclasses.fields(owner) if f"\n    {it.name}: " not in text] == []


def test_a_session_takes_fields_of_a_job_in_their_types() -> None:
    of_job = {it.name: it.type for it in dataclasses.fields(Job)}
    for name, taken in typing.get_type_hints(SessionOptions).items():
        of_field: Any = of_job[name]
        assert taken == of_field | None, name


def test_every_option_of_a_session_is_described() -> None:
    sessions = (Path(__file__).parents[4] / "docs" / "how-to" / "sessions.md").read_text()
    section = sessions.partition("\n## A session\n")[2].partition("\n## ")[0]
    for text in (inspect.getdoc(shoal.Client.session) or "", section):
        assert [name for name in SessionOptions.__annotations__ if f"`{name}`" not in text] == []


def test_a_field_without_a_description_is_found_when_the_class_is_used() -> None:
    @dataclass
    class Bare:
        """One."""

        a: int = 0

    with pytest.raises(TypeError, match="Bare does not describe a; set metadata=field_metadata"):
        descriptions(Bare)


def test_new_field_travels_and_is_in_the_json() -> None:
    assert encode(Scratch(5, loud=False), SimpleNamespace) == SimpleNamespace(priority=5, quiet=True, hidden=0)
    assert decode(Scratch, SimpleNamespace(priority=0, quiet=False, hidden=2)) == {"loud": True, "hidden": 2}
    assert to_json(Scratch()) == {"priority": 3, "volume": 10}


@pytest.mark.parametrize(
    ("wrong", "of", "said"),
    [
        (Scratch(priority=10), "", "priority is 10; it must be a whole number from 1 to 9"),
        (Scratch(loud=WRONG_FLAG), "the scratch", "loud of the scratch is 1; it must be True or False"),
    ],
)
def test_a_new_field_is_checked(wrong: Scratch, of: str, said: str) -> None:
    with pytest.raises(errors.InvalidJob) as refused:
        check(wrong, of)
    assert refused.value.message == said
    assert refused.value.details.keys() <= {"priority", "loud"}
    check(Scratch(), of)


def test_the_page_shows_fields_by_their_labels() -> None:
    assert labelled_values(Scratch()) == [("Priority", 3), ("Loud", 10)]
    assert labelled_values(Job("m:f", workers=2, max_workers=4)) == [
        ("Program", "m:f"),
        ("Workers", "2 (2 to 4)"),
        ("Consistency", "sync"),
        ("Optimizer", "sgd"),
        ("Epochs", 1),
        ("Batch size", 32),
        ("Most steps", "no limit"),
        ("Seed", 0),
    ]
