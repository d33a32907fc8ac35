"""Prometheus metrics as text, and how much they grew."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from tools.demo.errors import DemoError

_TIMEOUT_S = 30.0
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? +(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line: a name, its labels, a value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def label(self, name: str) -> str:
        """A label's value, empty when there is none."""
        return dict(self.labels).get(name, "")


class Reading:
    """All samples of one process at one moment."""

    def __init__(self, text: str) -> None:
        self.samples = tuple(_samples(text))
        self._values = {(s.name, s.labels): s.value for s in self.samples}

    def total(self, name: str) -> float:
        """Sum over all labels; 0 when nothing was counted yet, as for a label never used."""
        return sum(sample.value for sample in self.samples if sample.name == name)

    def growth(self, before: Reading, name: str) -> float:
        """How much the total grew since ``before``."""
        return self.total(name) - before.total(name)

    def grown(self, before: Reading, name: str) -> list[Sample]:
        """The samples of that name that grew, by how much as their value."""
        return [
            Sample(name, sample.labels, growth)
            for sample in self.samples
            if sample.name == name
            and (growth := sample.value - before._values.get((name, sample.labels), 0.0)) > 0
        ]


def read_metrics(url: str) -> Reading:
    """The metrics that the process at ``url`` (no path) shows; raises DemoError."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode("utf-8")
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"{url}/metrics cannot be read: {error}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise DemoError(f"{url}/metrics answered {response.status}, expected 200")
    return Reading(text)


def _samples(text: str) -> Iterator[Sample]:
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is not None:
            labels = tuple((name, value) for name, value in _LABEL.findall(found[2] or ""))
            yield Sample(found[1], labels, float(found[3]))
