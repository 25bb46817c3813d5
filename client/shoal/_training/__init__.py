"""A participant of a job: what a pull and a push mean over all servers, what overlaps with computing, what it reports.

Sessions and workers import it. How bytes reach a server is in `shoal._transport`.
"""

from shoal._training.outbox import Outbox
from shoal._training.overlap import Gradients, Pipeline
from shoal._training.parameters import ParameterClient, PushResult
from shoal._training.session_job import cancel, start_or_find
from shoal._training.step_clock import StepClock

__all__ = [
    "Gradients",
    "Outbox",
    "ParameterClient",
    "Pipeline",
    "PushResult",
    "StepClock",
    "cancel",
    "start_or_find",
]
