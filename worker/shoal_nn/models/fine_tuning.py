"""Fine-tuning of models: frozen parts and new heads."""

from shoal import errors
from shoal_nn.containers import Sequential
from shoal_nn.frozen import Frozen
from shoal_nn.layer import Layer


def frozen(net: Sequential, until: str) -> Sequential:
    """Returns the model with all parts before `until` frozen (`Frozen`). Parts and variables keep their names.

    Args:
        net: the model; parts that are frozen already stay frozen.
        until: name of the first part that is trained.

    Raises:
        InvalidLayer: there is no such part, or the model is not a Sequential.
    """
    _check("frozen", net)
    names = [name for name, _ in net.layers]
    if until not in names:
        raise errors.InvalidLayer(
            f"frozen: the model has no part {until!r}; choose from {', '.join(names)}", kind="frozen"
        )
    kept = names[: names.index(until)]
    return Sequential({name: Frozen(layer) if name in kept else layer for name, layer in net.layers})


def with_head(net: Sequential, layer: Layer, name: str = "head") -> Sequential:
    """Returns the model with another last part.

    Args:
        net: the model.
        layer: replaces the last part.
        name: name of the new part. A partial restore takes values by name, so a head with another shape, or one that
            starts from initial values, needs a new name.

    Raises:
        InvalidLayer: the model has no parts, another part has this name, or the model is not a Sequential.
    """
    _check("with_head", net)
    body = dict(net.layers[:-1])
    if not net.layers or name in body:
        raise errors.InvalidLayer(
            f"with_head: {name!r} cannot replace the last part; the other parts are {', '.join(body) or 'none'}. "
            "Choose a name that no other part has, and a model that has parts",
            kind="with_head",
        )
    return Sequential({**body, name: layer})


def _check(kind: str, net: Layer) -> None:
    if not isinstance(net, Sequential):
        raise errors.InvalidLayer(
            f"{kind}: the model is a {type(net).__name__}, which is not a Sequential; "
            "build the model from Frozen(...) and new parts yourself",
            kind=kind,
        )


__all__ = ["frozen", "with_head"]
