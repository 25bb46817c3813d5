"""What makes of a model one for another task: a part that stays as it is, and a new head."""

from shoal import errors
from shoal_nn.containers import Sequential
from shoal_nn.frozen import Frozen
from shoal_nn.layer import Layer


def frozen(net: Sequential, until: str) -> Sequential:
    """The same model, of whose parts those before one are frozen (`Frozen`), with their names.

    Args:
        net: what was trained; a part that is frozen already stays so.
        until: the first part that is trained.

    Raises:
        InvalidLayer: there is no such part, or the model's parts do not come one after the other.
    """
    _check("frozen", net)
    names = [name for name, _ in net.layers]
    if until not in names:
        raise errors.InvalidLayer(f"frozen: there is no {until!r}; choose of {', '.join(names)}", kind="frozen")
    kept = names[: names.index(until)]
    return Sequential({name: Frozen(layer) if name in kept else layer for name, layer in net.layers})


def with_head(net: Sequential, layer: Layer, name: str = "head") -> Sequential:
    """The same model with another last part.

    Args:
        net: what was trained.
        layer: takes the last part's place.
        name: of the new part. A partial restore takes values by name: where the head has another shape than before it
            has to have another name, and where it is to begin anew, too.

    Raises:
        InvalidLayer: the model has no part, or another of this name, or its parts do not come one after the other.
    """
    _check("with_head", net)
    body = dict(net.layers[:-1])
    if not net.layers or name in body:
        raise errors.InvalidLayer(
            f"with_head: a head {name!r} takes no last part's place among {', '.join(body) or 'none'}; "
            "give it a name that no other part has, in a model that has parts",
            kind="with_head",
        )
    return Sequential({**body, name: layer})


def _check(who: str, net: Layer) -> None:
    if not isinstance(net, Sequential):
        raise errors.InvalidLayer(
            f"{who}: the model is a {type(net).__name__}, whose parts do not come one after the other; take apart what "
            "it is made of, and put Frozen(...) and new parts in by hand",
            kind=who,
        )


__all__ = ["frozen", "with_head"]
