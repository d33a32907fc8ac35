# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of what every turn counts.

prometheus_client's own are for any thread, and take five calls and a lock for each count. These are
for the one thread that serves, and become its families when somebody asks for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter. `by_labels`: how often, for each combination of labels that has been counted."""

    def __init__(
        self, name: str, help_: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self.by_labels: dict[tuple[str, ...], int] = {}
        self._name = name
        self._help = help_
        self._labels = labels
        registry.register(self)

    def count(self, *labels: str, by: int = 1) -> None:
        """Count what has these labels."""
        self.by_labels[labels] = self.by_labels.get(labels, 0) + by

    def collect(self) -> Iterable[CounterMetricFamily]:
        """As prometheus_client wants it."""
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, number in self.by_labels.items():
            family.add_metric(labels, number)
        yield family


class Durations(Collector):
    """A histogram of seconds, with one label or none. `bounds` of its buckets, ascending."""

    def __init__(
        self,
        name: str,
        help_: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: str | None = None,
    ) -> None:
        self._name = name
        self._help = help_
        self._bounds = bounds
        self._label = label
        # Below each bound and above all of them; what is without a label is there from the start.
        self._counts: dict[str, list[int]] = {} if label else {"": [0] * (len(bounds) + 1)}
        self._sums: dict[str, float] = {} if label else {"": 0.0}
        registry.register(self)

    def observe(self, seconds: float, label: str = "") -> None:
        """One more took so long."""
        counts = self._counts.get(label)
        if counts is None:
            counts = self._counts[label] = [0] * (len(self._bounds) + 1)
            self._sums[label] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[label] += seconds

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """As prometheus_client wants it: buckets that hold the smaller ones, too."""
        names = [] if self._label is None else [self._label]
        family = HistogramMetricFamily(self._name, self._help, labels=names)
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        for label, counts in self._counts.items():
            so_far = [sum(counts[: number + 1]) for number in range(len(counts))]
            values = [label] if names else []
            family.add_metric(values, list(zip(ends, so_far, strict=True)), self._sums[label])
        yield family
