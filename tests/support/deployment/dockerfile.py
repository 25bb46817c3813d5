"""Parser of a Dockerfile: its stages and their instructions, as far as the tests need them."""

import re
from dataclasses import dataclass, field


@dataclass
class Stage:
    """What stands between one FROM and the next.

    Attributes:
        base: an image, or the stage it goes on from.
        name: by which others copy from it, or a build asks for it; may be empty.
        instructions: each with its arguments, on one line, as ("RUN", "apt-get update").
    """

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, keyword: str) -> list[str]:
        """The arguments of all instructions of a kind."""
        return [arguments for found, arguments in self.instructions if found == keyword]


def stages(text: str) -> list[Stage]:
    """The stages, in order; what stands before the first FROM is left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        keyword, _, arguments = line.strip().partition(" ")
        if keyword == "FROM":
            base, _, name = arguments.partition(" AS ")
            found.append(Stage(base, name))
        elif keyword and found:
            found[-1].instructions.append((keyword, arguments.strip()))
    return found
