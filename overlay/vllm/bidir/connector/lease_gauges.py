# SPDX-License-Identifier: Apache-2.0
"""Gauges of what leases keep on a decode node.

They are set by the statistics of a step, and by every answer to a call about leases: an engine that
only keeps turns rests, and has no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

PREFIX = "vllm:bidir_"
_ABOUT = {
    "leases": "Finished turns that are kept for their conversations.",
    "lease_blocks": "KV blocks that leases keep, each once.",
    "lease_holds": "Reads that pin a lease at this moment.",
    "lease_budget_used": "Share of the lease budget that is in use.",
    "lease_oldest_seconds": "Age of the oldest lease.",
    "lease_renewals": "Renewals since the engine started.",
    "lease_refusals": "Turns that were not kept because of the budget, since the engine started.",
    "lease_reclaimed": "Leases ended because running requests needed blocks, since the start.",
    "lease_expired": "Leases that ran out, since the engine started.",
    "lease_released": "Leases that were given back, since the engine started.",
}


class LeaseGauges:
    """One gauge for each of the above, for each engine."""

    def __init__(
        self,
        gauge: Callable[..., Any],
        labelnames: list[str],
        labels_of: Mapping[int, list[object]],
    ) -> None:
        self._labels_of = labels_of
        self._gauges = {
            name: gauge(
                name=PREFIX + name,
                documentation=about,
                multiprocess_mode="mostrecent",
                labelnames=labelnames,
            )
            for name, about in _ABOUT.items()
        }

    def show(self, engine_index: int, totals: Mapping[str, Any]) -> None:
        """`totals` as the engine tells them (scheduler.totals)."""
        labels = self._labels_of.get(engine_index)
        if labels is None:
            return  # an engine that came later than the metrics
        budget = totals["budget_blocks"]
        values = {
            "leases": totals["leases"],
            "lease_blocks": totals["blocks"],
            "lease_holds": totals["holds"],
            "lease_budget_used": totals["blocks"] / budget if budget else 0.0,
            "lease_oldest_seconds": totals["oldest_s"] or 0.0,
            "lease_renewals": totals["renewals"],
            "lease_refusals": totals["refused"],
            "lease_reclaimed": totals["reclaimed"],
            "lease_expired": totals["expired"],
            "lease_released": totals["released"],
        }
        for name, value in values.items():
            self._gauges[name].labels(*labels).set(value)
