"""Wire recordings, replayed to each side: real servers answer with the recorded bytes, and real clients send them.

`tests/golden/make_wire.py` made the recordings. `support.recordings.conversation` describes which fields
are compared and which cannot be.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from support.recordings.cluster_scenario import a_cluster
from support.recordings.conversation import CHECKPOINT, FOLDER, Entry, load, shown
from support.recordings.pinned_cluster import bare_servers, checkpoint_files, fixed_names, pinned_cluster
from support.recordings.playback import Players, Playing
from support.recordings.recorder import Recorder
from support.recordings.server_scenarios import ON_SERVERS
from support.recordings.wire import Wire


def check_same(answers: Sequence[Entry], recorded: Sequence[Entry]) -> None:
    for number, (answer, expected) in enumerate(zip(answers, recorded, strict=True)):
        assert answer == expected, f"entry {number}:\n{shown(answer)}\n\ninstead of\n\n{shown(expected)}"


@pytest.mark.parametrize("name", ON_SERVERS)
def test_servers_answer_as_they_did(name: str, tmp_path: Path) -> None:
    recorded = load(FOLDER / f"{name}.jsonl")
    with bare_servers(ON_SERVERS[name][1], tmp_path) as servers:
        addresses = {f"server-{index}": address for index, address in enumerate(servers.addresses)}
        names = fixed_names() | {address: f"{server}:1" for server, address in addresses.items()}
        with Playing(addresses, names) as client:
            check_same([client.play(entry) for entry in recorded], recorded)


@pytest.mark.parametrize("name", ON_SERVERS)
def test_clients_ask_servers_as_they_did(name: str) -> None:
    check_asked(name, ON_SERVERS[name][0])


def test_a_coordinator_and_its_servers_answer_as_they_did(tmp_path: Path) -> None:
    """The coordinator makes the recorded calls to the servers, which write the same checkpoint."""
    recorded = load(FOLDER / "cluster.jsonl")
    with pinned_cluster(tmp_path) as (coordinator, servers, clock):
        targets = {f"server-{index}": address for index, address in enumerate(servers.addresses)}
        targets["coordinator"] = coordinator.address
        with Recorder(targets, names=fixed_names(), settle=coordinator.settle) as recorder:

            def advance(seconds: float) -> None:
                clock.advance(seconds)
                recorder.advanced(seconds)

            with Playing(recorder.addresses, recorder.names, advance=advance) as client:
                for entry in recorded:
                    if not entry.by_coordinator:  # by itself
                        client.play(entry)
                        recorder.mark()
        check_same(recorder.entries, recorded)
    written = checkpoint_files(tmp_path)
    assert written.keys() == {path.name for path in CHECKPOINT.iterdir()}
    for name, data in written.items():
        assert data == (CHECKPOINT / name).read_bytes(), f"{name} is another one"


def test_users_and_workers_ask_a_coordinator_as_they_did() -> None:
    check_asked("cluster", a_cluster)


def check_asked(name: str, scenario: Callable[[Wire], None]) -> None:
    """Checks that real clients make the recorded calls to servers that give the recorded answers."""
    with Players(load(FOLDER / f"{name}.jsonl"), fixed_names()) as servers, Wire(servers.addresses) as wire:
        failure = None
        try:
            scenario(wire)
        except Exception as error:  # what clients said otherwise explains it
            failure = error
        servers.check()
        if failure:
            raise failure
