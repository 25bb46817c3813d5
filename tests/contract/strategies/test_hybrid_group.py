"""Hybrid groups of the workers that a resolver lists."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from shoal import _rpc, errors
from shoal_distribute import ClusterSpec, SimpleClusterResolver
from shoal_distribute.strategies.hybrid_group import HybridGroup, open_hybrid_group

HOST = "127.0.0.1"


def reserved(held: ExitStack, following: int = 0) -> str:
    """Returns an address that is free, as is the given number of ports after its port."""
    while True:
        with ExitStack() as candidates:
            port = candidates.enter_context(_rpc.reserve(HOST, 0)).getsockname()[1]
            try:
                for number in range(following):
                    candidates.enter_context(_rpc.reserve(HOST, port + number + 1))
            except OSError:
                continue
            held.push(candidates.pop_all())
            return f"{HOST}:{port}"


def resolver(addresses: list[str], number: int) -> SimpleClusterResolver:
    spec = ClusterSpec({"chief": addresses[:1], "worker": addresses[1:]})
    return SimpleClusterResolver(spec, *(("worker", number - 1) if number else ("chief", 0)))


def test_workers_that_follow_each_other_are_a_group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def worker(number: int) -> tuple[int | None, str, float]:
        made = open_hybrid_group(resolver(addresses, number), 2, coordinator=True)
        assert (made.size, made.workers) == (2, 4)
        assert made.group
        with made.group as group:
            return made.number, made.member_id("job"), float(group.all_reduce(np.array(10.0**number)))

    with ExitStack() as held, ThreadPoolExecutor(4) as pool:
        # The coordinator has the chief's port, so the chief listens for its group at the next one.
        addresses = [reserved(held, following=1), *(reserved(held) for _ in range(3))]
        held.enter_context(_rpc.listen(*_rpc.parse_address(addresses[0])))
        found = list(pool.map(worker, range(4)))
    assert found == [(0, "job-group-0", 11.0)] * 2 + [(1, "job-group-1", 1100.0)] * 2


def test_workers_that_cannot_be_divided_are_refused() -> None:
    addresses = [f"{HOST}:{port}" for port in (1, 2, 3)]
    with pytest.raises(errors.BadRequest, match="3 workers cannot be divided into groups of 2"):
        open_hybrid_group(resolver(addresses, 0), 2, coordinator=False)
    with pytest.raises(errors.BadRequest, match="nothing says where the workers listen"):
        open_hybrid_group(SimpleClusterResolver(ClusterSpec({})), 2, coordinator=False)
    with pytest.raises(errors.BadRequest, match="group_size"):
        open_hybrid_group(resolver(addresses, 0), 0, coordinator=False)
    assert HybridGroup.of(None, 3).member_id("job") == ""
