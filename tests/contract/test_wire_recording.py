"""The recorded wire, replayed to each side: real servers answer with the recorded bytes, real clients send them.

`tests/golden/make_wire.py` has made the recordings. `wire_recording` says what is compared, and what cannot be.
"""

from collections.abc import Sequence
from contextlib import suppress

import pytest

from shoal.errors import ShoalError
from wire_recording import FOLDER, Entry, Players, Playing, load, shown
from wire_scenarios import ON_SERVERS, Wire, bare_servers, fixed_names


def assert_same(answers: Sequence[Entry], recorded: Sequence[Entry]) -> None:
    for number, (answer, expected) in enumerate(zip(answers, recorded, strict=True)):
        assert answer == expected, f"entry {number}:\n{shown(answer)}\n\ninstead of\n\n{shown(expected)}"


@pytest.mark.parametrize("name", ON_SERVERS)
def test_servers_answer_as_they_did(name, tmp_path):
    recorded = load(FOLDER / f"{name}.jsonl")
    with bare_servers(ON_SERVERS[name][1], tmp_path) as servers:
        addresses = {f"server-{index}": address for index, address in enumerate(servers.addresses)}
        names = fixed_names() | {address: f"{server}:1" for server, address in addresses.items()}
        with Playing(addresses, names) as client:
            assert_same([client.play(entry) for entry in recorded], recorded)


@pytest.mark.parametrize("name", ON_SERVERS)
def test_clients_ask_servers_as_they_did(name, monkeypatch):
    with Players(load(FOLDER / f"{name}.jsonl"), fixed_names()) as servers, Wire(servers.addresses) as wire:
        failure = None
        try:
            ON_SERVERS[name][0](wire)
        except Exception as error:
            failure = error
        servers.check()
        if failure:
            raise failure
