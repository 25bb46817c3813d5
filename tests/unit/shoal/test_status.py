"""Status of jobs as plain values."""

import math

import pytest

from shoal._display.formatting import format_metrics
from shoal.status import Progress


@pytest.mark.parametrize(
    ("progress", "left"),
    [
        (Progress(samples=250, total_samples=1000, samples_per_s=50.0), 15.0),
        (Progress(samples=1000, total_samples=1000, samples_per_s=50.0), 0.0),
        (Progress(samples=1010, total_samples=1000, samples_per_s=50.0), 0.0),  # some was trained on again
        (Progress(samples=250, total_samples=1000, samples_per_s=50.0, ended=True), 0.0),  # early
        (Progress(ended=True), 0.0),
        (Progress(samples=250, samples_per_s=50.0), None),
        (Progress(total_samples=1000), None),
        (Progress(total_samples=1000, samples_per_s=math.nan), None),
        (Progress(total_samples=1000, samples_per_s=math.inf), None),
    ],
)
def test_the_time_that_is_left_follows_from_the_rate(progress: Progress, left: float | None) -> None:
    assert progress.seconds_left == left


def test_a_few_metrics_are_shown_the_wanted_one_first() -> None:
    values = {f"f{number}": number / 8 for number in range(9)}
    assert format_metrics(values, "f8") == "f8 1, f0 0, f1 0.125, f2 0.25, f3 0.375, f4 0.5, and 3 more"
    assert format_metrics({}) == ""
