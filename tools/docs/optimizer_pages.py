"""The reference of the optimizers' slots, from the classes of `shoal.optim`."""

import math
from collections.abc import Iterator

from markdown_text import code, page, table, text

from shoal import optim
from shoal.optim import Slot


def pages() -> dict[str, str]:
    """Returns the page of the slots of all optimizers."""
    lines = [
        "# Slots of optimizers",
        "",
        "A slot is an array that the servers keep beside each trainable variable, in its shape and dtype; float16 and",
        "bfloat16 variables have float32 slots. These names are those of `Optimizer.slots`, `OptimizerState`, the",
        "tensors in checkpoints, and `PullRequest.slot` of the protocol. A name is never used with another meaning.",
        "[State of an optimizer](../../how-to/optimizer-state.md) shows how to give and get slots.",
        "",
        "The letter is that in the equation of the [optimizer](../python/shoal-optim.md). A slot that an argument",
        "turns on does not exist without it.",
        "",
        *table(["optimizer", "slot", "letter", "exists", "first value", "smallest value"], _rows()),
    ]
    return {"reference/optimizers/index.md": page(lines)}


def _rows() -> Iterator[list[str]]:
    for kind in optim.Optimizer.registry.values():
        for it in kind.possible_slots or [Slot("", "")]:
            yield [code(kind.__name__), *(_cells(it) if it.name else ["none", "", "", "", ""])]


def _cells(slot: Slot) -> list[str]:
    exists = f"with {code(slot.only_with)}" if slot.only_with else "always"
    least = "" if slot.least == -math.inf else text(f"{slot.least:g}")
    return [code(slot.name), slot.letter, exists, code(slot.initial) if slot.initial else "0", least]
