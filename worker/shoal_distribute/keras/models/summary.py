"""Table of a model's layers."""

import sys
from collections.abc import Callable
from typing import Any


def summary_of(model: Any, width: int, write: Callable[[str], Any] | None) -> None:
    """Writes the table.

    Args:
        model: the model, a `keras.Model`.
        width: width of the table.
        write: what is called with the text; None means standard output.
    """
    shapes = _output_shapes(model)
    rows = [
        (f"{layer.name} ({type(layer).__name__})", shapes.get(id(layer), "?"), f"{layer.count_params():,}")
        for layer in model.layers
    ]
    trained = sum(_size(it) for it in model.trainable_variables)
    total = model.count_params()
    first, second = width // 2, width // 3
    line = "=" * width
    text = [f'Model: "{model.name}"', line, f"{'Layer (type)':<{first}}{'Output Shape':<{second}}Param #", line]
    text += [f"{name[: first - 1]:<{first}}{shape:<{second}}{count}" for name, shape, count in rows]
    text += [line, f"Total params: {total:,}", f"Trainable params: {trained:,}"]
    text.append(f"Non-trainable params: {total - trained:,}")
    (write or (lambda whole: sys.stdout.write(whole + "\n")))("\n".join(text))


def _output_shapes(model: Any) -> dict[int, str]:
    found = {id(it.input_layer): str(it.shape) for it in model.inputs}
    todo = list(model.outputs)
    while todo:
        symbol = todo.pop()
        if symbol.call and id(symbol.call.layer) not in found:
            found[id(symbol.call.layer)] = str(symbol.shape)
            todo += symbol.call.tensors
    return found


def _size(variable: Any) -> int:
    size = 1
    for length in variable.shape:
        size *= length
    return size


__all__ = ["summary_of"]
