"""A session that sends half of a push, says so, and waits to be killed: python half_a_push.py ADDRESS JOB."""

import sys
import threading

import numpy as np

import shoal
from shoal._layout import Aggregation
from shoal.v1 import parameter_server_pb2 as pb


def main(address: str, job: str) -> None:
    session = shoal.Client(address).session(job, worker="victim")
    session.pull()
    parameters = session._parameters
    gradients = {name: np.ones(v.shape, v.dtype) for name, v in parameters._placement.variables.items()}
    first, second = parameters._servers

    def requests(server):
        return parameters._requests(server, 1.0, gradients, [Aggregation.TRAINABLE], commit=False)

    first.stub.Push(requests(first))  # staged whole on one server

    def half():
        stream = requests(second)
        message = next(stream)
        yield pb.PushRequest(header=message.header, chunks=message.chunks[:1])
        print("half", flush=True)
        threading.Event().wait()

    second.stub.Push(half())


main(*sys.argv[1:])
