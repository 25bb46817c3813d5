"""Entry of a session into its job."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from shoal import _tracing
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._session.inputs import Inputs, state_of, variables_of
from shoal._session.open_sessions import naming_own, own_in
from shoal._session.places import enter_when_free
from shoal._session.waits import entry_detail
from shoal._system.waits import wait_notice
from shoal._training import Pipeline, cancel, start_or_find
from shoal._training.participant import Participant
from shoal.v1 import coordinator_pb2
from shoal.variables import Variable

_LOG = logging.getLogger("shoal")

# Largest number of variables that a warning names.
_MAX_NAMED = 5
_FOR_ITS_NAME = "for its name, which a process that has died holds until it is declared lost"


@dataclass(frozen=True, slots=True)
class SessionPart:
    """A session's part in a job.

    Attributes:
        participant: its calls to the coordinator.
        membership: its membership of the cluster, with its heartbeats.
        parameters: its pulls and pushes.
        inputs: converts the arguments of its pushes.
    """

    participant: Participant
    membership: MembershipClient
    parameters: Pipeline
    inputs: Inputs


@contextmanager
def entering(
    coordinator: CoordinatorClient,
    job: str,
    worker: str,
    variables: Any,
    options: Mapping[str, Any],
    live_as: Callable[[int], None],
    optimizer_state: Any = None,
) -> Iterator[SessionPart]:
    """Starts or joins a job, and waits until it has all its sessions and the variables are placed.

    An error, or Ctrl-C, until the end of the block undoes the entry: the session leaves the job.

    Args:
        coordinator, job, variables, options: see `shoal.Session`.
        worker: member id.
        live_as: called with each incarnation of the member, on the heartbeat thread.
        optimizer_state: see `Client.session`.

    Yields:
        The session's part in the job.
    """
    described, structure = (None, None) if variables is None else variables_of(variables)
    state = None if optimizer_state is None else state_of(optimizer_state, options, described)
    with naming_own(coordinator, job), _tracing.root("enter", job=job, worker=worker), ExitStack() as opened:
        if start_or_find(coordinator, job, options, starts=described is not None):
            opened.push(lambda _kind, error, _trace: cancel(coordinator, job, worker, error))
        member = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member=worker)
        membership = opened.enter_context(MembershipClient(coordinator, member, on_incarnation=live_as, attends=True))
        with wait_notice(f"session {worker} (job {job})", lambda: _FOR_ITS_NAME):
            membership.start()
        own, presented = (job, worker, membership.incarnation), membership.credentials_in(job)
        participant = Participant(coordinator, *own, credentials=presented)

        def admitted() -> Pipeline:
            if described is not None:
                participant.describe(described, samples=0, state=state)
            return participant.enter()

        with wait_notice(f"session {worker} (job {job})", partial(entry_detail, participant)):
            # A session of this process is alive, and the error, which names it, should not take seconds.
            entered = admitted() if own_in(coordinator, job) else enter_when_free(admitted)
            parameters = opened.enter_context(entered)
        inputs = Inputs(parameters.variables, structure, participant.spec.optimizer)
        if not any(variable.trainable for variable in parameters.variables.values()):
            _LOG.warning(untrainable(job, worker, parameters.variables))
        if note := participant.restore_note():
            _LOG.warning(f"session {worker}: job {job} {note}")
        yield SessionPart(participant, membership, parameters, inputs)
        opened.pop_all()


def untrainable(job: str, worker: str, variables: Mapping[str, Variable]) -> str:
    """Returns the warning of a session whose job has no trainable variable.

    Args:
        job: name of the job.
        worker: member id of the session.
        variables: variables of the job, by name.
    """
    shown = ", ".join(f"{name} is {it.dtype.name}" for name, it in [*variables.items()][:_MAX_NAMED])
    more = f", and {len(variables) - _MAX_NAMED} more" if len(variables) > _MAX_NAMED else ""
    return (
        f"session {worker} (job {job}) has no trainable variable, so its gradients change nothing: {shown}{more}. "
        "A float dtype means trainable: give floats, such as [1.0, 2.0] or np.zeros(2)"
    )


__all__ = ["SessionPart", "entering", "untrainable"]
