"""Simulated sessions that wait to enter a job, each with its own heartbeats, and then take one step with real servers.

They use the clients that real sessions use.
"""

import itertools
import threading
import time
from typing import Any

import numpy as np
from members import MembersLine, say

import shoal
from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._security import AccessRole, Credentials
from shoal._training.participant import Participant
from shoal.v1 import coordinator_pb2

JOB = "waits"
PATIENCE_S = 120.0


class Waiter:
    """One session with its heartbeats; it waits for the job, and then makes one step."""

    def __init__(self, address: str, number: int, variables: dict[str, shoal.Variable]) -> None:
        self._variables = variables
        presented = Credentials.find().for_coordinator(address, AccessRole.ADMIN)
        self._client = CoordinatorClient(address, credentials=presented)
        self._replies: list[float] = []
        request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member=f"waiter-{number}")
        self._membership = MembershipClient(self._client, request, on_reply=self._replied)
        self.described, self.error, self.trained_at = threading.Event(), "", 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def longest_gap_s(self, since: float, until: float) -> float:
        """Returns the longest time without a reply to a heartbeat, in a period of the monotonic clock."""
        times = [since, *(it for it in self._replies if since < it < until), until]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def end(self) -> None:
        """Waits for the step, and leaves the cluster."""
        self._thread.join(PATIENCE_S)
        self._membership.stop()
        self._client.close()

    def _replied(self, _: Any) -> None:
        self._replies.append(time.monotonic())

    def _run(self) -> None:
        try:
            self._membership.start()
            own, presented = self._membership, self._membership.credentials_in(JOB)
            participant = Participant(self._client, JOB, own.member, own.incarnation, credentials=presented)
            participant.describe(self._variables, 0)
            self.described.set()
            with participant.enter() as pipeline:
                pipeline.pull()
                pipeline.push({name: np.ones(it.shape, np.float32) for name, it in self._variables.items()})
                pipeline.settle()
            self.trained_at = time.monotonic()
        except errors.ShoalError as error:
            self.error = error.message
            self.described.set()


def wait(address: str, first: int, count: int, variables: int) -> None:
    """Runs sessions in this process.

    Its first line says that all have described the job. It takes one command, SINCE UNTIL, after which the sessions
    take their step and leave; the answer has the longest gap between the replies to a session's heartbeats in it.
    """
    described = {f"layer-{number}": shoal.Variable((4,)) for number in range(variables)}
    waiters = [Waiter(address, first + number, described) for number in range(count)]
    for waiter in waiters:
        waiter.described.wait(PATIENCE_S)
    say({"ready": 1})
    since, until = map(float, input().split())
    gap_s = max(waiter.longest_gap_s(since, until) for waiter in waiters)
    for waiter in waiters:
        waiter.end()
    answer: MembersLine = {
        "gap_s": gap_s,
        "trained_at": max(waiter.trained_at for waiter in waiters),
        "failures": {waiter.error: 0.0 for waiter in waiters if waiter.error},
    }
    say(answer)
