"""Example of fine-tuning: trains MobileNetV2 on Fashion-MNIST, and then adapts it to handwritten digits.

    python examples/fine_tuning.py --data /usr/share/datasets/fashion-mnist

It runs three jobs. The first trains the whole model on Fashion-MNIST, the second a new head on the digits, and the
third all layers on the digits. Each job after the first starts from the checkpoint of the one before. The
digits are those of digits.py.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from curves import Curve, save, trained

import shoal

PROGRAM = "shoal_nn.programs:image_classifier"
# The images are small, so the first convolution has a stride of 1: the model halves their size four times, not five.
MODEL = {"model": "mobilenet_v2", "options": {"width": 0.35, "stem_strides": 1}, "size": 32}
DIGITS = Path(__file__).with_name("digits.npz")
WORKERS = 2
FALL = 0.995  # factor of the learning rate at each update
TARGET_ACCURACY = 0.95  # of the held-out digits; guessing reaches 0.1


def main() -> int:
    parser = argparse.ArgumentParser(description="Fine-tune MobileNetV2 from Fashion-MNIST to handwritten digits.")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("/usr/share/datasets/fashion-mnist"),
        help="folder of Fashion-MNIST in IDX format (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/fine_tuning"),
        help="folder for fine_tuning.png and fine_tuning.json (default: %(default)s)",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        nargs=3,
        default=(1, 12, 25),
        help="number of epochs of each of the three jobs (default: 1 12 25)",
    )
    parser.add_argument(
        "--target-accuracy",
        type=float,
        default=TARGET_ACCURACY,
        help="smallest accuracy of the last job; below it the exit status is 1 (default: %(default)s)",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = run(arguments.data, Path(folder), arguments.epochs)
    first, *tuned = curves
    save(arguments.out, "fine_tuning", "MobileNetV2 0.35", [("Fashion-MNIST", [first]), ("then digits", tuned)])
    for curve in curves:
        print(f"{curve.name}: accuracy {curve.last:.4f} in {curve.seconds:.0f} s")
    return 0 if tuned[-1].last >= arguments.target_accuracy else 1


def run(fashion: Path, folder: Path, epochs: list[int]) -> list[Curve]:
    """Trains all three jobs, one after the other, in a cluster that keeps its checkpoints in this folder."""
    digits = folder / "digits.npz"
    save_digits(digits)
    jobs = [
        ("fashion", {"data": str(fashion.resolve()), "format": "idx", "mean": 0.286, "std": 0.353}, 2e-3, 64, 150),
        ("head only", {**of_digits(digits), "train_from": "digits"}, 5e-3, 32, 50),
        ("then all", of_digits(digits), 2e-3, 32, 50),
    ]
    curves: list[Curve] = []
    with shoal.LocalCluster(1, WORKERS, checkpoints=folder / "checkpoints") as cluster, cluster.client() as client:
        before = ""
        for (name, settings, rate, batch, every), passes in zip(jobs, epochs, strict=True):
            job = shoal.Job(
                PROGRAM,
                name=name.replace(" ", "-"),
                workers=WORKERS,
                optimizer=shoal.optim.Adam(shoal.optim.ExponentialLR(rate, gamma=FALL)),
                settings={**MODEL, **settings},
                epochs=passes,
                batch_size=batch,
                evaluation=shoal.EvaluationPolicy(every_steps=every, metric="accuracy"),
                restore=before,
                partial_restore=bool(before),
            )
            curves.append(trained(client, job, name))
            before = job.name
    return curves


def save_digits(file: Path) -> None:
    """Writes 1,797 images of 8 by 8 pixels, from 0 to 240, and their labels."""
    with np.load(DIGITS) as found:
        images = (found["pixels"] * 15).reshape(-1, 8, 8, 1)
        np.savez(file, images=images, labels=found["labels"].astype(np.int64))


def of_digits(file: Path) -> dict[str, object]:
    """Returns the settings of both jobs on digits, with a new head."""
    found = {"data": str(file), "format": "npz", "mean": 0.305, "std": 0.376, "held_out_share": 0.2}
    return {**found, "augment": "crop", "head": "digits"}


if __name__ == "__main__":
    sys.exit(main())
