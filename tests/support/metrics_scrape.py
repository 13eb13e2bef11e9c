"""Reads the monitoring port of a process."""

import urllib.error
import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.support.protection import https_context

SECONDS = 20.0


class Answer(NamedTuple):
    status: int
    text: str


class Metrics:
    """One scrape of /metrics."""

    def __init__(self, address: str) -> None:
        answer = get(address, "/metrics")
        assert answer.status == 200
        families = list(text_string_to_metric_families(answer.text))
        self._samples = [sample for family in families for sample in family.samples]
        self.names = {sample.name for sample in self._samples}

    def __call__(self, name: str, /, **labels: str) -> float:
        """Return the sum of the series with this name (including suffixes such as _total) and
        labels.
        """
        found = [
            s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()
        ]
        assert found, f"no series {name} with {labels}"
        return sum(found)

    def labels(self, name: str) -> list[dict[str, str]]:
        return [dict(sample.labels) for sample in self._samples if sample.name == name]


def get(address: str, path: str) -> Answer:
    context = https_context()
    url = f"{'http' if context is None else 'https'}://{address}{path}"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS, context=context) as response:
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode())
