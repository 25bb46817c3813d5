"""CIFAR-10 by the name that it has in Keras: `keras.datasets.cifar10.load_data()`."""

import os
from pathlib import Path

import numpy as np

from shoal.data import Cifar10

# The folder of Keras' files, which has the folder `datasets`.
_VARIABLE, _DEFAULT = "KERAS_HOME", "~/.keras"
_ARCHIVE, _FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"


def load_data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Returns the 50,000 images for training and the 10,000 test images, each with labels, as Keras does.

    The files are in the folder `datasets` of `~/.keras`, or of the folder that the environment variable `KERAS_HOME`
    names: `cifar-10-binary.tar.gz`, the archive of the binary version, or `cifar-10-batches-bin`, its files. See
    `shoal.data.Cifar10`. Keras itself reads another archive.

    Returns:
        (images, labels) for training, and (images, labels) for tests: uint8 [n, 32, 32, 3] and uint8 [n, 1].

    Raises:
        InvalidData: there are no files, or they are damaged. The message says where they are published.
    """
    datasets = Path(os.environ.get(_VARIABLE) or _DEFAULT).expanduser() / "datasets"
    path = datasets / (_FOLDER if (datasets / _FOLDER).is_dir() else _ARCHIVE)
    return _samples(path, train=True), _samples(path, train=False)


def _samples(path: Path, *, train: bool) -> tuple[np.ndarray, np.ndarray]:
    source = Cifar10(path, train=train)
    images, labels = source.batch(np.arange(len(source)))
    return images, labels.astype(np.uint8)[:, np.newaxis]


__all__ = ["load_data"]
