"""Where the roles of a local cluster are told to listen, without any process."""

import pytest

from shoal import local_cluster
from shoal.local_cluster import LocalCluster


class Role:
    """A role that is ready at once, at ports that it was given or else chose."""

    started: list[list[str]]

    def __init__(self, role, index, flags, **_options):
        self.role, self.index, self.name = role, index, f"{role}-{index}"
        self.started.append(list(flags))
        self.address, self.page = (self.got(flags, it) for it in ("--listen", "--page-listen"))
        self.page = self.page and f"http://{self.page}"
        self.metrics = ""

    @staticmethod
    def got(flags, flag):
        """What it says of where it is: an address that others reach."""
        asked = flags[flags.index(flag) + 1] if flag in flags else ""
        host, _, port = asked.rpartition(":")
        return f"{'127.0.0.1' if host == '0.0.0.0' else host}:{4567 if port == '0' else port}" if asked else ""

    def wait_ready(self, seconds):
        pass

    def kill(self):
        pass

    def reap(self, seconds):
        pass

    def ask_to_stop(self):
        pass


@pytest.fixture
def started(monkeypatch):
    """The flags of each coordinator that was started."""
    flags: list[list[str]] = []
    monkeypatch.setattr(Role, "started", flags, raising=False)
    monkeypatch.setattr(local_cluster, "RoleProcess", Role)
    return flags


def told(flags, flag):
    return flags[flags.index(flag) + 1]


def test_a_coordinator_comes_back_where_it_was_and_listens_as_it_did(started):
    cluster = LocalCluster(0, 0, listen="0.0.0.0:0", page_listen="0.0.0.0:0")
    with cluster:
        assert cluster.page == "http://127.0.0.1:4567"
        cluster.restart("coordinator")
        assert told(started[-1], "--listen") == told(started[-1], "--page-listen") == "0.0.0.0:4567"
        assert cluster.page == "http://127.0.0.1:4567"
    with cluster:
        assert told(started[-1], "--page-listen") == "0.0.0.0:0", "another start takes any port again"


def test_one_without_a_page_comes_back_without(started):
    with LocalCluster(0, 0, page_listen="") as cluster:
        cluster.restart("coordinator")
    assert told(started[-1], "--page-listen") == ""


def test_a_member_comes_back_at_any_port(started):
    with LocalCluster(1, 0) as cluster:
        cluster.restart("server")
        assert told(started[-1], "--listen") == "127.0.0.1:0"
        assert "--page-listen" not in started[-1]
