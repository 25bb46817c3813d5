"""Metrics of a role's process."""

import gc
from dataclasses import dataclass

import prometheus_client
import pytest

from shoal._role import process_metrics


@dataclass(frozen=True)
class Message:
    text: str


def allocated_blocks(registry: prometheus_client.CollectorRegistry) -> int:
    gc.collect()  # also frees the interpreter's lists of unused objects
    blocks = registry.get_sample_value("python_allocated_blocks")
    assert blocks is not None
    return int(blocks)


def match(messages: int) -> list[Message]:
    """Matches messages. Each match looks `__match_args__` up by a new string, which the cache of attributes keeps."""
    kept = []
    for number in range(messages):
        match Message(f"text {number}"):
            case Message(text):
                kept.append(Message(text))  # so that the next string has another address, and thus another entry
    return kept


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    process_metrics.register(registry)
    return registry


def test_names_in_the_cache_of_attributes_are_no_allocated_blocks(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    allocated_blocks(registry)
    before = allocated_blocks(registry)
    match(5_000)
    assert allocated_blocks(registry) - before < 20


def test_objects_that_live_are_allocated_blocks(registry: prometheus_client.CollectorRegistry) -> None:
    allocated_blocks(registry)
    before = allocated_blocks(registry)
    kept = match(5_000)
    assert allocated_blocks(registry) - before > len(kept)
