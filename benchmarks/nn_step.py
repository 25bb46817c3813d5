"""Steps of Shoal's models on one thread: python benchmarks/nn_step.py resnet18|mobilenet_v2|small_cnn [--short].

There is no server. The script measures what a worker computes between a pull and a push. It prints one JSON line, as
peers/torch_nn.py does for PyTorch. The environment must limit it to one thread (`peers.nn_workload.ONE_THREAD`).
"""

import argparse

import shoal

if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy is loaded: later it does less

import numpy as np
from peers import nn_workload as work

from shoal_nn import TrainingContext, softmax_cross_entropy
from shoal_nn.layer import Layer
from shoal_nn.models import mobilenet_v2, resnet, small_cnn


def model(name: str) -> Layer:
    """Returns the model with a name in `nn_workload.MODELS`."""
    if name == "resnet18":
        return resnet(18, work.CLASSES, small_images=True)
    return mobilenet_v2(work.CLASSES, 0.35, stem_strides=1) if name == "mobilenet_v2" else small_cnn(work.CLASSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("model", choices=work.MODELS)
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    options = parser.parse_args()
    load, net = work.MODELS[options.model], model(options.model)
    rng = np.random.default_rng(0)
    params, state = net.init(rng, load.image)
    x = rng.normal(size=(load.batch, *load.image)).astype(np.float32)
    labels = rng.integers(0, work.CLASSES, load.batch)

    def step() -> float:
        logits, _, pullback = net.apply(params, state, x, TrainingContext(0))
        loss, dlogits = softmax_cross_entropy(logits, labels)
        pullback(dlogits)
        return float(loss)

    seconds, loss = work.measure(step, short=options.short)
    work.report("shoal", sum(value.size for value in params.values()), seconds, loss)


if __name__ == "__main__":
    main()
