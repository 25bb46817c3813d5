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
    """A linear model of categories and of pairs of them, and a perceptron of their embeddings and of numbers, added up.

    It is fed features by name, {"occupation": [batch], "age": [batch]}, and gives [batch, classes] logits. The wide
    part has a weight, which begins with 0, for each category or hashed pair and each class; the deep part has the one
    bias of both. Variables: "wide/features/occupation/table", "wide/occupation*sex/weights/table",
    "deep/features/occupation/table", "deep/hidden0/kernel", ..., "deep/head/bias".

    Args:
        categories: how many there are, by feature: whole numbers from [0, that many).
        numbers: features that are floats, best of about unit size.
        crosses: pairs of the categories, hashed (`shoal_nn.crossed`).
        classes: logits; 1 for a yes or no, with `sigmoid_cross_entropy`.
        embedding: width of each category's vector in the deep part.
        hidden: units of the deep part's hidden layers.
        cross_rows: of each cross's table.

    Raises:
        InvalidLayer: a number is out of its range, there is no category, or a cross is not of two of them.
    """
    for pair in crosses:
        if unknown := [name for name in pair if name not in categories]:
            raise errors.InvalidLayer(
                f"wide_deep: the cross of {pair[0]!r} and {pair[1]!r} is of categories, and {unknown[0]!r} is none; "
                f"choose of {', '.join(categories)}",
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
