"""gRPC calls as raw bytes: a server that answers any method with bytes, and recorded calls."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc

from support.recordings.conversation import Call

ERROR_KEY = "shoal-error-bin"
TIMEOUT_S = 20.0


class RawServer(grpc.GenericRpcHandler):
    """A gRPC server that answers any method with bytes; `with` ends it.

    Args:
        answer: returns the end of a call, given its target's method and requests.
    """

    def __init__(self, answer: Callable[[str, tuple[bytes, ...]], Call]) -> None:
        self._answer = answer
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="raw")
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any]":
        def handler(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._answer(details.method, tuple(requests))
            yield from call.replies
            if call.status != "OK":
                if call.error:
                    context.set_trailing_metadata(((ERROR_KEY, call.error),))
                context.abort(grpc.StatusCode[call.status], call.details)

        return grpc.stream_stream_rpc_method_handler(handler)

    def close(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()


def make_call(channel: grpc.Channel, to: str, method: str, requests: Sequence[bytes]) -> Call:
    """Makes a call and records its end."""
    replies = []
    send: Any = channel.stream_stream(method)
    call = send(iter(requests), timeout=TIMEOUT_S)
    status, details, error = "OK", "", b""
    try:
        replies += call
    except grpc.RpcError:
        status, details = call.code().name, call.details()
        error = dict(call.trailing_metadata() or ()).get(ERROR_KEY, b"")
    return Call(to, method, tuple(requests), tuple(replies), status, details, error)


def make_calls(address: str, requests: Sequence[tuple[str, bytes]]) -> list[Call]:
    """Makes several calls to a coordinator, one after the other, each given by its method and request."""
    with ExitStack() as stack:
        channel = grpc.insecure_channel(address)
        stack.callback(channel.close)
        calls = [make_call(channel, "coordinator", method, [request]) for method, request in requests]
    return [call.rewritten({}) for call in calls]
