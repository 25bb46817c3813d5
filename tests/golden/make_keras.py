"""Generator of keras.json: values of Keras' layers, losses, metrics, optimizers and the like, and its arguments.

    pip install keras==3.15.1 jax==0.10.2 numpy && PYTHONPATH=tests python tests/golden/make_keras.py

The cases are in `tests/support/keras_front/cases.py`. Inputs and variables are float64, but a few operations of Keras
return float32.
"""

import inspect
import json
import operator
import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_ENABLE_X64"] = "1"

import jax
import jax.numpy as jnp
import keras
import numpy as np

from support.keras_front import cases

GRADIENTS = [cases.drawn(f"gradient {number}", (4,)) / 10 for number in range(5)]


def main() -> None:
    """Writes the file beside this script."""
    keras.config.set_floatx("float64")
    golden: dict[str, dict[str, Any]] = {
        "layers": {name: layer(name) for name in cases.LAYERS},
        "losses": {name: loss(name) for name in cases.LOSSES},
        "metrics": {name: metric(name) for name in cases.METRICS},
        "optimizers": {name: optimizer(name) for name in cases.OPTIMIZERS},
        "schedules": {
            name: [float(build(keras)(step)) for step in range(12)] for name, build in cases.SCHEDULES.items()
        },
        "constraints": {
            name: build(keras)(jnp.array(cases.drawn(name, shape)))
            for name, (build, shape) in cases.CONSTRAINTS.items()
        },
        "signatures": signatures(),
    }
    rows = ",\n".join(
        f'"{part}": {{\n' + ",\n".join(f'"{name}": {json.dumps(rounded(it))}' for name, it in found.items()) + "\n}"
        for part, found in golden.items()
    )
    Path(__file__).with_name("keras.json").write_text(f"{{\n{rows}\n}}\n")


def layer(name: str) -> dict[str, Any]:
    """Returns output, losses, gradients, and the new values of variables without gradients."""
    case, xs = cases.LAYERS[name], [jnp.array(it) for it in cases.inputs_of(name)]
    built = case.build(keras)
    fed: Any = xs if len(xs) > 1 else xs[0]
    built(fed, training=False) if "training" in inspect.signature(built.call).parameters else built(fed)
    for variable in built.weights:
        if "seed" not in variable.name and variable.dtype != "uint32":
            variable.assign(cases.weight_of(name, variable.name, tuple(variable.shape)))
    trained = [it.value for it in built.trainable_variables]
    kept = [it.value for it in built.non_trainable_variables]
    options = {"training": case.training} if "training" in inspect.signature(built.call).parameters else {}
    output, after, losses = called(built, trained, kept, fed, options)
    weights = cases.drawn(f"{name} dy", tuple(output.shape))

    def total(trained: Any, fed: Any) -> Any:
        output, _, losses = called(built, trained, kept, fed, options)
        return (output * weights).sum() + sum(losses)

    found = jax.grad(total)(trained, fed)
    dx = [] if case.rows else jax.grad(total, 1)(trained, fed)
    state = [
        it for it, variable in zip(after, built.non_trainable_variables, strict=True) if variable.dtype != "uint32"
    ]
    return {
        "output": output,
        **({"losses": losses} if losses else {}),
        "gradients": list(found),
        "dx": dx if isinstance(dx, list) else [dx],
        "state": [] if name == "normalization" else state,
    }


def called(layer: Any, trained: list[Any], kept: list[Any], fed: Any, options: dict[str, bool]) -> Any:
    """Returns output, new state and losses. `stateless_call` leaves out the losses of activities."""
    variables = [*layer.trainable_variables, *layer.non_trainable_variables]
    with keras.StatelessScope(
        state_mapping=list(zip(variables, [*trained, *kept], strict=True)), collect_losses=True
    ) as scope:
        output, losses = layer(fed, **options), layer.losses
    return output, [scope.get_current_value(it) for it in layer.non_trainable_variables], losses


def loss(name: str) -> dict[str, Any]:
    """Returns the loss with weights, and its gradient."""
    build, kind = cases.LOSSES[name]
    labels, outputs, weights = cases.answers_of(kind)
    computed = build(keras)
    return {
        "value": computed(labels, jnp.array(outputs)),
        "weighted": computed(labels, jnp.array(outputs), weights),
        "gradient": jax.grad(lambda y: computed(labels, y, weights).sum())(jnp.array(outputs)),
    }


def metric(name: str) -> list[float]:
    """Returns the metric of one batch, and of two, the second with weights."""
    build, kind = cases.METRICS[name]
    counted, found = build(keras), []
    for part in range(2):
        labels, outputs, weights = cases.answers_of(kind, part)
        counted.update_state(labels, outputs, weights if part else None)
        found.append(float(counted.result()))
    return found


def optimizer(name: str) -> list[Any]:
    """Returns a variable after each update."""
    build = cases.OPTIMIZERS[name]
    variable, made, found = keras.Variable(cases.drawn("variable", (4,))), build(keras), []
    for gradient in GRADIENTS:
        made.apply([jnp.array(gradient)], [variable])
        found.append(np.asarray(variable.value))
    return found


def signatures() -> dict[str, Any]:
    """Returns the arguments of all classes and of some methods, by "module.class" and "class.method"."""
    found = {}
    for module in cases.SIGNATURES:
        for name, it in vars(operator.attrgetter(module)(keras)).items():
            if inspect.isclass(it):
                found[f"{module}.{name}"] = arguments(it.__init__)
    for owner, names in cases.METHODS.items():
        for name in names:
            found[f"{owner}.{name}"] = arguments(getattr(getattr(keras, owner), name))
    return found


def arguments(function: Any) -> list[list[Any]]:
    """Returns the names of the arguments, each with its default if it has one that JSON can hold."""
    parameters = [it for it in inspect.signature(function).parameters.values() if it.name != "self"]
    named = [it for it in parameters if it.kind in {it.POSITIONAL_OR_KEYWORD, it.KEYWORD_ONLY}]
    return [[it.name, it.default] if plain(it.default) else [it.name] for it in named]


def plain(value: Any) -> bool:
    """Returns whether JSON can hold a default."""
    return isinstance(value, str | int | float | bool | tuple | None)


def rounded(value: Any) -> Any:
    """Returns a value as JSON holds it: numbers with ten digits."""
    if isinstance(value, dict):
        return {name: rounded(it) for name, it in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(it) for it in value]
    if isinstance(value, str | bool | int | None):
        return value
    array = np.asarray(value)
    return float(f"{float(array):.10g}") if array.ndim == 0 else [rounded(it) for it in array]


if __name__ == "__main__":
    main()
