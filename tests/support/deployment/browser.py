"""Installed Chromium, driven by Playwright."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.deployment.needed_programs import need

# As root and without a GPU, and nothing that asks the network.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-pings"]


@contextmanager
def browser() -> Iterator[Any]:
    """Yields a headless browser. Skips the test if there is none."""
    program = need("chromium", "chromium-browser", source="Debian has it in the package chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright here: install shoal[e2e]")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()
