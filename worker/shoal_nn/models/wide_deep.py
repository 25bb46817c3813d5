"""Wide & Deep (Cheng et al., "Wide & deep learning for recommender systems", DLRS 2016)."""

from collections.abc import Mapping, Sequence

from shoal import errors
from shoal.initializers import Zeros
from shoal_nn.activations import ReLU
from shoal_nn.containers import ByFeature, Concat, Parallel, Sequential
from shoal_nn.dense import Dense, Embedding
from shoal_nn.features import Column, FeatureCross
from shoal_nn.layer import Layer


def wide_deep(
    categories: Mapping[str, int],
    numbers: Sequence[str] = (),
    crosses: Sequence[tuple[str, str]] = (),
    *,
    classes: int = 1,
    embedding: int = 8,
    hidden: Sequence[int] = (1024, 512, 256),
    cross_rows: int = 10_000,
) -> Parallel:
    """Returns a Wide & Deep model: the sum of a linear model (the wide part) and a perceptron (the deep part).

    The input is features by name, such as {"occupation": [batch], "age": [batch]}. The output is [batch, classes]
    logits. For each class, the wide part has one weight per category and one per row of a cross's table. These weights
    start at 0. The input of the deep part is the embeddings of the categories, and the numbers. Only the deep part has
    a bias.

    Variables: "wide/features/occupation/table", "wide/occupation*sex/weights/table",
    "deep/features/occupation/table", "deep/hidden0/kernel", ..., "deep/head/bias".

    Args:
        categories: number of categories of each feature. A feature with n categories has integers in [0, n).
        numbers: features with floats, ideally of about unit size.
        crosses: pairs of category features, hashed (`shoal_nn.crossed`).
        classes: number of logits; 1 for binary classification with `sigmoid_cross_entropy`.
        embedding: width of each embedding in the deep part.
        hidden: units of the deep part's hidden layers.
        cross_rows: rows of each cross's table.

    Returns:
        A model from features by name, each [batch], to logits [batch, classes].

    Raises:
        InvalidLayer: a number is out of range, there are no categories, or a cross names a feature that is not in
            `categories`.
    """
    for pair in crosses:
        if unknown := [name for name in pair if name not in categories]:
            raise errors.InvalidLayer(
                f"wide_deep: the cross of {pair[0]!r} and {pair[1]!r} needs categories, but {unknown[0]!r} is not one; "
                f"choose from {', '.join(categories)}",
                kind="wide_deep",
            )
    wide: dict[str, Layer] = {
        "features": ByFeature({name: _weights(rows, classes) for name, rows in categories.items()})
    }
    for first, second in crosses:
        cross = FeatureCross(first, second, cross_rows)
        wide[f"{first}*{second}"] = Sequential({"cross": cross, "weights": _weights(cross_rows, classes)})
    inputs: dict[str, Layer] = {name: Embedding(rows, embedding) for name, rows in categories.items()}
    inputs |= {name: Column() for name in numbers}
    deep: dict[str, Layer] = {"features": ByFeature(inputs, Concat())}
    for number, units in enumerate(hidden):
        deep |= {f"hidden{number}": Dense(units), f"relu{number}": ReLU()}
    return Parallel({"wide": Parallel(wide), "deep": Sequential({**deep, "head": Dense(classes)})})


def _weights(rows: int, classes: int) -> Embedding:
    return Embedding(rows, classes, Zeros())


__all__ = ["wide_deep"]
