"""Two users of one machine: what the second one can do with the cluster of the first, and with its ports."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._security import AccessFile, AccessRole, Credentials, Principal
from shoal._transport import GrpcCalls, Segment
from shoal._transport.lane_transport import LaneFactory
from shoal._transport.shared_memory import SHARED_FROM_BYTES
from shoal._transport.transport import Target
from shoal._wire import CallLayout
from shoal.v1 import coordinator_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.effects.server_channels import ServerChannels
from shoal_coordinator.messages import ServerRef
from support.clusters.secure_rig import SecureRig, secure_rig

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig() as running:
        yield running


def lane_port_of(rig: SecureRig) -> str:
    """Returns the port of the server's lanes."""
    ticket = rig.token(AccessRole.TRAINER, job="job")
    with closing(GrpcCalls(rig.server.address, Credentials(token=lambda: ticket))) as calls:
        return calls.attach().address.rpartition(":")[2]


OTHER_USER = """
    import os, sys
    import numpy as np
    import shoal
    from shoal import errors
    from shoal._transport import GrpcCalls, Lane, PARAMETER_SERVER, TokenSecurity, open_handshake
    from shoal.v1 import parameter_server_pb2 as pb

    coordinator, server, lane_port = sys.argv[1:]

    def lane():
        opened = Lane.connect("127.0.0.1", int(lane_port), PARAMETER_SERVER, timeout_s=5)
        try:
            open_handshake(opened, TokenSecurity(b"guess"), pb.LaneHello(), within_s=5)
        finally:
            opened.close()

    def attempts():
        with shoal.Client(coordinator, retry_for_s=0) as client:
            for attempt in (
                lambda: client.submit(shoal.Job("digits:Digits")),
                client.status,
                lambda: client.pull("job"),
                lambda: client.session("job"),
                GrpcCalls(server).attach,
                lane,
            ):
                try:
                    print("done", attempt())
                except errors.ShoalError as error:
                    print(error.code)

    state = os.environ.pop("XDG_STATE_HOME")
    attempts()  # this user, without the file; it imports what the other user cannot read
    os.environ["XDG_STATE_HOME"] = state
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    attempts()
"""


def test_another_local_user_is_refused(rig: SecureRig) -> None:
    arguments = [rig.coordinator.address, rig.server.address, lane_port_of(rig)]
    command = [sys.executable, "-c", textwrap.dedent(OTHER_USER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["UNAUTHENTICATED"] * 12, done.stdout + done.stderr


IN_SHARED_MEMORY = """
    import os, sys
    from pathlib import Path
    from shoal import errors
    from shoal._transport import Lane, PARAMETER_SERVER, Segment, SegmentUnavailable, TokenSecurity, open_handshake
    from shoal._transport.segment import SHM
    from shoal.v1 import parameter_server_pb2 as pb

    pid, lane_port, name, nonce, ticket = sys.argv[1:]
    nonce = bytes.fromhex(nonce)

    def attach(segment, nonce, token):
        # Returns whether the server shares this memory.
        lane = Lane.connect("127.0.0.1", int(lane_port), PARAMETER_SERVER, timeout_s=5)
        try:
            offer = pb.Segment(name=segment, regions=1, region_bytes=4096, nonce=nonce)
            welcome = open_handshake(lane, TokenSecurity(token), pb.LaneHello(segment=offer), within_s=5)
            if not welcome.shared:
                raise SegmentUnavailable(welcome.reason)
        finally:
            lane.close()

    try:
        attach(name, nonce, b"guess")  # it imports what the other user cannot read
    except errors.Unauthenticated:
        pass
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    own, path = Segment.create(4096), SHM / name
    assert name in os.listdir(SHM)
    attempts = {
        "read": lambda: os.open(path, os.O_RDONLY),
        "write": lambda: os.open(path, os.O_WRONLY),
        "truncate": lambda: os.truncate(path, 0),
        "chmod": lambda: path.chmod(0o666),
        "rename": lambda: path.rename(SHM / "stolen"),
        "remove": path.unlink,
        "map": lambda: Segment.open(name, 4096, nonce),
        "files": lambda: os.listdir(f"/proc/{pid}/fd"),
        "mappings": lambda: os.listdir(f"/proc/{pid}/map_files"),
        "memory": lambda: open(f"/proc/{pid}/mem", "rb"),
        "attach": lambda: attach(name, nonce, b"guess"),
        "attach own": lambda: attach(own.name, own.nonce, b"guess"),
        "reader attaches": lambda: attach(name, bytes(16), ticket.encode()),
        "reader attaches own": lambda: attach(own.name, own.nonce, ticket.encode()),
    }
    for what, attempt in attempts.items():
        try:
            attempt()
            print(f"{what}: done")
        except (PermissionError, SegmentUnavailable) as error:
            print(f"{what}: {type(error).__name__}")
        except errors.ShoalError as error:
            print(f"{what}: {error.code}")
    own.close()
"""
SHARED_MEMORY_OUTCOMES = (
    dict.fromkeys(["read", "write", "truncate", "chmod", "rename", "remove"], "PermissionError")
    | {"map": "SegmentUnavailable"}
    | dict.fromkeys(["files", "mappings", "memory"], "PermissionError")
    | dict.fromkeys(["attach", "attach own"], "UNAUTHENTICATED")
    # A reader has a ticket, but its memory is another user's, and it does not know the nonce of others.
    | dict.fromkeys(["reader attaches", "reader attaches own"], "SegmentUnavailable")
)


def test_another_local_user_gets_no_shared_memory(rig: SecureRig) -> None:
    values = np.zeros(SHARED_FROM_BYTES, np.float32)
    with Segment.create(4096) as segment, rig.client.session("shared", variables={"w": values}) as session:
        session.pull()
        assert b"/shoal-" in Path("/proc/self/maps").read_bytes(), "the session shares memory with the server"
        segment.view(0, 6)[:] = b"secret"
        reader = rig.token(AccessRole.OBSERVER, job="shared")
        lane_port = lane_port_of(rig)
        arguments = [str(os.getpid()), lane_port, segment.name, segment.nonce.hex(), reader]
        command = [sys.executable, "-c", textwrap.dedent(IN_SHARED_MEMORY), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = dict(line.split(": ") for line in done.stdout.splitlines())
        assert found == SHARED_MEMORY_OUTCOMES, done.stderr
        segment.check()
        assert bytes(segment.view(0, 6)) == b"secret"
        session.pull()


ON_THE_PORT = """
    import os, socket, sys
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
    listener.settimeout(0)
    try:
        while True:
            connection, _ = listener.accept()
            connection.settimeout(1)
            print("received", connection.recv(1 << 16), flush=True)
    except BlockingIOError:
        print("end")
"""


@contextmanager
def other_user_listens() -> Iterator[str]:
    """Starts a process of another user that listens on loopback; yields its address. It must receive nothing."""
    command = [sys.executable, "-c", textwrap.dedent(ON_THE_PORT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin
        assert other.stdout
        try:
            yield f"127.0.0.1:{other.stdout.readline().strip()}"
        finally:
            other.stdin.close()
        assert set(other.stdout.read().splitlines()) <= {"received b''", "end"}


class TestAnotherUserOnThePort:
    """Another user listens on the port of a process that is down, and must not receive a token."""

    @pytest.fixture
    def address(self) -> Iterator[str]:
        with other_user_listens() as address:
            yield address

    def test_a_token_of_the_access_file_is_not_sent(self, address: str) -> None:
        tokens = dict.fromkeys((AccessRole.ADMIN, AccessRole.SUBMITTER, AccessRole.SERVER), "secret")
        AccessFile(address).write(tokens)  # the coordinator that was killed has left it
        try:
            self.check_status(address)
        finally:
            AccessFile(address).remove(tokens)

    def test_a_token_of_a_named_file_is_not_sent(
        self, address: str, rig: SecureRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "token"
        file.touch(0o600)
        file.write_text(rig.token(AccessRole.READER))
        monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
        self.check_status(address)

    def test_a_ticket_is_not_sent_over_grpc(self, address: str, rig: SecureRig) -> None:
        calls = GrpcCalls(address, self.presented(rig))
        try:
            with pytest.raises(errors.Unauthenticated, match=f"user 65534 listens on {address}"):
                calls.attach()
        finally:
            calls.close()

    def test_a_ticket_is_not_sent_over_a_lane(self, address: str, rig: SecureRig) -> None:
        offer, layout = pb.AttachReply(address=address, token=b"t"), CallLayout([])
        with closing(GrpcCalls(address)) as calls:
            target = Target(address, layout, calls, offer, self.presented(rig))
            with pytest.raises(errors.Unauthenticated, match=f"user 65534 listens on {address}"):
                LaneFactory().connect(target, pb.LaneHello())

    def test_the_coordinators_token_is_not_sent(self, address: str, rig: SecureRig) -> None:
        token = rig.signer.sign(Principal("coordinator", AccessRole.COORDINATOR), valid_s=60, audience="server:s")
        channels = ServerChannels(lambda _: 1, credentials_for=lambda _: Credentials(token=lambda: token))
        with closing(channels), pytest.raises(errors.Unreachable, match=f"user 65534 listens on {address}"):
            channels.metadata(ServerRef("s", address))

    def test_a_role_without_a_token_does_not_register(self, address: str) -> None:
        """The coordinator was stopped, and has removed its tokens. The other user would assign jobs to the worker."""
        worker = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="gpu-1")
        presented = Credentials(closed=True).for_coordinator(address, AccessRole.WORKER)
        with (
            closing(CoordinatorClient(address, credentials=presented, retry_for_s=0)) as client,
            pytest.raises(errors.Unauthenticated, match=f"user 65534 listens on {address}"),
        ):
            MembershipClient(client, worker).start()

    def check_status(self, address: str) -> None:
        with (
            shoal.Client(address, retry_for_s=0) as client,
            pytest.raises(errors.Unauthenticated, match=f"user 65534 listens on {address}"),
        ):
            client.status()

    def presented(self, rig: SecureRig) -> Credentials:
        return Credentials(token=lambda: rig.token(AccessRole.TRAINER, job="job"))
