"""Participant that sends half of a push and waits to be killed: partial_push.py ADDRESS JOB SERVER=METRICS ...

It prints "half" when the second server has counted the first chunk of its part.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from shoal import _rpc
from shoal._training.parameters import ParameterClient, Push
from shoal._training.participant import Participant
from shoal._wire import Aggregation, Placement
from shoal._wire.packing import CompleteArrays
from shoal._wire.transfer import PushPayload
from shoal.v1 import coordinator_pb2, job_pb2, parameter_server_pb2_grpc
from shoal.v1 import parameter_server_pb2 as pb
from support.clusters.presented import as_admin
from support.scraping import sample
from support.waiting import wait_until


def main(address: str, job: str, *pairs: str) -> None:
    pages = dict(pair.split("=", 1) for pair in pairs)
    coordinator = _rpc.CoordinatorClient(address, credentials=as_admin(address))
    member = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member="victim")
    membership = _rpc.MembershipClient(coordinator, member)
    membership.start()
    presented = membership.credentials_in(job)
    entered = Participant(coordinator, job, "victim", membership.incarnation, credentials=presented).enter()
    reply = coordinator.call(coordinator.jobs.GetPlacement, job_pb2.GetPlacementRequest(job=job))
    placement, aggregations = Placement.from_proto(reply), [Aggregation.TRAINABLE]
    parameters = ParameterClient(
        placement,
        worker="victim",
        incarnation=membership.incarnation,
        step=entered.step,
        refresh=lambda: placement,
        credentials=presented,
    )
    pulled = parameters.fetch(parameters.step)
    gradients = {name: np.ones(v.shape, v.dtype) for name, v in placement.variables.items()}
    first, second = parameters.servers.connections
    names = {shard.address: shard.server for shard in placement.shards}

    def stub(link: Any) -> Any:
        return parameter_server_pb2_grpc.ParameterServerStub(_rpc.channel(link.address))

    def requests(link: Any) -> Iterator[pb.PushRequest]:
        load = PushPayload(parameters.servers.packer, link.layout, aggregations, CompleteArrays(gradients))
        push = Push(parameters.step, 1.0, pulled.versions, lambda _: load, aggregations)
        for message in load.requests(parameters.pusher.header(link, push, commit=False)):
            yield pb.PushRequest.FromString(b"".join(message))

    def received() -> float:
        return sample(pages[names[second.address]], "shoal_server_received_bytes_total")

    def half() -> Iterator[pb.PushRequest]:
        messages = requests(second)
        yield next(messages)  # the header
        yield pb.PushRequest(chunks=next(messages).chunks[:1])
        threading.Event().wait()

    stub(first).Push(requests(first), metadata=presented.metadata())  # staged whole on one server
    before = received()
    call = stub(second).Push.future(half(), metadata=presented.metadata())
    wait_until(lambda: received() > before, what="the chunk's arrival")
    assert not call.done(), "the server did not wait for the other half"
    print("half", flush=True)
    threading.Event().wait()


main(*sys.argv[1:])
