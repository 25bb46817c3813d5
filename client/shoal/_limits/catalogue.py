"""The table of all limits. A limit's name is the name of its constant here.

The limits page of the documentation is generated from this table. Other modules take their limits from here. A limit on
what a caller can make grow belongs in this table, not in the module that checks it. A caller is another process. A
limit of a script's own process, such as `max_calls` of a `ClusterCoordinator`, is an argument, or a constant of its
module.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shoal import errors
from shoal._limits.limit import Limit

_COORDINATOR, _SERVER = ("coordinator",), ("server",)
_groups: list[tuple[str, list[Limit]]] = []


def _group(title: str, error: type[errors.ShoalError] = errors.LimitExceeded) -> Callable[..., Limit]:
    """Begins a section of the table, and returns the function that adds limits to it.

    Args:
        title: heading of the section.
        error: class of the errors of these limits, unless a limit names another one.
    """
    members: list[Limit] = []
    _groups.append((title, members))

    def add(name: str, default: int, unit: str, of: str, **options: Any) -> Limit:
        limit = Limit(name=name, default=default, unit=unit, of=of, **{"error": error, **options})
        members.append(limit)
        return limit

    return add


_BY_GRPC = "refused by gRPC with `MESSAGE_TOO_LARGE`"

_add = _group("Messages, headers and fields")
MAX_MESSAGE_BYTES = _add(
    "MAX_MESSAGE_BYTES",
    8 << 20,
    "bytes",
    "a gRPC message, or a frame of a lane",
    roles=(),
    excess=_BY_GRPC,
    error=errors.MessageTooLarge,
)
HEADER_BYTES = _add(
    "HEADER_BYTES",
    16 << 10,
    "bytes",
    "the headers of a gRPC call",
    roles=(),
    excess=_BY_GRPC,
    error=errors.MessageTooLarge,
)
HTTP_HEADER_BYTES = _add(
    "HTTP_HEADER_BYTES",
    16 << 10,
    "bytes",
    "the headers of an HTTP request",
    roles=(),
    excess="answered with status 400",
)
HELLO_BYTES = _add(
    "HELLO_BYTES", 4096, "bytes", "the hello of a lane", roles=(), excess="the connection is closed with `BAD_FRAME`"
)
MAX_TOKEN_BYTES = _add(
    "MAX_TOKEN_BYTES",
    2048,
    "bytes",
    "a token or a ticket",
    roles=(),
    excess="the call is refused with `UNAUTHENTICATED`",
    error=errors.Unauthenticated,
)
BODY_BYTES = _add(
    "BODY_BYTES", 4096, "bytes", "the body of a request to the page", roles=_COORDINATOR, error=errors.MessageTooLarge
)
FIELD_BYTES = _add(
    "FIELD_BYTES",
    256,
    "bytes",
    "a short text of a request: a device, an address, a program's name, a submission's token",
)
SETTINGS_BYTES = _add("SETTINGS_BYTES", 1 << 20, "bytes", "the settings of a job", roles=_COORDINATOR)
DECAY_PATTERNS = _add("DECAY_PATTERNS", 1_000, "patterns", "`decay_exclude` of an optimizer", roles=_COORDINATOR)
OPTIMIZER_GROUPS = _add("OPTIMIZER_GROUPS", 1_000, "groups", "the groups of an optimizer", roles=_COORDINATOR)
PAGE_SIZE = _add("PAGE_SIZE", 1_000, "items", "one page of a list", roles=_COORDINATOR, error=errors.BadRequest)
UNDELIVERED_NORMS = _add(
    "UNDELIVERED_NORMS", 32, "norms", "the undelivered norms in one heartbeat of a server", roles=_COORDINATOR
)
BROKEN_REPLICAS = _add(
    "BROKEN_REPLICAS", 256, "groups", "the broken replicas in one heartbeat of a server", roles=_COORDINATOR
)
CALL_WORKERS = _add("CALL_WORKERS", 1_024, "workers", "one call of the coordinator to a server", roles=_SERVER)

_add = _group("Reports of workers")
MAX_STEP = _add(
    "MAX_STEP", 1 << 53, "steps", "a step, a version or a count, which must be below the limit", error=errors.BadRequest
)
MAX_LEAD = _add(
    "MAX_LEAD",
    1 << 20,
    "steps",
    "a worker's step minus the highest step that its job can have reached: on a server, the step of the furthest "
    "worker; on the coordinator, a step that it computes from reports and the job's run time",
    error=errors.BadRequest,
)
LOG_LINES = _add("LOG_LINES", 1_000, "lines", "the output of a program in one report", roles=_COORDINATOR)
LOG_LINE_BYTES = _add("LOG_LINE_BYTES", 8 << 10, "bytes", "one line of output", roles=_COORDINATOR)
LOG_BYTES = _add("LOG_BYTES", 1 << 20, "bytes", "all output in one report", roles=_COORDINATOR)
METRICS = _add("METRICS", 256, "values", "a report, or an evaluation", roles=_COORDINATOR)
METRIC_NAME_BYTES = _add("METRIC_NAME_BYTES", 256, "bytes", "the name of a value", roles=_COORDINATOR)
STALENESS_BUCKETS = _add(
    "STALENESS_BUCKETS", 1_024, "versions", "the distribution of staleness in one report", roles=_COORDINATOR
)
TIMINGS = _add("TIMINGS", 64, "steps", "the timings in one report", roles=_COORDINATOR)

_OLDEST_DROPPED = "the oldest events are dropped"
_add = _group("Event logs of jobs, in the coordinator's memory")
JOB_EVENTS = _add(
    "JOB_EVENTS",
    20_000,
    "events",
    "the log lines and metrics of a job; also its states, checkpoints and evaluations",
    roles=(),
    excess=_OLDEST_DROPPED,
)
JOB_EVENT_BYTES = _add(  # about 12,000 reports with a few metrics; one may have 64 KiB of names
    "JOB_EVENT_BYTES", 16 << 20, "bytes", "the log lines and metrics of a job", roles=(), excess=_OLDEST_DROPPED
)
JOB_OUTPUT_BYTES = _add(  # leaves room for metrics
    "JOB_OUTPUT_BYTES", 8 << 20, "bytes", "the text of the log lines of a job", roles=(), excess=_OLDEST_DROPPED
)
JOB_STORED_EVENT_BYTES = _add(  # about 8,000 changes of state with short reasons
    "JOB_STORED_EVENT_BYTES",
    4 << 20,
    "bytes",
    "the states, checkpoints and evaluations in the log of a job",
    roles=(),
    excess=_OLDEST_DROPPED,
)
EVENT_BYTES = _add(
    "EVENT_BYTES",
    0,
    "bytes",
    "the events of all jobs",
    roles=(),
    excess="the oldest events of the largest logs are dropped, log lines and metrics first",
    shown="an eighth of the memory limit of the container or the machine",
)

_add = _group("Tensors and jobs")
TENSOR_RANK = _add("TENSOR_RANK", 32, "dimensions", "the shape of a variable")
TENSOR_ELEMENTS = _add("TENSOR_ELEMENTS", 1 << 39, "elements", "a variable")
TENSOR_BYTES = _add("TENSOR_BYTES", 1 << 40, "bytes", "a variable")
JOB_VARIABLES = _add("JOB_VARIABLES", 100_000, "variables", "a job", roles=_COORDINATOR, option="--max-job-variables")
JOB_BYTES = _add("JOB_BYTES", 16 << 40, "bytes", "all variables of a job", roles=_COORDINATOR, option="--max-job-bytes")
MAX_SAMPLES = _add("MAX_SAMPLES", 1 << 48, "samples", "an epoch of a job", roles=_COORDINATOR)
SHARD_BYTES = _add(
    "SHARD_BYTES",
    0,
    "bytes",
    "all values and slots on a server",
    roles=_SERVER,
    option="--max-shard-bytes",
    shown="80% of the memory limit of the container or the machine",
)
MAX_LIVE_JOBS = _add(
    "MAX_LIVE_JOBS",
    1_000,
    "jobs",
    "all jobs that have not ended",
    roles=_COORDINATOR,
    option="--max-jobs",
    error=errors.Overloaded,
)
SUBMITTER_JOBS = _add(
    "SUBMITTER_JOBS",
    500,
    "jobs",
    "the jobs of one submitter that have not ended",
    roles=_COORDINATOR,
    option="--max-submitter-jobs",
    error=errors.Overloaded,
)
SUBMITTER_JOB_BYTES = _add(
    "SUBMITTER_JOB_BYTES",
    64 << 20,
    "bytes",
    "the specifications of one submitter's jobs that have not ended",
    roles=_COORDINATOR,
    error=errors.Overloaded,
)
SUBMITTER_VALUE_BYTES = _add(
    "SUBMITTER_VALUE_BYTES",
    1 << 40,
    "bytes",
    "the variables of one submitter's jobs that have not ended",
    roles=_COORDINATOR,
    option="--max-submitter-value-bytes",
    error=errors.Overloaded,
)
MAX_MEMBERS = _add("MAX_MEMBERS", 100_000, "members", "a cluster", roles=_COORDINATOR, error=errors.Overloaded)
HOLDER_MEMBERS = _add(
    "HOLDER_MEMBERS",
    10_000,
    "members",
    "the live members whose tokens or certificates have the same name",
    roles=_COORDINATOR,
    option="--max-holder-members",
    error=errors.Overloaded,
)
MAX_GROUPS = _add(
    "MAX_GROUPS", 1_000, "groups", "a cluster's groups of ranks", roles=_COORDINATOR, error=errors.Overloaded
)
SUBMITTER_GROUPS = _add(
    "SUBMITTER_GROUPS",
    500,
    "groups",
    "the groups of ranks of one submitter",
    roles=_COORDINATOR,
    error=errors.Overloaded,
)
GROUP_RANKS = _add("GROUP_RANKS", 256, "ranks", "a group of ranks", roles=_COORDINATOR)
GROUP_WAITING = _add(
    "GROUP_WAITING",
    512,
    "processes",
    "the processes that wait for the next generation of a group",
    roles=_COORDINATOR,
    error=errors.Overloaded,
)
MAX_TOKENS = _add("MAX_TOKENS", 10_000, "tokens", "a cluster's tokens that have not expired", roles=_COORDINATOR)
MAX_REVOCATIONS = _add(
    "MAX_REVOCATIONS",
    10_000,
    "revocations",
    "a cluster's revoked certificates and revoked tokens of access files",
    roles=_COORDINATOR,
)

_add = _group("Calls", errors.Overloaded)
MESSAGE_S = _add(
    "MESSAGE_S", 10, "seconds", "the time from a call's headers to its first message", error=errors.DeadlineExceeded
)
_APART = "registrations, heartbeats and health checks are counted separately"
CALLS = _add("CALLS", 16_384, "calls", f"all hosts at a time; {_APART}")
HOST_CALLS = _add("HOST_CALLS", 8_192, "calls", f"one host at a time; {_APART}")
OPEN_CALLS = _add("OPEN_CALLS", 512, "calls", "the health checks of all hosts at a time, which need no token")
HOST_OPEN_CALLS = _add("HOST_OPEN_CALLS", 256, "calls", "the health checks of one host at a time")
CONNECTION_CALLS = _add(
    "CONNECTION_CALLS", 1_024, "calls", "one connection at a time", roles=(), excess="the client delays further calls"
)
PENDING_CALLS = _add(
    "PENDING_CALLS",
    8_192,  # a call of each member of a cluster of 4,000, at once; gRPC's own 3,000 refuses calls from 1,000 members on
    "calls",
    "the calls of one method whose headers the process has received, but which it has not begun to handle",
    roles=(),
    excess="gRPC cancels all calls above the limit, and some above half of it; the client repeats them",
)
RECEIVED_BYTES = _add(
    "RECEIVED_BYTES",
    0,
    "bytes",
    "the received messages that wait for a thread",
    shown="an eighth of the memory limit of the container or the machine",
)
MEMORY_PERCENT = _add(
    "MEMORY_PERCENT",
    90,
    "percent of the memory limit",
    "the memory of the process; beyond it, the process ends calls whose message has not arrived",
)
MAX_WAITING_PULLS = _add("MAX_WAITING_PULLS", 16_384, "pulls", "the waiting pulls of a job on a server", roles=_SERVER)
READER_BYTES = _add(
    "READER_BYTES",
    0,
    "bytes",
    "the values that a server is sending to pulls; an update copies such values",
    roles=_SERVER,
    option="--max-reader-bytes",
    shown="25% of the memory limit of the container or the machine",
)
CALLER_READER_BYTES = _add(
    "CALLER_READER_BYTES",
    0,
    "bytes",
    "the values that a server is sending to pulls of one token, certificate or host",
    roles=_SERVER,
    shown="half of `READER_BYTES`",
)
REPLICA_BYTES = _add(
    "REPLICA_BYTES",
    0,
    "bytes",
    "the gradients and inputs that a server keeps for the backups of other servers",
    roles=_SERVER,
    error=errors.LimitExceeded,
    shown="25% of the memory limit of the container or the machine",
)
REPLICA_BACKLOG = _add(
    "REPLICA_BACKLOG",
    65_536,
    "inputs",
    "the inputs of a lock group that its backup has not confirmed; beyond it, pulls and pushes are refused",
    roles=_SERVER,
)
WATCHERS = _add("WATCHERS", 256, "calls", "the calls that watch jobs", roles=_COORDINATOR)
CALLER_WATCHERS = _add("CALLER_WATCHERS", 64, "calls", "the calls of one caller that watch jobs", roles=_COORDINATOR)

_add = _group("Connections", errors.Overloaded)
CONNECTIONS = _add(
    "CONNECTIONS",
    16_384,
    "connections",
    "the gRPC port of a role",
    roles=(),
    excess="closed by gRPC, which cannot limit the connections of one host; `HOST_CALLS` limits its calls",
)
LANES = _add("LANES", 1_024, "lanes", "a server", roles=_SERVER, option="--lanes")
HOST_LANES = _add("HOST_LANES", 768, "lanes", "one host at a server", roles=_SERVER, option="--host-lanes")
PAGE_CONNECTIONS = _add("PAGE_CONNECTIONS", 256, "connections", "the page", roles=_COORDINATOR)
HOST_PAGE_CONNECTIONS = _add("HOST_PAGE_CONNECTIONS", 192, "connections", "one host at the page", roles=_COORDINATOR)
PAGE_STREAMS = _add("PAGE_STREAMS", 64, "streams", "the open pages", roles=_COORDINATOR)
CALLER_PAGE_STREAMS = _add("CALLER_PAGE_STREAMS", 16, "streams", "the open pages of one caller", roles=_COORDINATOR)
PAGE_REQUESTS = _add("PAGE_REQUESTS", 72, "requests", "the page's requests at a time", roles=_COORDINATOR)
PAGE_STORAGE_REQUESTS = _add(
    "PAGE_STORAGE_REQUESTS",
    10,
    "requests",
    "the page's requests to the checkpoint storage at a time",
    roles=_COORDINATOR,
)
PAGE_LOGINS = _add(
    "PAGE_LOGINS", 16, "logins", "a token or certificate at the page", roles=(), excess="the oldest login ends"
)
PAGE_LOGIN_CODES = _add(
    "PAGE_LOGIN_CODES",
    16,
    "links",
    "a token or certificate at the page",
    roles=(),
    excess="the token's oldest link is no longer valid",
)
AUDIT_RECORDS = _add(
    "AUDIT_RECORDS", 4_096, "records", "the audit log's queue", roles=(), excess="the record is lost, and is counted"
)
AUDIT_REFUSALS = _add(
    "AUDIT_REFUSALS",
    20,
    "records",
    "refused calls of one caller, or of all unknown callers, in one second",
    roles=(),
    excess="not recorded, but counted",
)
AUDIT_CALLS = _add(
    "AUDIT_CALLS",
    20,
    "records",
    "permitted calls of one kind, outcome and caller in one second",
    roles=(),
    excess="not recorded, but counted",
)
AUDIT_REPEATS = _add(
    "AUDIT_REPEATS",
    4_096,
    "calls",
    "the calls that a waiting process repeats, of which an audit log has a record of the last hour",
    roles=(),
    excess="the call that was recorded first is recorded again",
)
_REPLACES = "the oldest connection of the host is closed"
HTTP_CONNECTIONS = _add(
    "HTTP_CONNECTIONS", 32, "connections", "the port of `/metrics` and `/healthz`", excess=_REPLACES
)
HOST_HTTP_CONNECTIONS = _add(
    "HOST_HTTP_CONNECTIONS", 16, "connections", "one host at the port of `/metrics`", excess=_REPLACES
)
METRICS_REQUESTS = _add("METRICS_REQUESTS", 8, "requests", "the requests for `/metrics` at a time")

GROUPS: Sequence[tuple[str, Sequence[Limit]]] = tuple(_groups)
LIMITS: tuple[Limit, ...] = tuple(limit for _, members in GROUPS for limit in members)
