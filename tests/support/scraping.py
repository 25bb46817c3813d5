"""Parser of a role's /metrics page."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from shoal._system import private_files


def scrape(address: str) -> dict[str, Metric]:
    """Returns all families of a page at host:port, by name.

    It presents the tokens that coordinators have given this user, one after the other.
    """
    for token in ("", *_tokens()):
        request = urllib.request.Request(f"http://{address}/metrics", headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                text = reply.read().decode()
            break
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
    else:
        raise AssertionError(f"no token of this user may read the metrics of {address}")
    return {family.name: family for family in text_string_to_metric_families(text)}


def _tokens() -> list[str]:
    """The admin's token in each access file, the newest file first."""
    files = (private_files.state_folder() / "access").glob("*.json")
    return [json.loads(file.read_text())["admin"] for file in sorted(files, key=_age)]


def _age(file: Path) -> float:
    return -file.stat().st_mtime


def sample(address: str, name: str) -> float:
    """Returns a sample's value, summed over its labels."""
    return sum(found.value for family in scrape(address).values() for found in family.samples if found.name == name)
