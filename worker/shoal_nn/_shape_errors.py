"""What is said of an array that a layer, a loss or a metric does not take."""

from shoal import errors


def shape_error(layer: str, kind: str, what: str, got: str, wants: str, change: str) -> errors.InvalidShape:
    """The error, whose details are these arguments.

    Args:
        layer: its path in the model; empty for a layer by itself; of a function, that has none, its kind.
        kind: the class's name, or the function's.
        what: it got: "samples of shape".
        got: of that: "(3, 4)".
        wants: instead.
        change: what may be at fault.
    """
    where = {"": f"layer {kind}", kind: kind}.get(layer, f"layer {layer!r} ({kind})")
    return errors.InvalidShape(
        f"{where} got {what} {got}, and wants {wants}; change {change}",
        layer=layer,
        kind=kind,
        what=what,
        got=got,
        wants=wants,
        change=change,
    )


__all__ = ["shape_error"]
