"""Trainer of the digits that prints its parameters as a line of JSON before each step."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from digits import PIXELS, Digits

import shoal
from shoal.initializers import HeNormal
from shoal.partitioners import FixedShards


class TransportObserver(Digits):
    """Sets the transport in its trainer's environment before the trainer reads it, and puts a shard on each server.

    Args:
        transport: value of SHOAL_TRANSPORT.
        hidden: as in `Digits`.
    """

    def __init__(self, transport: str, hidden: int) -> None:
        super().__init__(hidden)
        os.environ["SHOAL_TRANSPORT"] = transport

    def variables(self) -> dict[str, shoal.Variable]:
        layer = shoal.Variable((PIXELS, self.hidden), initializer=HeNormal(), partitioner=FixedShards(3))
        return {**super().variables(), "hidden/w": layer}

    def loss_and_gradients(self, params: Mapping[str, Any], batch: Any) -> Any:
        print(json.dumps({"segments": segments(), "ports": ports(), "user": os.getuid()}), flush=True)
        return super().loss_and_gradients(params, batch)


def segments() -> int:
    """Returns the number of segments that this process has mapped, with or without a name."""
    return Path("/proc/self/maps").read_text().count(" /dev/shm/")


def ports() -> list[int]:
    """Returns the ports that this process is connected to."""
    return sorted({found.raddr.port for found in psutil.Process().net_connections("tcp") if len(found.raddr)})
