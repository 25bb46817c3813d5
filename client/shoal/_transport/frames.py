"""Kinds of frame between a parameter server and its clients. `parameter_server.proto` has the contract."""

import enum

from shoal._transport.connection import Frames


class Frame(enum.IntEnum):
    """Kind of a frame; see the comment of `LaneHello` in `parameter_server.proto`, from 12 on in `replica.proto`."""

    HELLO = 1
    WELCOME = 2
    PULL = 3
    VALUES = 4
    PUSH = 5
    COMMIT = 6
    PUSHED = 7
    ERROR = 8
    END = 9
    WAIT = 10
    GO = 11
    # Between a primary and its backup; see `replica.proto`.
    REPLICA = 12
    STATE = 13
    SLOTS = 14
    GRADIENT = 15
    INPUTS = 16
    COPIED = 17


PARAMETER_SERVER = Frames(Frame, streamed=(Frame.VALUES, Frame.PUSH, Frame.SLOTS, Frame.GRADIENT))

__all__ = ["PARAMETER_SERVER", "Frame"]
