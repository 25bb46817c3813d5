"""Groups of tasks in TF_CONFIG: they meet on loopback with a secret of their user, or with certificates."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal import _rpc, errors
from shoal._security import VARIABLES
from shoal._security.certificates import make_certificates
from shoal_distribute.resolver import TFConfigClusterResolver
from shoal_distribute.task_group import open_group


@pytest.fixture
def addresses() -> Iterator[list[str]]:
    reserved = [_rpc.reserve("127.0.0.1", 0) for _ in range(3)]
    yield [f"127.0.0.1:{each.getsockname()[1]}" for each in reserved]
    for each in reserved:
        each.close()


def sums(addresses: list[str], environment: dict[str, str]) -> list[float | BaseException]:
    """Returns the sum of the ranks, as each task gets it, or the error."""
    listed = {"chief": addresses[:1], "worker": addresses[1:]}
    cluster = {kind: of_kind for kind, of_kind in listed.items() if of_kind}
    tasks = [("chief", 0), *(("worker", index) for index in range(len(addresses) - 1))]
    found: list[float | BaseException] = [0.0] * len(tasks)

    def run(place: int) -> None:
        kind, index = tasks[place]
        config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
        try:
            resolver = TFConfigClusterResolver(environment={"TF_CONFIG": config})
            group = open_group(resolver, within_s=20.0, environment=environment)
            assert group
            with group:
                assert group.rank == place
                found[place] = float(group.all_reduce(np.array([10.0**place]))[0])
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_tasks_of_one_user_meet_without_any_setup(addresses: list[str], tmp_path: Path) -> None:
    assert sums(addresses, {"XDG_STATE_HOME": str(tmp_path)}) == [111.0] * 3


def test_tasks_with_certificates_meet(addresses: list[str], tmp_path: Path) -> None:
    make_certificates(tmp_path)
    files = [tmp_path / name for name in ("ca.pem", "server.pem", "server-key.pem")]
    environment = dict(zip(VARIABLES, map(str, files), strict=True))
    assert sums(addresses, environment) == [111.0] * 3


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with _rpc.listen("127.0.0.1", 0) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = sums([address], {"XDG_STATE_HOME": str(tmp_path)})
    assert isinstance(error, errors.PortInUse)
    assert address in str(error)


def test_a_process_alone_needs_no_group() -> None:
    assert open_group(TFConfigClusterResolver(environment={})) is None
