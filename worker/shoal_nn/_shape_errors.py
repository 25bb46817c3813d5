"""Errors for arrays that a layer, a loss or a metric does not accept."""

from shoal import errors


def shape_error(layer: str, kind: str, what: str, got: str, wants: str, change: str) -> errors.InvalidShape:
    """Returns the error for an array of the wrong shape. Its details are the arguments.

    Args:
        layer: the layer's path in the model; empty for a single layer; for a function, the same as `kind`.
        kind: name of the class or function.
        what: what it got, such as "samples of shape".
        got: the value that it got, such as "(3, 4)".
        wants: the value that it needs.
        change: what the user can change.
    """
    where = {"": f"layer {kind}", kind: kind}.get(layer, f"layer {layer!r} ({kind})")
    return errors.InvalidShape(
        f"{where} got {what} {got}, but needs {wants}; change {change}",
        layer=layer,
        kind=kind,
        what=what,
        got=got,
        wants=wants,
        change=change,
    )


__all__ = ["shape_error"]
