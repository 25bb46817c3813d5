"""Decoding of requests. If the bytes are not a message of the method's type, the call ends with BadRequest.

If a decoder raised an error, grpcio would log a traceback and end the call with INTERNAL, as for a defect of the
server. So the decoder returns the error, and `servers` ends the call before its handler runs.
"""

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from shoal import errors
from shoal._rpc.receiving_pool import Hold


class Decoder:
    """The decoder of a method's requests.

    Args:
        decode: the generated decoder.
        method: name of the method, for the message.
    """

    def __init__(self, decode: Callable[[bytes], Any], method: str) -> None:
        self._decode, self._method = decode, method

    def __call__(self, message: bytes) -> Any:
        """Returns the request, or the error."""
        try:
            return self._decode(message)
        except DecodeError as error:
            return errors.BadRequest(f"a request of {self._method} cannot be decoded: {error}")


def decoded(requests: Iterator[Any], end: Callable[[errors.ShoalError], object]) -> Iterator[Any]:
    """Yields the requests of a stream.

    Args:
        requests: what the decoder has returned.
        end: ends the call with an error; called if a request could not be decoded.
    """
    for request in requests:
        if isinstance(request, errors.ShoalError):
            end(request)
            return
        yield request


def holding(hold: Hold | None) -> Hold | None:
    """Returns `hold` for requests that could be decoded; the others do not wait."""
    if hold is None:
        return None
    return lambda request, go_on: None if isinstance(request, errors.ShoalError) else hold(request, go_on)


__all__ = ["Decoder", "decoded", "holding"]
