"""Text for terminals, without the control characters in it."""

# What a terminal would act on instead of showing it: C0 without tab and newline, DEL, C1, and the marks that reverse
# the direction of text. Log lines and reasons come from users' programs.
_CONTROLS = dict.fromkeys(
    [
        *(it for it in range(0x20) if it not in (0x09, 0x0A)),
        *range(0x7F, 0xA0),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
    ]
)


def printable(text: str) -> str:
    """Returns a text without the control characters that a terminal would act on; tabs and newlines stay."""
    return text if text.isprintable() else text.translate(_CONTROLS)


__all__ = ["printable"]
