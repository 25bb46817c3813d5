"""A session that sends half of a push, says so, and waits to be killed: half_a_push.py ADDRESS JOB SERVER=METRICS ...

It says "half" once the second server has counted the first chunk of its part, not when it was sent.
"""

import sys
import threading

import numpy as np

import shoal
from scraping import sample
from shoal._layout import Aggregation
from shoal.v1 import parameter_server_pb2 as pb
from waiting import wait_until


def main(address: str, job: str, *pairs: str) -> None:
    pages = dict(pair.split("=", 1) for pair in pairs)
    session = shoal.Client(address).session(job, worker="victim")
    session.pull()
    parameters = session._parameters
    gradients = {name: np.ones(v.shape, v.dtype) for name, v in parameters._placement.variables.items()}
    first, second = parameters._servers

    def requests(server):
        return parameters._requests(server, 1.0, gradients, [Aggregation.TRAINABLE], commit=False)

    def received():
        return sample(pages[second.shards[0].server], "shoal_server_received_bytes_total")

    def half():
        message = next(requests(second))
        yield pb.PushRequest(header=message.header, chunks=message.chunks[:1])
        threading.Event().wait()

    first.stub.Push(requests(first))  # staged whole on one server
    before = received()
    call = second.stub.Push.future(half())
    wait_until(lambda: received() > before, what="the chunk's arrival")
    assert not call.done(), "the server did not wait for the other half"
    print("half", flush=True)
    threading.Event().wait()


main(*sys.argv[1:])
