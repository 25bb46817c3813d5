"""Random numbers for pauses and names, which leave the generators to the user's program."""

import random
from pathlib import Path

from shoal._job.names import draw_name
from shoal._rpc.backoff import Backoff

ROOT = Path(__file__).parents[4]


def test_a_seed_of_the_user_gives_the_same_numbers_beside_shoal() -> None:
    random.seed(0)
    wanted = random.random()
    random.seed(0)
    names = [draw_name("digits:Digits")]
    Backoff().next()
    assert random.random() == wanted
    random.seed(0)
    assert draw_name("digits:Digits") not in names


def test_no_module_uses_the_global_generator() -> None:
    files = [path for room in ("client", "server", "worker") for path in (ROOT / room).rglob("*.py")]
    own = {"SystemRandom", "Random"}  # classes
    users = [
        f"{path}: random.{part}"
        for path in files
        for text in [path.read_text()]
        if "\nimport random\n" in text
        for part in [it.split("(")[0].split()[0] for it in text.split(" random.")[1:]]
        if part not in own and not part.startswith(tuple(own))
    ]
    assert not users
