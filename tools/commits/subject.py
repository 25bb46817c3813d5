"""The rule for a commit's subject, as a commit-msg hook: at most 72 characters, a capital first, no full stop.

Whether the subject is in the imperative is for a reviewer to see.
"""

import sys
from pathlib import Path

LONGEST = 72
# Git writes these itself.
_EXEMPT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def faults(message: str) -> list[str]:
    """Returns what is wrong with the subject of a commit message, and what to do; empty if it is right."""
    subject, *rest = message.rstrip("\n").split("\n")
    if subject.startswith(_EXEMPT):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, {LONGEST} at most: move the reason to the body")
    if not subject[:1].isupper():
        found.append("the subject begins with a capital: 'Fence a worker before its rank is reassigned'")
    if subject.endswith("."):
        found.append("the subject ends without a full stop")
    if rest and rest[0].strip() and not rest[0].startswith("#"):
        found.append("the line after the subject is empty")
    return found


if __name__ == "__main__":
    if wrong := faults(Path(sys.argv[1]).read_text()):
        raise SystemExit("\n".join(wrong))
