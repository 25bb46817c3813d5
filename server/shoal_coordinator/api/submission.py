"""The handler of Submit, with the checks of a submission that need the checkpoint storage."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc
import structlog

from shoal import _rpc, errors
from shoal._checkpoint import Catalogue, CheckpointStorage
from shoal._security import Principal
from shoal.job import Job
from shoal.v1 import job_pb2 as pb
from shoal_coordinator.api import checks, codecs
from shoal_coordinator.api.callers import submitter_of, submitter_role
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.effects import StorageReads
from shoal_coordinator.messages import events
from shoal_coordinator.submitters import check_checkpoints, check_submission_name, is_submitter

_log = structlog.get_logger(__name__)

# Calls of Submit that run at a time, and seconds that one of them waits for the storage. Their threads are separate: a
# storage that hangs must not delay the calls of workers.
_THREADS, _STORAGE_TIMEOUT_S = 8, 5.0


class SubmitHandler:
    """The handler of Submit.

    Args:
        coordinator: The shell.
        storage: The checkpoint storage. None means that the cluster has none.
        reads: Limits the time that a call waits for the storage.
    """

    def __init__(
        self, coordinator: Coordinator, storage: CheckpointStorage | None, reads: StorageReads | None = None
    ) -> None:
        self._coordinator = coordinator
        self._catalogue = Catalogue(storage) if storage else None
        self._reads = reads or StorageReads(_STORAGE_TIMEOUT_S)
        self._checked = itertools.count(1)  # numbers the accesses, since several calls may submit the same job
        self.handler = _rpc.Pooled(self.Submit, ThreadPoolExecutor(_THREADS, thread_name_prefix="submissions"))

    def close(self) -> None:
        """Waits for the threads. Call it after the coordinator and the server have stopped."""
        self.handler.experimental_thread_pool.shutdown(wait=True)

    @_rpc.servicer
    def Submit(self, request: pb.SubmitRequest, context: grpc.ServicerContext) -> pb.SubmitReply:
        """Checks a job, and submits it."""
        spec = Job.from_proto(request.spec)
        checks.check_submission(spec, request.token)
        self._check_storage(spec, _rpc.caller())
        submitter, role = submitter_of(context), submitter_role()
        submitted = events.JobSubmitted(spec, request.token, submitter, request.spec.ByteSize(), role)
        check = partial(check_submission_name, caller=_rpc.caller(), job=spec.name)
        status = self._coordinator.handle(submitted, check)
        return pb.SubmitReply(status=codecs.job_message(status))

    def _check_storage(self, spec: Job, caller: Principal | None) -> None:
        """Checks that the name of a job is not that of another submitter's checkpoints, and that its source exists.

        The restore checks that the source is readable. If a live job has the name, this call repeats its submission or
        joins it, and needs no checkpoint. If the storage does not answer within 5 s, the check passes: the storage may
        be back when there are workers, and a restore retries for minutes. A commit removes no checkpoint of others.

        Raises:
            Forbidden: Another submitter's job of this name left checkpoints.
            UnknownCheckpoint: The source does not exist.
        """
        catalogue = self._catalogue
        if catalogue is None or (spec.source is None and not is_submitter(caller)):
            return
        with self._coordinator.reading() as (cluster, _now):
            if cluster.listing.is_live(spec.name):
                return
        access, what = f"{spec.name}-{next(self._checked)}", f"the checkpoints in {catalogue.folder.url}"
        try:
            self._reads.run(access, what, partial(_check_checkpoints, catalogue, spec, caller), lambda: True)
        except errors.StorageFailed as error:
            _log.warning(
                "cannot look for checkpoints", job=spec.name, source=str(spec.source or ""), reason=error.message
            )


def _check_checkpoints(catalogue: Catalogue, spec: Job, caller: Principal | None) -> None:
    """Looks in the storage, for `SubmitHandler`."""
    if is_submitter(caller):
        check_checkpoints(caller, spec.name, catalogue.newest_usable(spec.name))
    source = spec.source
    if source is None:
        return
    numbers = catalogue.numbers(source.job)
    there = source.number in numbers if source.number else bool(numbers)
    if source.best:
        there = any(True for _ in catalogue.best(source.job))
    if not there:
        raise catalogue.unknown(str(source))


__all__ = ["SubmitHandler"]
