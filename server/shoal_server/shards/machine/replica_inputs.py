"""Inputs of replicas: the messages that carry the events of a lock group to its backup.

The primary encodes each event, and the backup decodes it. Tickets and payloads become numbers on the way. This module
is pure.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal._wire import Cursor
from shoal.optim import Schedule
from shoal.v1 import parameter_server_pb2 as server_pb
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine import events
from shoal_server.shards.machine.mode import Contribution, check_rate
from shoal_server.shards.machine.norm_exchange import check_squares
from shoal_server.shards.machine.worker_progress import WorkerProgress

# Returns the number of a payload or of a ticket.
NumberOf = Callable[[Any], int]
# Returns the payload with a number.
PayloadOf = Callable[[int], Any]


def encode(event: events.LockGroupEvent, number: int, gradient_of: NumberOf, ticket_of: NumberOf) -> pb.ReplicaInput:
    """Returns the message that carries an event.

    Args:
        event: the event.
        number: number of the input, from 1.
        gradient_of: returns the number of a payload.
        ticket_of: returns the number of a ticket, from 1.

    Raises:
        BadRequest: the event overwrites values. Only a new copy of the group can have them.
    """
    form = _FORMS.get(type(event))
    if not form:
        raise errors.BadRequest(
            f"a {type(event).__name__} cannot be sent to a backup; overwrite values before the group has one"
        )
    return pb.ReplicaInput(number=number, **{form.field: form.encode(event, gradient_of, ticket_of)})


def decode(message: pb.ReplicaInput, payload_of: PayloadOf) -> events.LockGroupEvent:
    """Returns the event that a message carries. Its tickets are numbers.

    Args:
        message: the message.
        payload_of: returns the payload with a number.

    Raises:
        BadRequest: the message carries no event, or a push that is not valid.
        InvalidOptimizer: a learning rate is not valid.
    """
    field: str = message.WhichOneof("input") or "nothing"
    event_of = _DECODERS.get(field)
    if not event_of:
        raise errors.BadRequest(
            f"input {message.number} of a replica carries {field}, which is no event that this server knows; run one "
            "version of Shoal on all servers"
        )
    return event_of(getattr(message, field), payload_of)


def encode_staged(push: Contribution | events.PushStaged, gradient_of: NumberOf) -> pb.ReplicaContribution:
    """Returns the message that carries a staged push, without its rank.

    Args:
        push: the push.
        gradient_of: returns the number of a payload.
    """
    return pb.ReplicaContribution(
        worker=push.worker,
        incarnation=push.incarnation,
        step=push.step,
        weight=push.weight,
        version=push.version,
        gradient=None if push.payload is None else gradient_of(push.payload),
        cursor=push.cursor.to_proto() if push.cursor else None,
        squares=push.squares,
        learning_rate=push.learning_rate,
    )


def decode_staged(message: pb.ReplicaContribution, payload_of: PayloadOf) -> events.PushStaged:
    """Returns the staged push that a message carries.

    Args:
        message: the message.
        payload_of: returns the payload with a number.

    Raises:
        BadRequest: the weight or the learning rate is not finite, or negative; or the sum of squares is NaN, or
            negative.
    """
    if not 0 <= message.weight < math.inf:
        raise errors.BadRequest(f"a replica has a push of weight {message.weight}; it must be finite and at least 0")
    if message.HasField("squares"):
        check_squares([message.squares], "a push of a replica")
    if message.HasField("learning_rate"):
        check_rate(message.learning_rate, "a push of a replica")
    return events.PushStaged(
        message.worker,
        message.incarnation,
        message.step,
        message.weight,
        message.version,
        payload_of(message.gradient) if message.HasField("gradient") else None,
        Cursor.from_proto(message.cursor) if message.HasField("cursor") else None,
        message.squares if message.HasField("squares") else None,
        message.learning_rate if message.HasField("learning_rate") else None,
    )


def _squares(message: pb.NormInput) -> tuple[float, ...]:
    check_squares(message.squares, "a replica")
    return tuple(message.squares)


def _encode_cut(event: events.CutRequested) -> pb.CutInput:
    message = pb.CutInput()
    for worker, it in event.progress.items():
        message.workers.add(worker=worker, incarnation=it.incarnation, committed=it.committed, finished=it.finished)
    return message


def _decode_cut(message: pb.CutInput) -> events.CutRequested:
    return events.CutRequested(
        {it.worker: WorkerProgress(it.incarnation, it.committed, it.finished) for it in message.workers}
    )


@dataclass(frozen=True, slots=True)
class _Form:
    """How an event is sent.

    Attributes:
        field: name of the field of `ReplicaInput`.
        encode: returns the value of the field.
        decode: returns the event for a value of the field.
    """

    field: str
    encode: Callable[[Any, NumberOf, NumberOf], Any]
    decode: Callable[[Any, PayloadOf], events.LockGroupEvent]


_FORMS: Mapping[type, _Form] = {
    events.WorkerAdmitted: _Form(
        "admitted",
        lambda it, _, __: server_pb.WorkerAdmission(worker=it.worker, incarnation=it.incarnation, rank=it.rank),
        lambda it, _: events.WorkerAdmitted(it.worker, it.incarnation, it.rank),
    ),
    events.WorkerFenced: _Form(
        "fenced",
        lambda it, _, __: server_pb.WorkerFence(worker=it.worker, incarnation=it.incarnation),
        lambda it, _: events.WorkerFenced(it.worker, it.incarnation),
    ),
    events.WorkerReleased: _Form(
        "released",
        lambda it, _, __: server_pb.WorkerRelease(
            worker=it.worker, incarnation=it.incarnation, committed_steps=it.committed_steps
        ),
        lambda it, _: events.WorkerReleased(it.worker, it.incarnation, it.committed_steps),
    ),
    events.PullRequested: _Form(
        "pull",
        lambda it, _, ticket_of: pb.PullInput(
            ticket=ticket_of(it.ticket), worker=it.worker, incarnation=it.incarnation, step=it.step, ahead=it.ahead
        ),
        lambda it, _: events.PullRequested(it.ticket, it.worker, it.incarnation, it.step, it.ahead),
    ),
    events.PullAbandoned: _Form(
        "pull_abandoned",
        lambda it, _, ticket_of: ticket_of(it.ticket),
        lambda ticket, _: events.PullAbandoned(ticket),
    ),
    events.PushOpened: _Form(
        "push_opened",
        lambda it, _, ticket_of: pb.PushOpenedInput(
            ticket=ticket_of(it.ticket), worker=it.worker, incarnation=it.incarnation, step=it.step
        ),
        lambda it, _: events.PushOpened(it.ticket, it.worker, it.incarnation, it.step),
    ),
    events.PushWithdrawn: _Form(
        "push_withdrawn",
        lambda it, _, ticket_of: pb.PushWithdrawnInput(ticket=ticket_of(it.ticket), worker=it.worker),
        lambda it, _: events.PushWithdrawn(it.ticket, it.worker),
    ),
    events.PushStaged: _Form("staged", lambda it, gradient_of, _: encode_staged(it, gradient_of), decode_staged),
    events.PushCommitted: _Form(
        "committed",
        lambda it, _, __: pb.CommitInput(worker=it.worker, incarnation=it.incarnation, step=it.step, defers=it.defers),
        lambda it, _: events.PushCommitted(it.worker, it.incarnation, it.step, it.defers),
    ),
    events.Folded: _Form("folded", lambda it, _, __: it.count, lambda count, _: events.Folded(count)),
    events.FoldsDone: _Form("folds_done", lambda *_: pb.FoldsDoneInput(), lambda *_: events.FoldsDone()),
    events.CallersForgotten: _Form(
        "callers_forgotten", lambda *_: pb.CallersForgottenInput(), lambda *_: events.CallersForgotten()
    ),
    events.NormMeasured: _Form(
        "norm_measured",
        lambda it, _, __: pb.NormInput(squares=it.squares),
        lambda it, _: events.NormMeasured(_squares(it)),
    ),
    events.NormReceived: _Form(
        "norm_received",
        lambda it, _, __: pb.NormInput(server=it.server, step=it.step, squares=it.squares),
        lambda it, _: events.NormReceived(it.server, it.step, _squares(it)),
    ),
    events.CutRequested: _Form("cut", lambda it, _, __: _encode_cut(it), lambda it, _: _decode_cut(it)),
    events.LearningRateSet: _Form(
        "learning_rate",
        lambda it, _, __: it.learning_rate.to_proto(),
        lambda it, _: events.LearningRateSet(Schedule.from_proto(it)),
    ),
    events.GroupSplit: _Form(
        "group_split",
        lambda it, _, __: pb.GroupSplitInput(shards=it.shards, term=it.term),
        lambda it, _: events.GroupSplit(tuple(it.shards), it.term),
    ),
}
_DECODERS = {form.field: form.decode for form in _FORMS.values()}

__all__ = ["NumberOf", "PayloadOf", "decode", "decode_staged", "encode", "encode_staged"]
