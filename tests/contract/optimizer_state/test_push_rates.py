"""Learning rates that pushes carry, on the wire."""

import math
from typing import Any

import numpy as np
import pytest

from shoal import errors, optim
from shoal._session.inputs import rate_of
from support.clusters.shard_servers import ShardServers

ONES = {"a": np.ones(3), "b": np.ones(2)}
ZEROS = {name: np.zeros_like(it) for name, it in ONES.items()}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_the_next_update_has_the_rate_of_its_push(servers: int, transport: str) -> None:
    optimizer = optim.SGD(1.0, groups=[optim.VariableGroup("b", rate=2.0)])
    with (
        ShardServers(ZEROS, servers=servers, optimizer=optimizer, transport=transport) as it,
        it.worker("me") as worker,
    ):
        for rate, wanted in [(0.5, 0.5), (None, 1.5), (0.0, 1.5), (0.25, 1.75)]:
            worker.pull()
            worker.push(ONES, learning_rate=rate)
            found = worker.pull()
            assert (found["a"].tolist(), found["b"].tolist()) == ([-wanted] * 3, [-2 * wanted] * 2)


@pytest.mark.parametrize("rate", [-0.5, math.inf, math.nan])
def test_servers_refuse_others(rate: float) -> None:
    with ShardServers(ZEROS) as it, it.worker("me") as worker:
        worker.pull()
        with pytest.raises(errors.BadRequest, match=r"a push of me has the learning rate .*; it must be finite"):
            worker.push(ONES, learning_rate=rate)
        assert worker.pull()["a"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("rate", [-1, math.inf, math.nan, "0.1", [0.1], 10**400])
def test_sessions_refuse_others(rate: Any) -> None:
    with pytest.raises(errors.BadRequest, match=r"learning_rate is .*; give a finite number of at least 0"):
        rate_of(rate)
