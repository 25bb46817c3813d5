"""Writes wire/*.jsonl: what passes between clients, servers and the coordinator of this tree, byte for byte.

    .venv/bin/python tests/golden/make_wire.py [NAME ...]
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from wire_recording import FOLDER, Entry, Recorder, write
from wire_scenarios import ON_SERVERS, Wire, bare_servers, fixed_names


def on_servers(name: str) -> list[Entry]:
    """What passes between clients and parameter servers."""
    scenario, count = ON_SERVERS[name]
    with tempfile.TemporaryDirectory() as folder, bare_servers(count, Path(folder)) as servers:
        targets = {f"server-{index}": address for index, address in enumerate(servers.addresses)}
        lanes = {f"server-{index}": it.offer.address for index, it in enumerate(servers.lanes)}
        with Recorder(targets, lanes, fixed_names()) as recorder, Wire(recorder.addresses, recorder.mark) as wire:
            scenario(wire)
            recorder.mark()
        return recorder.entries


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or ON_SERVERS:
        write(FOLDER / f"{name}.jsonl", on_servers(name))
        print(name, (FOLDER / f"{name}.jsonl").stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
