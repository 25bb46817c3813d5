"""Inputs of replicas: each event arrives at a backup as it was sent, with numbers for tickets and payloads."""

import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors, optim
from shoal._wire import Cursor
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine import events
from shoal_server.shards.machine.replica_inputs import decode, encode
from shoal_server.shards.machine.worker_progress import WorkerProgress

NUMBERS = st.integers(0, (1 << 53) - 1)
RANKS = st.integers(0, (1 << 32) - 1)
FLOATS = st.floats(min_value=0, allow_nan=False)
NAMES = st.text(min_size=1, max_size=8)
SCHEDULES = st.sampled_from(
    [
        optim.ConstantLR(0.1),
        optim.StepLR(0.3, step_size=7, gamma=0.5, warmup_steps=3),
        optim.PiecewiseLR(0.1, boundaries=(3, 9), rates=(0.05, 0.01)),
    ]
)
STRATEGIES: dict[Any, st.SearchStrategy[Any]] = {
    Any: NUMBERS,  # tickets and payloads
    int: NUMBERS,
    str: NAMES,
    bool: st.booleans(),
    float: FLOATS,
    float | None: st.none() | FLOATS,
    Cursor | None: st.none() | st.builds(Cursor, NUMBERS, NUMBERS),
    optim.Schedule: SCHEDULES,
    tuple[float, ...]: st.lists(FLOATS | st.just(math.inf)).map(tuple),
    tuple[int, ...]: st.lists(RANKS).map(tuple),
}
# Events that overwrite values. A group that has a backup has begun, so they cannot happen.
NEVER_SENT = {events.ValuesAssigned, events.ValuesRestored}
KINDS: set[type] = set(get_args(events.LockGroupEvent))


def drawn(kind: type) -> st.SearchStrategy[Any]:
    if kind is events.CutRequested:
        progress = st.builds(WorkerProgress, NUMBERS, NUMBERS, NUMBERS)
        return st.builds(kind, st.dictionaries(NAMES, progress))
    if kind is events.PushStaged:
        weights = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
        rest = (NUMBERS, NUMBERS, weights, NUMBERS, st.none() | NUMBERS)
        return st.builds(kind, NAMES, *rest, STRATEGIES[Cursor | None], STRATEGIES[float | None], st.none() | weights)
    fields = {name: RANKS if name in ("rank", "ahead") else STRATEGIES[it] for name, it in kind.__annotations__.items()}
    return st.builds(kind, **fields)


@given(st.data())
@pytest.mark.parametrize("kind", sorted(KINDS - NEVER_SENT, key=str), ids=lambda kind: kind.__name__)
def test_every_event_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    """A new event has to get a message, or to be listed in NEVER_SENT with the reason."""
    event = data.draw(drawn(kind))
    message = encode(event, 5, gradient_of=lambda payload: payload + 1, ticket_of=lambda ticket: ticket + 2)
    arrived = pb.ReplicaInput.FromString(message.SerializeToString())
    assert arrived.number == 5
    decoded: Any = decode(arrived, payload_of=lambda number: number - 1)
    if hasattr(event, "ticket"):
        assert decoded.ticket == event.ticket + 2
        object.__setattr__(decoded, "ticket", event.ticket)
    assert decoded == event
    if isinstance(event, events.CutRequested):
        assert list(decoded.progress) == list(event.progress), "pushes are committed in this order"


def test_events_have_different_messages() -> None:
    named = {field.name for field in pb.ReplicaInput.DESCRIPTOR.oneofs_by_name["input"].fields}
    assert len(named - {"values_hash", "gradient_dropped"}) == len(KINDS - NEVER_SENT)


@pytest.mark.parametrize("event", [events.ValuesAssigned(), events.ValuesRestored(3, 4)], ids=lambda it: str(it)[:14])
def test_overwritten_values_are_not_sent(event: events.LockGroupEvent) -> None:
    with pytest.raises(errors.BadRequest, match=f"{type(event).__name__} cannot be sent to a backup; overwrite values"):
        encode(event, 1, gradient_of=int, ticket_of=int)


@pytest.mark.parametrize(
    ("message", "what"),
    [(pb.ReplicaInput(number=7), "nothing"), (pb.ReplicaInput(number=7, values_hash=5), "values_hash")],
    ids=["nothing", "values_hash"],
)
def test_a_message_without_an_event_is_refused(message: pb.ReplicaInput, what: str) -> None:
    with pytest.raises(errors.BadRequest, match=f"input 7 of a replica carries {what}, which is no event"):
        decode(message, payload_of=int)


@pytest.mark.parametrize("square", [-1.0, -math.inf, math.nan])
@pytest.mark.parametrize(
    "message",
    [
        pb.ReplicaInput(norm_measured=pb.NormInput()),
        pb.ReplicaInput(norm_received=pb.NormInput(server="s1")),
        pb.ReplicaInput(staged=pb.ReplicaContribution(worker="a")),
    ],
)
def test_squares_that_no_gradient_has_are_refused(message: pb.ReplicaInput, square: float) -> None:
    """The sum of infinite numbers of both signs would end the update of a backup."""
    given = pb.ReplicaInput()
    given.CopyFrom(message)
    if given.HasField("staged"):
        given.staged.squares = square
    else:
        getattr(given, given.WhichOneof("input") or "").squares.append(square)
    with pytest.raises(errors.BadRequest, match="sum of squares"):
        decode(given, lambda _: {})
