"""Measurement of this machine's own limits: python limits.py (pip install numpy; torch too for its fused Adam).

The project received this script together with the measurements on which the project's targets are based. Its code has
not been changed.
"""

import json
import os
import socket
import threading
import time

import numpy as np


def median(run, n=7):
    run()
    times = []
    for _ in range(n):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times)[n // 2]


def loopback(total=1 << 30, chunk=1 << 20):
    listener = socket.create_server(("127.0.0.1", 0))

    def drain():
        conn, _ = listener.accept()
        buffer, got = memoryview(bytearray(chunk)), 0
        while got < total:
            got += conn.recv_into(buffer)
        conn.sendall(b"x")

    thread = threading.Thread(target=drain)
    thread.start()
    client = socket.create_connection(listener.getsockname())
    data, start = os.urandom(chunk), time.perf_counter()
    for _ in range(total // chunk):
        client.sendall(data)
    client.recv(1)
    thread.join()
    return total / (time.perf_counter() - start) / 1e9


a = np.random.default_rng(0).random(1 << 25)
b = np.zeros_like(a)
out = {"memcpy_gb_per_s": a.nbytes / median(lambda: np.copyto(b, a)) / 1e9, "loopback_tcp_gb_per_s": loopback()}
try:
    import torch

    torch.set_num_threads(1)
    p = torch.nn.Parameter(torch.randn(16_000_000))
    p.grad = torch.randn(16_000_000)
    adam = torch.optim.Adam([p], lr=1e-3, fused=True)
    out["torch_fused_adam_m_params_per_s_one_thread"] = 16 / median(adam.step)
except ImportError:
    pass
print(json.dumps(out))
