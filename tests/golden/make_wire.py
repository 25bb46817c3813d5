"""Generator of wire/: the bytes that clients, servers and the coordinator of this tree exchange.

    .venv/bin/python tests/golden/make_wire.py [NAME ...]

Each recording wire/NAME.jsonl is a conversation, one JSON object a line: a gRPC call with its messages and status, a
turn on a lane with its frames, or a step of the coordinator's clock. Bytes are in base64. `server_scenarios.py` and
`cluster_scenario.py` of `tests/support/recordings` define what clients do in each one. `conversation.py` defines the
format, and the fields that a recording cannot hold. wire/checkpoint/ has the files of the checkpoint that "cluster"
takes. `tests/contract/test_wire_recording.py` replays all recordings.

Fixed: the coordinator's clock and id, the tokens and process names that clients draw, all names, values and gradients.
Replaced by stand-ins: addresses, the token of lanes, the machine's boot id, the name and the nonce of each
shared-memory segment, and the version of Shoal. Cleared: the time and the duration of a checkpoint. A second run writes
the same bytes.

Write the recordings again only for a deliberate change of the wire, and read the difference before you commit it.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.recordings.cluster_scenario import a_cluster
from support.recordings.conversation import CHECKPOINT, FOLDER, Entry, write
from support.recordings.pinned_cluster import bare_servers, checkpoint_files, fixed_names, pinned_cluster
from support.recordings.recorder import Recorder
from support.recordings.server_scenarios import ON_SERVERS
from support.recordings.wire import Wire


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


def cluster() -> list[Entry]:
    """What passes between users, a worker, a coordinator and servers, and what the coordinator asks of the servers."""
    with tempfile.TemporaryDirectory() as folder, pinned_cluster(Path(folder)) as (coordinator, servers, clock):
        targets = {f"server-{index}": address for index, address in enumerate(servers.addresses)}
        targets["coordinator"] = coordinator.address
        with Recorder(targets, names=fixed_names(), settle=coordinator.settle) as recorder:

            def advance(seconds: float) -> None:
                clock.advance(seconds)
                recorder.advanced(seconds)

            with Wire(recorder.addresses, recorder.mark, advance) as wire:
                a_cluster(wire)
            recorder.mark()
        CHECKPOINT.mkdir(exist_ok=True)
        for name, data in checkpoint_files(Path(folder)).items():
            (CHECKPOINT / name).write_bytes(data)
        return recorder.entries


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names or (*ON_SERVERS, "cluster"):
        write(FOLDER / f"{name}.jsonl", cluster() if name == "cluster" else on_servers(name))
        print(name, (FOLDER / f"{name}.jsonl").stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
