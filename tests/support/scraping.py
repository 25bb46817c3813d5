"""Parser of a role's /metrics page."""

import urllib.request

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def scrape(address: str) -> dict[str, Metric]:
    """Returns all families of a page at host:port, by name."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        text = reply.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample(address: str, name: str) -> float:
    """Returns a sample's value, summed over its labels."""
    return sum(found.value for family in scrape(address).values() for found in family.samples if found.name == name)
