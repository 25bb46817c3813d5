"""The optimizer that servers apply: there is one, and its learning rate may be set before the session opens."""

import pytest

from shoal import errors, optim
from shoal_distribute.strategies import JobOptimizer


class Rates:
    """A session that keeps its learning rates."""

    def __init__(self) -> None:
        self.rates: list[float | optim.Schedule] = []

    def set_learning_rate(self, learning_rate: float | optim.Schedule) -> None:
        self.rates.append(learning_rate)


def test_a_job_has_the_first_optimizer_of_its_strategy() -> None:
    job, first, second = JobOptimizer("a reef has", "this reef", "run"), optim.SGD(0.1), optim.SGD(0.1)
    with pytest.raises(errors.InvalidOptimizer, match=r"not made in the scope of this reef; .* before the first run"):
        job.check_adopted(first)
    job.adopt(first)
    job.adopt(first)
    job.check_adopted(first)
    for call in (job.adopt, job.check_adopted):
        with pytest.raises(errors.InvalidOptimizer):
            call(second)
    with pytest.raises(errors.InvalidOptimizer, match="a reef has one optimizer, which the servers apply"):
        job.adopt(second)
    assert job.settings is first


def test_a_rate_that_is_set_early_is_that_of_the_session() -> None:
    job, session = JobOptimizer("a reef has", "this reef", "run"), Rates()
    job.adopt(optim.SGD(0.1))
    assert job.at_start() is job.settings
    job.set_learning_rate(None, 0.5)
    assert job.at_start() == optim.SGD(0.5)
    job.set_learning_rate(session, 0.25)
    assert (session.rates, job.settings) == ([0.25], optim.SGD(0.1))
