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
    """Names the transport in its trainer's environment, before that looks there, and lays some of it on each server.

    Args:
        transport: for SHOAL_TRANSPORT.
        hidden: as of the digits.
    """

    def __init__(self, transport: str, hidden: int) -> None:
        super().__init__(hidden)
        os.environ["SHOAL_TRANSPORT"] = transport

    def variables(self) -> dict[str, shoal.Variable]:
        layer = shoal.Variable((PIXELS, self.hidden), initializer=HeNormal(), partitioner=FixedShards(3))
        return {**super().variables(), "hidden/w": layer}

    def loss_and_gradients(self, params: Mapping[str, Any], batch: Any) -> Any:
        print(json.dumps({"segments": segments(), "ports": ports()}), flush=True)
        return super().loss_and_gradients(params, batch)


def segments() -> int:
    """How many segments this process has mapped, with a name or without."""
    return Path("/proc/self/maps").read_text().count(" /dev/shm/")


def ports() -> list[int]:
    """The ports that this process is connected to."""
    return sorted({found.raddr.port for found in psutil.Process().net_connections("tcp") if len(found.raddr)})
