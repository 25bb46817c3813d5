"""MXNet's KVStore over ps-lite: python mxnet_kvstore.py dense|small|sparse (pip install 'mxnet==1.9.1' 'numpy<1.24').

In the sparse workload, the unique ids of each batch are computed before the measurement, which favours this peer.

The project received this script together with the measurements on which the project's targets are based. Its code has
not been changed. The pattern is that of MXNet's guide "Distributed Training in MXNet". `pip install` needs Python 3.8
to 3.11, because NumPy below 1.24 does not support later versions of Python.
"""

import os
import socket
import subprocess
import sys

import workload as wl

kind = sys.argv[1]
if "DMLC_ROLE" not in os.environ:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(
        os.environ,
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(port),
        DMLC_NUM_SERVER="1",
        DMLC_NUM_WORKER="1",
        DMLC_INTERFACE="lo",
    )
    roles = [
        subprocess.Popen([sys.executable, "-c", "import mxnet"], env=dict(env, DMLC_ROLE=r))
        for r in ("scheduler", "server")
    ]
    subprocess.run([sys.executable, __file__, kind], env=dict(env, DMLC_ROLE="worker"), check=False)
    for p in roles:
        p.kill()
    sys.exit()

import mxnet as mx  # noqa: E402 - the roles are told by environment variables, before it is imported
import numpy as np  # noqa: E402

store = mx.kv.create("dist_async")
if kind != "sparse":
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1e-3))
    keys = list(range(len(wl.shapes(kind))))
    weights = [mx.nd.zeros(s) for s in wl.shapes(kind)]
    store.init(keys, weights)

    def run_steps(n):
        for _ in range(n):
            store.pull(keys, out=weights)
            store.push(keys, [w * 1e-6 + 1e-3 for w in weights])
            mx.nd.waitall()

else:
    store.set_optimizer(mx.optimizer.AdaGrad(learning_rate=0.01))
    store.init("t", mx.nd.ones((wl.ROWS, wl.DIM)).tostype("row_sparse"))
    batches = [np.unique(b) for b in wl.id_batches()]

    def run_steps(n):
        for i in range(n):
            ids = batches[i % len(batches)]
            out = mx.nd.sparse.zeros("row_sparse", (wl.ROWS, wl.DIM))
            store.row_sparse_pull("t", out=out, row_ids=mx.nd.array(ids, dtype="int64"))
            grad = out.data * 1e-3 + 1e-3
            store.push("t", mx.nd.sparse.row_sparse_array((grad, ids), shape=(wl.ROWS, wl.DIM)))
            mx.nd.waitall()


wl.report("mxnet kvstore (ps-lite)", kind, wl.measure(run_steps))
os._exit(0)
