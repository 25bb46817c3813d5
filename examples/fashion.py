"""Example that trains a small convolutional network on Fashion-MNIST, once in each consistency mode.

    python examples/fashion.py --data /usr/share/datasets/fashion-mnist

It draws a curve of the accuracy for each mode. The data is four idx files (Debian: `apt-get install
dataset-fashion-mnist`). The program that is trained comes with Shoal: `shoal_nn.programs:image_classifier`. On two
cores, each mode takes about two minutes.
"""

import argparse
import sys
from pathlib import Path

from curves import Curve, save, trained

import shoal
from shoal.consistency import Consistency

MODES: tuple[Consistency, ...] = (shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(4))
SERVERS, WORKERS = 1, 2
IMAGES, EPOCHS, BATCH = 60_000, 3, 32
# FALL is the last learning rate divided by the first. The rate falls at each update. In a synchronous job each step is
# one update; in the other modes each push is one.
RATE, FALL = 1e-3, 0.05
TARGET_ACCURACY = 0.89  # of the 10,000 test images; guessing reaches 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small network on Fashion-MNIST in every consistency mode.")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="folder of Fashion-MNIST in IDX format (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/fashion"),
        help="folder for fashion.png and fashion.json (default: %(default)s)",
    )
    parser.add_argument(
        "--every", type=int, default=300, help="number of steps from one evaluation to the next (default: %(default)s)"
    )
    parser.add_argument(
        "--target-accuracy",
        type=float,
        default=TARGET_ACCURACY,
        help="smallest test accuracy of each consistency mode; below it the exit status is 1 (default: %(default)s)",
    )
    arguments = parser.parse_args()
    settings = {"data": str(arguments.data.resolve()), "format": "idx", "mean": 0.286, "std": 0.353}
    with shoal.LocalCluster(SERVERS, WORKERS) as cluster, cluster.client() as client:
        curves = [run(client, mode, settings, arguments.every) for mode in MODES]
    title = f"Fashion-MNIST, a small CNN: {WORKERS} workers, {EPOCHS} epochs"
    save(arguments.out, "fashion", title, [("test images", curves)])
    for curve in curves:
        print(f"{curve.name}: test accuracy {curve.last:.4f} in {curve.seconds:.0f} s")
    return 0 if all(curve.last >= arguments.target_accuracy for curve in curves) else 1


def run(client: shoal.Client, mode: Consistency, settings: dict[str, object], every: int) -> Curve:
    """Trains one job to its end."""
    job = shoal.Job(
        "shoal_nn.programs:image_classifier",
        workers=WORKERS,
        consistency=mode,
        optimizer=optimizer(mode),
        settings=settings,
        epochs=EPOCHS,
        batch_size=BATCH,
        evaluation=shoal.EvaluationPolicy(every_steps=every, metric="accuracy"),
    )
    return trained(client, job, str(mode))


def optimizer(mode: Consistency) -> shoal.optim.Optimizer:
    """Returns Adam with a falling learning rate.

    In every mode, the last rate of the job is FALL times the first, and each push has the same weight.
    """
    joined = WORKERS if isinstance(mode, shoal.Synchronous) else 1  # number of pushes that one update combines
    updates = EPOCHS * IMAGES / BATCH / joined
    return shoal.optim.Adam(shoal.optim.ExponentialLR(RATE * joined, gamma=FALL ** (1 / updates)))


if __name__ == "__main__":
    sys.exit(main())
