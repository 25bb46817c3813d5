"""Output for people and scripts: JSON records, lines of text, progress bars, and TensorBoard event files.

The command line, callbacks and the coordinator's page import this package. It calls no coordinator or server.
"""

from shoal._display.formatting import (
    counted,
    first_line,
    format_duration,
    format_metrics,
    short_reason,
)
from shoal._display.progress_bar import ProgressBar
from shoal._display.tensorboard import TensorBoard

__all__ = [
    "ProgressBar",
    "TensorBoard",
    "counted",
    "first_line",
    "format_duration",
    "format_metrics",
    "short_reason",
]
