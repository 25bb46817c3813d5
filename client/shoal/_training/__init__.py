"""A participant's side of a job: pulls and pushes over all servers, their overlap with computing, and reports.

Sessions and workers use this package. `shoal._transport` sends the bytes to servers.
"""

from shoal._training.failover import locate
from shoal._training.failures import failure_at_exit, failure_of, failure_text
from shoal._training.gradient_buffers import GradientBuffers
from shoal._training.outbox import Outbox
from shoal._training.overlap import Gradients, Pipeline
from shoal._training.parameters import ParameterClient, PushResult
from shoal._training.report import Report
from shoal._training.session_job import cancel, member_id, start_or_find
from shoal._training.session_options import SessionOptions, check_options, spelled_out
from shoal._training.step_clock import StepClock
from shoal._training.submission import submit

__all__ = [
    "GradientBuffers",
    "Gradients",
    "Outbox",
    "ParameterClient",
    "Pipeline",
    "PushResult",
    "Report",
    "SessionOptions",
    "StepClock",
    "cancel",
    "check_options",
    "failure_at_exit",
    "failure_of",
    "failure_text",
    "locate",
    "member_id",
    "spelled_out",
    "start_or_find",
    "submit",
]
