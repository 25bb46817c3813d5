"""Parser of a Dockerfile: its stages and their instructions, as far as the tests need them."""

import re
from dataclasses import dataclass, field


@dataclass
class Stage:
    """The part of a Dockerfile from one FROM to the next.

    Attributes:
        base: the image or the stage that it starts from.
        name: the name by which other stages or a build refer to it; may be empty.
        instructions: each with its arguments, on one line, as ("RUN", "apt-get update").
    """

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, keyword: str) -> list[str]:
        """Returns the arguments of all instructions of a kind."""
        return [arguments for found, arguments in self.instructions if found == keyword]


def stages(text: str) -> list[Stage]:
    """Returns the stages, in order, without the lines before the first FROM."""
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
