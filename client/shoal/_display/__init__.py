"""What people and scripts read: records as JSON, lines of text, progress bars, and event files of TensorBoard.

The command line, callbacks and the coordinator's page import it. It makes no calls.
"""

from shoal._display.formatting import duration, figures, first_line
from shoal._display.progress_bar import ProgressBar
from shoal._display.tensorboard import TensorBoard

__all__ = [
    "ProgressBar",
    "TensorBoard",
    "duration",
    "figures",
    "first_line",
]
