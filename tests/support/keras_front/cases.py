"""Cases of `tests/golden/keras.json`. They run with Keras and with the Keras-shaped front, which each builder gets."""

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

IMAGES, ROWS = (2, 5, 4, 3), (3, 6)


@dataclass(frozen=True)
class LayerCase:
    build: Callable[[Any], Any]
    shapes: tuple[tuple[int, ...], ...] = (ROWS,)  # of the batches that it gets
    rows: int = 0  # for whole numbers: they are less than this
    training: bool = True


def _activation(name: str, k: Any) -> Any:
    return k.layers.Activation(name)


LAYERS = {
    "dense": LayerCase(lambda k: k.layers.Dense(4, activation="relu")),
    "dense without bias": LayerCase(lambda k: k.layers.Dense(4, use_bias=False), ((2, 3, 6),)),
    "embedding": LayerCase(lambda k: k.layers.Embedding(5, 3), ((2, 4),), rows=5),
    "convolution": LayerCase(lambda k: k.layers.Conv2D(4, 3, activation="tanh"), (IMAGES,)),
    "convolution, same": LayerCase(lambda k: k.layers.Conv2D(4, (3, 2), strides=2, padding="same"), (IMAGES,)),
    "convolution, groups": LayerCase(lambda k: k.layers.Conv2D(6, 2, groups=3, use_bias=False), (IMAGES,)),
    "depthwise": LayerCase(lambda k: k.layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"), (IMAGES,)),
    "largest": LayerCase(lambda k: k.layers.MaxPooling2D(), (IMAGES,)),
    "largest, same": LayerCase(lambda k: k.layers.MaxPooling2D(3, 2, "same"), (IMAGES,)),
    "mean, same": LayerCase(lambda k: k.layers.AveragePooling2D((3, 2), 2, "same"), (IMAGES,)),
    "mean of all": LayerCase(lambda k: k.layers.GlobalAveragePooling2D(), (IMAGES,)),
    "largest of all": LayerCase(lambda k: k.layers.GlobalMaxPooling2D(keepdims=True), (IMAGES,)),
    "padding": LayerCase(lambda k: k.layers.ZeroPadding2D(((1, 0), (2, 1))), (IMAGES,)),
    "batch normalization": LayerCase(lambda k: k.layers.BatchNormalization(), (IMAGES,)),
    "batch normalization, evaluated": LayerCase(lambda k: k.layers.BatchNormalization(), (IMAGES,), training=False),
    "batch normalization, plain": LayerCase(
        lambda k: k.layers.BatchNormalization(momentum=0.8, epsilon=0.01, center=False, scale=False)
    ),
    "layer normalization": LayerCase(lambda k: k.layers.LayerNormalization()),
    "dense, regularized": LayerCase(
        lambda k: k.layers.Dense(
            4,
            activation="tanh",
            kernel_regularizer="l2",
            bias_regularizer=k.regularizers.L1(0.1),
            activity_regularizer=k.regularizers.L1L2(0.2, 0.3),
        )
    ),
    "embedding, regularized": LayerCase(
        lambda k: k.layers.Embedding(5, 3, embeddings_regularizer="L1L2", activity_regularizer="l2"), ((2, 4),), rows=5
    ),
    "convolution, regularized": LayerCase(
        lambda k: k.layers.Conv2D(
            4, 3, kernel_regularizer=k.regularizers.l1_l2(0.1, 0.2), bias_regularizer="l2", activity_regularizer="l1"
        ),
        (IMAGES,),
    ),
    "depthwise, regularized": LayerCase(
        lambda k: k.layers.DepthwiseConv2D(2, depthwise_regularizer="l1", bias_regularizer="l2"), (IMAGES,)
    ),
    "batch normalization, regularized": LayerCase(
        lambda k: k.layers.BatchNormalization(beta_regularizer="l1", gamma_regularizer="l2"), (IMAGES,)
    ),
    "layer normalization, regularized": LayerCase(
        lambda k: k.layers.LayerNormalization(beta_regularizer="l2", gamma_regularizer="l1")
    ),
    "dropout, evaluated": LayerCase(lambda k: k.layers.Dropout(0.5), training=False),
    "flatten": LayerCase(lambda k: k.layers.Flatten(), (IMAGES,)),
    "reshape": LayerCase(lambda k: k.layers.Reshape((3, -1))),
    "rescaling": LayerCase(lambda k: k.layers.Rescaling(1 / 127.5, offset=-1.0)),
    "normalization": LayerCase(
        lambda k: k.layers.Normalization(mean=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], variance=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    ),
    "normalization, inverse": LayerCase(
        lambda k: k.layers.Normalization(mean=[0.1] * 6, variance=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], invert=True)
    ),
    "resizing": LayerCase(lambda k: k.layers.Resizing(7, 3), (IMAGES,)),
    "resizing, nearest": LayerCase(lambda k: k.layers.Resizing(3, 9, interpolation="nearest"), (IMAGES,)),
    "rotation": LayerCase(lambda k: k.layers.RandomRotation((0.1, 0.1)), (IMAGES,)),
    "rotation, constant": LayerCase(
        lambda k: k.layers.RandomRotation((-0.2, -0.2), fill_mode="constant", fill_value=0.3), (IMAGES,)
    ),
    "rotation, nearest": LayerCase(
        lambda k: k.layers.RandomRotation((0.06, 0.06), fill_mode="nearest", interpolation="nearest"), (IMAGES,)
    ),
    "rotation, evaluated": LayerCase(lambda k: k.layers.RandomRotation(0.5), (IMAGES,), training=False),
    "zoom": LayerCase(lambda k: k.layers.RandomZoom((-0.3, -0.3)), (IMAGES,)),
    "zoom, wrapped": LayerCase(lambda k: k.layers.RandomZoom((0.7, 0.7), [0.9, 0.9], fill_mode="wrap"), (IMAGES,)),
    "translation": LayerCase(lambda k: k.layers.RandomTranslation((0.3, 0.3), (-0.9, -0.9)), (IMAGES,)),
    "translation, constant": LayerCase(
        lambda k: k.layers.RandomTranslation(
            (-0.25, -0.25), (0.3, 0.3), fill_mode="constant", interpolation="nearest", fill_value=2.0
        ),
        (IMAGES,),
    ),
    "contrast": LayerCase(lambda k: k.layers.RandomContrast((-0.3, 0.3), value_range=(-1.5, 1.0)), (IMAGES,)),
    "brightness": LayerCase(lambda k: k.layers.RandomBrightness((0.1, 0.1), value_range=(-1.5, 1.5)), (IMAGES,)),
    "random crop of low images": LayerCase(lambda k: k.layers.RandomCrop(5, 3), (IMAGES,)),
    "random crop of small images": LayerCase(lambda k: k.layers.RandomCrop(7, 3), (IMAGES,)),
    "middle": LayerCase(lambda k: k.layers.CenterCrop(2, 3), (IMAGES,)),
    "middle of small images": LayerCase(lambda k: k.layers.CenterCrop(7, 3), (IMAGES,)),
    "softmax": LayerCase(lambda k: k.layers.Softmax()),
    "ReLU": LayerCase(lambda k: k.layers.ReLU()),
    "ReLU with a slope": LayerCase(lambda k: k.layers.ReLU(negative_slope=0.1)),
    "leaky ReLU": LayerCase(lambda k: k.layers.LeakyReLU()),
    "ELU": LayerCase(lambda k: k.layers.ELU()),
    "add": LayerCase(lambda k: k.layers.Add(), (ROWS, ROWS, ROWS)),
    "subtract": LayerCase(lambda k: k.layers.Subtract(), (ROWS, ROWS)),
    "multiply": LayerCase(lambda k: k.layers.Multiply(), (ROWS, ROWS, ROWS)),
    "average": LayerCase(lambda k: k.layers.Average(), (ROWS, ROWS)),
    "maximum": LayerCase(lambda k: k.layers.Maximum(), (ROWS, ROWS)),
    "concatenate": LayerCase(lambda k: k.layers.Concatenate(), (ROWS, (3, 2))),
    "concatenate, rows": LayerCase(lambda k: k.layers.Concatenate(axis=1), ((2, 2, 3), (2, 1, 3))),
    **{
        f"activation {name}": LayerCase(functools.partial(_activation, name))
        for name in (
            *("linear", "relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "sigmoid"),
            *("tanh", "softmax", "softplus", "silu", "swish"),
        )
    },
}

# Labels: "numbers" of any kind, "shares" that add up to 1, "binary" 0 and 1, "classes" as integers.
LOSSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "squares": (lambda k: k.losses.MeanSquaredError(), "numbers"),
    "sum of squares": (lambda k: k.losses.MeanSquaredError(reduction="sum"), "numbers"),
    "squares of samples": (lambda k: k.losses.MeanSquaredError(reduction=None), "numbers"),
    "squares by weight": (lambda k: k.losses.MeanSquaredError(reduction="mean_with_sample_weight"), "numbers"),
    "absolute": (lambda k: k.losses.MeanAbsoluteError(), "numbers"),
    "percentage": (lambda k: k.losses.MeanAbsolutePercentageError(), "shares"),
    "logarithmic": (lambda k: k.losses.MeanSquaredLogarithmicError(), "shares"),
    "huber": (lambda k: k.losses.Huber(delta=0.3), "numbers"),
    "log cosh": (lambda k: k.losses.LogCosh(), "numbers"),
    "hinge": (lambda k: k.losses.Hinge(), "binary"),
    "poisson": (lambda k: k.losses.Poisson(), "shares"),
    "divergence": (lambda k: k.losses.KLDivergence(), "shares"),
    "binary": (lambda k: k.losses.BinaryCrossentropy(), "binary"),
    "binary, logits": (lambda k: k.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1), "binary"),
    "binary, columns": (lambda k: k.losses.BinaryCrossentropy(axis=0, reduction=None), "columns"),
    "categorical, columns": (lambda k: k.losses.CategoricalCrossentropy(axis=0, reduction=None), "columns"),
    "sparse, columns": (lambda k: k.losses.SparseCategoricalCrossentropy(True, reduction=None, axis=1), "planes"),
    "squares in float32": (lambda k: k.losses.MeanSquaredError(dtype="float32"), "numbers"),
    "categorical": (lambda k: k.losses.CategoricalCrossentropy(label_smoothing=0.1), "shares"),
    "categorical, logits": (lambda k: k.losses.CategoricalCrossentropy(from_logits=True), "shares"),
    "sparse": (lambda k: k.losses.SparseCategoricalCrossentropy(), "classes"),
    "sparse, logits": (
        lambda k: k.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2),
        "classes",
    ),
}
METRICS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "accuracy": (lambda k: k.metrics.Accuracy(), "classes as outputs"),
    "binary accuracy": (lambda k: k.metrics.BinaryAccuracy(threshold=0.4), "binary"),
    "categorical accuracy": (lambda k: k.metrics.CategoricalAccuracy(), "shares"),
    "sparse accuracy": (lambda k: k.metrics.SparseCategoricalAccuracy(), "classes"),
    "top k": (lambda k: k.metrics.TopKCategoricalAccuracy(k=2), "shares"),
    "sparse top k": (lambda k: k.metrics.SparseTopKCategoricalAccuracy(k=2), "classes"),
    "squares": (lambda k: k.metrics.MeanSquaredError(), "numbers"),
    "root": (lambda k: k.metrics.RootMeanSquaredError(), "numbers"),
    "absolute": (lambda k: k.metrics.MeanAbsoluteError(), "numbers"),
    "binary entropy": (lambda k: k.metrics.BinaryCrossentropy(), "binary"),
    "entropy": (lambda k: k.metrics.CategoricalCrossentropy(from_logits=True), "shares"),
    "sparse entropy": (lambda k: k.metrics.SparseCategoricalCrossentropy(), "classes"),
    "entropy, columns": (lambda k: k.metrics.CategoricalCrossentropy(axis=0), "columns"),
    "sparse entropy without a class": (lambda k: k.metrics.SparseCategoricalCrossentropy(ignore_class=1), "classes"),
    "precision of the largest": (lambda k: k.metrics.Precision(top_k=2), "binary"),
    "precision of a class": (lambda k: k.metrics.Precision(0.4, class_id=1), "binary"),
    "recall of a class among the largest": (lambda k: k.metrics.Recall(top_k=3, class_id=2), "binary"),
    "area of precision": (lambda k: k.metrics.AUC(50, "PR"), "binary"),
    "area of precision, low": (lambda k: k.metrics.AUC(curve="PR", summation_method="minoring"), "binary"),
    "area of gains, high": (lambda k: k.metrics.AUC(20, "PRGAIN", "majoring"), "binary"),
    "area at thresholds": (lambda k: k.metrics.AUC(thresholds=[0.7, 0.2, 0.3]), "binary"),
    "areas of labels": (lambda k: k.metrics.AUC(multi_label=True, label_weights=[1.0, 2.0, 3.0, 4.0]), "binary"),
    "areas of labels, precision": (lambda k: k.metrics.AUC(curve="PR", multi_label=True, num_labels=4), "binary"),
    "area of logits": (lambda k: k.metrics.AUC(30, from_logits=True), "binary"),
    "precision": (lambda k: k.metrics.Precision(), "binary"),
    "recall": (lambda k: k.metrics.Recall(thresholds=0.3), "binary"),
    "area": (lambda k: k.metrics.AUC(), "binary"),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda k: k.optimizers.SGD(),
    "momentum": lambda k: k.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda k: k.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "decay": lambda k: k.optimizers.SGD(0.05, weight_decay=0.1),
    "Adam": lambda k: k.optimizers.Adam(),
    "Adam, clipped": lambda k: k.optimizers.Adam(0.01, 0.8, 0.9, 1e-3, global_clipnorm=0.01),
    "Adam with decay": lambda k: k.optimizers.Adam(0.01, weight_decay=0.1),
    "AdamW": lambda k: k.optimizers.AdamW(),
    "Adam, each clipped": lambda k: k.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=0.02),
    "SGD, elements clipped": lambda k: k.optimizers.SGD(0.05, clipvalue=0.03),
    "RMSprop": lambda k: k.optimizers.RMSprop(),
    "RMSprop, centered": lambda k: k.optimizers.RMSprop(0.01, momentum=0.5, centered=True, epsilon=1e-3),
    "Adagrad": lambda k: k.optimizers.Adagrad(0.1),
    "Ftrl": lambda k: k.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "Ftrl with decay": lambda k: k.optimizers.Ftrl(0.1, weight_decay=0.2, clipnorm=0.05),
    "warm-up": lambda k: k.optimizers.SGD(
        k.optimizers.schedules.CosineDecay(0.1, 2, warmup_target=0.3, warmup_steps=2)
    ),
    "schedule": lambda k: k.optimizers.SGD(k.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "exponential": lambda k: k.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5),
    "staircase": lambda k: k.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5, staircase=True),
    "piecewise": lambda k: k.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.1, 0.05, 0.01]),
    "cosine": lambda k: k.optimizers.schedules.CosineDecay(0.1, 8, alpha=0.1),
    "cosine after a warm-up": lambda k: k.optimizers.schedules.CosineDecay(
        0.1, 6, alpha=0.1, warmup_target=0.5, warmup_steps=3
    ),
    "square": lambda k: k.optimizers.schedules.PolynomialDecay(0.1, 8, 0.01, 2.0),
    "cycle": lambda k: k.optimizers.schedules.PolynomialDecay(0.1, 4, cycle=True),
    "polynomial": lambda k: k.optimizers.schedules.PolynomialDecay(0.1, 8),
}
CONSTRAINTS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "largest norm": (lambda k: k.constraints.MaxNorm(), (9, 4)),
    "largest norm of filters": (lambda k: k.constraints.MaxNorm(0.8, axis=[0, 1, 2]), (2, 2, 3, 4)),
    "by name": (lambda k: k.constraints.get("max_norm"), (30,)),
    "not negative": (lambda k: k.constraints.get("NonNeg"), (3, 4)),
    "norm of 1": (lambda k: k.constraints.UnitNorm(axis=1), (3, 4)),
    "bounded norm": (lambda k: k.constraints.MinMaxNorm(), (9, 4)),
    "bounded norm, slowly": (lambda k: k.constraints.min_max_norm(1.5, 2.0, rate=0.3), (9, 4)),
    "by dict": (
        lambda k: k.constraints.get({"class_name": "MinMaxNorm", "config": {"min_value": 2.0, "max_value": 3.0}}),
        (9, 4),
    ),
}
# Modules whose classes have the arguments of Keras.
SIGNATURES = (
    *("layers", "losses", "metrics", "optimizers", "optimizers.schedules", "callbacks", "regularizers", "constraints"),
)
METHODS = {
    "Model": ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    "Layer": ("add_weight",),
}


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns pseudo-random numbers from -1 to 1, computed from the name alone."""
    numbers = [zlib.crc32(f"{name} {number}".encode()) for number in range(int(np.prod(shape)))]
    return (np.array(numbers, np.float64) / 2**31 - 1).reshape(shape)


def inputs_of(name: str) -> list[np.ndarray]:
    """Returns the batches that a layer gets."""
    case = LAYERS[name]
    found = [drawn(f"{name} x{number}", shape) for number, shape in enumerate(case.shapes)]
    return [(abs(it) * case.rows).astype(np.int32) for it in found] if case.rows else [2 * it for it in found]


def weight_of(case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the value of a variable."""
    values = drawn(f"{case} {name}", shape)
    return abs(values) + 0.5 if name in {"gamma", "moving_variance"} else values


def answers_of(kind: str, part: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns labels, outputs from 0 to 1, and weights of the samples."""
    outputs = (drawn(f"outputs {part}", (5, 4)) + 1) / 2
    weights = abs(drawn(f"weights {part}", (5,)))
    labels = abs(drawn(f"labels {part}", (5, 4)))
    if kind == "columns":  # the classes are the rows; each of the 4 columns has a weight
        return labels / labels.sum(axis=0), outputs / outputs.sum(axis=0), weights[:4]
    if kind == "planes":
        planes = drawn(f"planes {part}", (5, 4, 4))
        return (labels * 3).astype(np.int64), planes, weights[:, None]
    if kind == "shares":
        return labels / labels.sum(axis=1, keepdims=True), outputs, weights
    if kind == "binary":
        return (labels > 0.5).astype(np.float64), outputs, weights
    if kind == "classes":
        return labels.argmax(axis=1), outputs, weights
    if kind == "classes as outputs":
        return np.round(labels[:, :1]), np.round(outputs[:, :1]), weights
    return labels, outputs, weights
