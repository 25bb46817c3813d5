"""Server that crashes, or whose connection to a backup breaks, at a chosen moment: crashing_server.py DOOM FLAGS.

It runs `shoal server FLAGS`. If the file DOOM exists, the process kills itself by SIGKILL at the moment that the file
names: `send`, before it sends the norm of a step; `receive`, before it takes that of another server; or `copy`, while
it sends the values of a copy. At two moments, it cuts a connection instead, once: `cut copy`, while it sends the values
of a copy, and `cut inputs`, when it sends inputs to its backup.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shoal
from shoal._cli import main as shoal_main
from shoal._transport import Frame
from shoal._transport.lane import Lane

MOMENTS = ("send", "receive")
_KINDS = {"copy": Frame.SLOTS, "cut copy": Frame.SLOTS, "cut inputs": Frame.INPUTS}


@contextmanager
def crashing(cluster: shoal.LocalCluster, index: int, doom: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a crashing server in the place of one of a cluster. At the end, the cluster has its own server again."""
    role = cluster.process("server", index)
    flags = list(role.arguments)
    role.ask_to_stop()  # a killed one would hold its name until the heartbeat timeout
    role.reap(20)
    command = [sys.executable, __file__, str(doom), *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline(), "it did not start"
        yield process
    finally:
        process.kill()
        process.communicate()
        if cluster.process("server", index).returncode is not None:
            cluster.restart("server", index)


def doom_at(moment: str, doom: Path) -> None:
    """Makes the process kill itself at this moment."""
    written = doom.with_suffix(".tmp")
    written.write_text(moment)
    written.rename(doom)


def _wrap(owner: type, name: str, moment: str, doom: Path) -> None:
    real = getattr(owner, name)

    def call(self: Any, *arguments: Any) -> Any:
        if doom.exists() and doom.read_text() == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments)

    setattr(owner, name, call)


def _wrap_stream(doom: Path) -> None:
    real = Lane.stream

    def stream(self: Lane, kind: Frame, *arguments: Any, **options: Any) -> None:
        moment = doom.read_text() if kind in _KINDS.values() and doom.exists() else ""
        if _KINDS.get(moment) is kind:
            if moment == "copy":
                os.kill(os.getpid(), signal.SIGKILL)
            doom.unlink()
            with socket.socket(fileno=os.dup(self.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        real(self, kind, *arguments, **options)

    Lane.stream = stream  # type: ignore[method-assign,assignment]


def main(doom: Path) -> None:
    from shoal_server.norm_sender import NormSender  # noqa: PLC0415 - the command imports Numba its own way
    from shoal_server.shards import LockGroup  # noqa: PLC0415

    _wrap(NormSender, "send", "send", doom)
    _wrap(LockGroup, "receive_norm", "receive", doom)
    _wrap_stream(doom)
    shoal_main()


if __name__ == "__main__":
    named = Path(sys.argv.pop(1))
    main(named)
