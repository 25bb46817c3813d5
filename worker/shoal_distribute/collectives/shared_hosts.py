"""Shared memory of hosts: the ranks find out, by trying, which of them can map each other's segments."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal._transport import Segment, SegmentUnavailable, remove_stale
from shoal_distribute.collectives.schedule import hosts_of
from shoal_distribute.collectives.shared_blocks import SEGMENT_BYTES

# Of the description of a segment.
_OFFER_BYTES = 256


def find_hosts(
    gather: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], rank: int, directory: Path
) -> tuple[tuple[tuple[int, ...], ...], list[Segment]]:
    """Divides the ranks into hosts, and maps the memory of this rank's host. All ranks call it.

    Args:
        gather: `Group.all_gather`.
        rank: this rank.
        directory: folder of this rank's segment.

    Returns:
        The ranks of each host (`hosts_of`), and the segments of the ranks of this host, in order. They have no names
        any more, so nothing is left behind, however a rank ends.
    """
    remove_stale(directory)  # of ranks that were killed before all had mapped their segments
    with contextlib.ExitStack() as opened:
        offer = np.zeros(_OFFER_BYTES, np.uint8)
        own = None
        with contextlib.suppress(SegmentUnavailable):
            own = opened.enter_context(Segment.create(SEGMENT_BYTES, directory=directory))
            said = json.dumps({"name": own.name, "nonce": own.nonce.hex()}).encode()
            offer[: len(said)] = np.frombuffer(said, np.uint8)
        mapped = [
            own if other == rank else _mapped(bytes(offered).rstrip(b"\0"), directory)
            for other, offered in enumerate(gather(offer))
        ]
        for segment in mapped:
            if segment:
                opened.push(segment)
        # When this returns, all ranks have mapped what they can.
        hosts = hosts_of(gather(np.array([it is not None for it in mapped], np.uint8)).tolist())
        ours = next(host for host in hosts if rank in host)
        kept = [segment for other in ours if len(ours) > 1 and (segment := mapped[other])]
        if own:
            own.unlink()
        for segment in mapped:
            if segment and segment not in kept:
                segment.close()
        opened.pop_all()
        return hosts, kept


def _mapped(offer: bytes, directory: Path) -> Segment | None:
    """Returns the segment that another rank offers, if this process can map it."""
    try:
        said = json.loads(offer)
        return Segment.open(said["name"], SEGMENT_BYTES, bytes.fromhex(said["nonce"]), directory=directory)
    except (SegmentUnavailable, ValueError, KeyError, TypeError):
        return None


__all__ = ["find_hosts"]
