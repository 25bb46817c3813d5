"""Handlers of the RPCs by which workers enter a job: descriptions, placements, and Join, which waits without a thread.

The description of a program with 10,000 variables takes half a megabyte, and so does the placement. Each is decoded or
encoded once for all workers, not once for each worker, and so is the specification of the job.
"""

import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import grpc

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._wire import Placement, limits
from shoal.v1 import job_pb2 as pb
from shoal.v1 import tensor_pb2
from shoal_coordinator.api.tokens import check_of
from shoal_coordinator.cluster import JobLimits
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.messages import JoinResult, ProgramDescription, digest_of, events, state_code

# Digests of descriptions as they were sent that are remembered at most. A live job needs one, or one for each order.
_REMEMBERED = 4_096
_JOIN_PLACEMENT, _JOIN_SPEC = (pb.JoinReply.DESCRIPTOR.fields_by_name[name].number for name in ("placement", "spec"))


class _Locks:
    """A lock for each key in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _locks
        self._locks: weakref.WeakValueDictionary[bytes, threading.Lock] = weakref.WeakValueDictionary()

    def of(self, key: bytes) -> threading.Lock:
        """Returns the lock of a key, the same one for all threads that have it now."""
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())


class Descriptions:
    """The descriptions of live jobs, by digest, so that the same description is decoded once. Thread-safe.

    Args:
        limits: the limits of jobs.
    """

    def __init__(self, limits: JobLimits = JobLimits()) -> None:  # noqa: B008 - it is immutable
        self._limits = limits
        # Each is held while a description is decoded: other workers of the same job are about to send the same one. The
        # keys have digests of the variables, in the order in which they were sent, and in the order of their names.
        self._decoding = _Locks()
        self._known: weakref.WeakValueDictionary[bytes, ProgramDescription] = weakref.WeakValueDictionary()

    def decode(self, request: pb.DescribeRequest) -> ProgramDescription:
        """Returns the description in a request.

        If another worker of a live job has sent the same description, that object is returned.

        Raises:
            InvalidVariable: a variable is not valid, or described twice.
            LimitExceeded: there are too many variables, or they are too large.
        """
        if len(request.variables) > self._limits.variables:
            problem = f"the program has {len(request.variables)} variables"
            raise catalogue.JOB_VARIABLES.refusal(problem, limit=self._limits.variables)
        key = _digest_as_sent(request)
        with self._decoding.of(key):
            known = self._known.get(key)
            if known is None:
                known = self._decoded(request.variables, request.samples)
                if len(self._known) < _REMEMBERED:  # any order of the variables has a digest of its own
                    self._known[key] = known
        return known

    def plan(self, description: ProgramDescription, plan: Callable[[ProgramDescription], object]) -> None:
        """Calls a function that plans a description's shards, for one caller at a time: the others find the plan."""
        with self._decoding.of(description.digest):
            plan(description)

    def _decoded(self, messages: Sequence[tensor_pb2.Variable], samples: int) -> ProgramDescription:
        digest = digest_of(messages)
        key = digest + samples.to_bytes(8)
        with self._decoding.of(key):
            known = self._known.get(key)
            if known is None:
                _check_names(messages)
                known = ProgramDescription.from_proto(messages, samples, digest)
                self._check_bytes(known)
                self._known[key] = known
        return known

    def _check_bytes(self, description: ProgramDescription) -> None:
        if description.nbytes > self._limits.nbytes:
            problem = f"the variables of the program have {description.nbytes} bytes"
            raise catalogue.JOB_BYTES.refusal(problem, limit=self._limits.nbytes)


class Placements:
    """Encodes placements, each of them once. Thread-safe."""

    def __init__(self) -> None:
        self._encoding = _Locks()  # held while a placement is encoded, so that no other thread does the same

    def encode(self, placement: Placement) -> bytes:
        """Returns the serialized message of a placement."""
        with self._encoding.of(placement.generation.to_bytes(8)):
            return placement.encoded


class JoinHandler:
    """The handler of Join.

    Args:
        coordinator: the shell.
        placements: encodes placements.
    """

    def __init__(self, coordinator: Coordinator, placements: Placements) -> None:
        self._coordinator, self._placements = coordinator, placements
        self.handler = _rpc.Deferred(self.Join, self.hold)

    def hold(self, request: pb.JoinRequest, go_on: Callable[[], None]) -> Callable[[], None]:
        """Lets a call wait until the worker has something to do; see `Coordinator.join`."""
        check = check_of(request)
        if not (0 < request.wait_s < math.inf):  # `Join` checks it
            go_on()
            return lambda: None
        return self._coordinator.join(_event(request), min(request.wait_s, limits.JOIN_WAIT_S), go_on, check)

    @_rpc.servicer
    def Join(self, request: pb.JoinRequest, _: grpc.ServicerContext) -> bytes:
        """Answers a call whose wait is over."""
        check = check_of(request)
        if not (0 <= request.wait_s < math.inf):
            raise errors.BadRequest(
                f"wait_s of Join is {request.wait_s:g} s; it must be 0 or more, and finite (at most "
                f"{limits.JOIN_WAIT_S:g} s are used)",
                wait_s=request.wait_s,
            )
        return self._encode(self._coordinator.handle(_event(request), check), request)

    def _encode(self, joined: JoinResult, request: pb.JoinRequest) -> bytes:
        reply = pb.JoinReply(
            ready=joined.ready,
            rank=joined.rank,
            step=joined.step,
            state=state_code(joined.state),
            assign_values=joined.assign_values,
            restored=sorted(joined.restored),
        )
        if request.wait_s and not joined.ends_wait:  # the worker will ask again
            return reply.SerializeToString()
        encoded = reply.SerializeToString() + _field(_JOIN_SPEC, joined.spec)
        if joined.placement is None or joined.placement.generation == request.generation:
            return encoded
        return encoded + _field(_JOIN_PLACEMENT, self._placements.encode(joined.placement))


def _event(request: pb.JoinRequest) -> events.JoinRequested:
    return events.JoinRequested(
        request.job,
        request.worker,
        request.incarnation,
        request.assigned,
        request.assignment,
        waits=request.wait_s > 0,
    )


def _field(number: int, message: bytes) -> bytes:
    """Returns a message as a field of another serialized message, which may have its fields in any order."""
    length, size = bytearray(), len(message)
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes([number << 3 | 2]) + bytes(length) + message


def _digest_as_sent(request: pb.DescribeRequest) -> bytes:
    """Returns a digest of the variables and the samples in a request.

    It is that of one serialization, which takes a sixth of the time that the variables take one by one (`digest_of`).
    """
    described = pb.DescribeRequest()
    described.CopyFrom(request)
    for field in ("job", "worker", "incarnation", "assignment"):
        described.ClearField(field)
    return hashlib.sha256(described.SerializeToString(deterministic=True)).digest()


def _check_names(messages: Iterable[tensor_pb2.Variable]) -> None:
    seen: set[str] = set()
    for message in messages:
        if message.name in seen:
            raise errors.InvalidVariable(f"variable {message.name!r} is described twice", variable=message.name)
        seen.add(message.name)


__all__ = ["Descriptions", "JoinHandler", "Placements"]
