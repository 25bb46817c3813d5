"""Reports that are merged: counts add up, and each metric is a mean over the pushes that gave it."""

import pytest

from shoal._training.report import Report


def test_a_metric_that_only_some_pushes_give_is_a_mean_over_these() -> None:
    first = Report(accepted=1, values={"loss": 1.0, "score": 8.0})
    others = [Report(accepted=1, values={"loss": 1.0}) for _ in range(30)]
    last = Report(accepted=1, values={"loss": 1.0, "score": 2.0})
    merged = first
    for each in (*others, last):
        merged = merged.merged_with(each)
    assert merged.accepted == 32
    assert merged.values == {"loss": pytest.approx(1.0), "score": pytest.approx(5.0)}


def test_a_metric_is_weighted_by_the_pushes_of_each_report() -> None:
    merged = Report(accepted=3, values={"loss": 1.0}).merged_with(Report(accepted=1, values={"loss": 5.0}))
    assert merged.values == {"loss": pytest.approx(2.0)}


def test_values_of_refused_pushes_count_only_while_there_are_no_others() -> None:
    refused = Report(rejected=1, values={"loss": 9.0})
    assert refused.merged_with(Report(accepted=1, values={"loss": 1.0})).values == {"loss": 1.0}
    assert Report(accepted=1, values={"loss": 1.0}).merged_with(refused).values == {"loss": 1.0}
