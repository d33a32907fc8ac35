"""What the dashboard and docs/operations.md ask Prometheus for can be asked, and is there.

A parser that follows Prometheus' own says whether an expression is one; the routers' and the
engines' registries say which series there are, and what kind each is.
"""

from __future__ import annotations

import re

import promql_parser as promql
import pytest
from prometheus_client import CollectorRegistry
from vllm.bidir.router.options import RouterOptions
from vllm.bidir.router.router import Router

from tests.connector.prom_metrics import prom_metrics
from tests.deploy.test_metrics import ROOT, dashboard, targets

# By the kind of a metric; only of those that grow for ever a rate says something.
SERIES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}
# Counted on D, since it has begun; vLLM's gauges are how a connector shows what it has summed up.
GROWING = {f"vllm:bidir_lease_{word}" for word in ("released", "reclaimed", "expired")} | {
    "vllm:bidir_lease_refusals",
    "vllm:bidir_lease_renewals",
}


@pytest.fixture(scope="module")
def kinds() -> dict[str, str]:
    """By the name of each series that a router or an engine shows: its kind."""
    engine = CollectorRegistry()
    prom_metrics(engine)
    both = (Router(RouterOptions((), ())).metrics.registry, engine)
    found = {
        family.name + suffix: "counter" if family.name in GROWING else family.type
        for registry in both
        for family in registry.collect()
        for suffix in SERIES.get(family.type, ())
    }
    assert {"bidir_router_turns_total", "vllm:bidir_tokens_total", *GROWING} <= found.keys()
    return found


def of_dashboard() -> list[str]:
    """A Grafana variable stands for what Grafana puts there."""
    asked = [one["expr"] for panel in dashboard()["panels"] for one in targets(panel)]
    return [expression.replace("$__rate_interval", "1m") for expression in asked]


def of_operations() -> list[str]:
    """Code that computes something: what only names a metric may name the words of a label."""
    page = (ROOT / "docs/operations.md").read_text()
    return [code for code in re.findall(r"`([^`]+)`", page) if re.search(r"\w\(|[<>=] \d", code)]


def selected(expression: str) -> list[tuple[str, bool]]:
    """The series that it asks for, and whether over some time."""
    found: list[tuple[str, bool]] = []
    depth = 0

    def enter(part: promql.Expr) -> None:
        nonlocal depth
        depth += isinstance(part, promql.MatrixSelector)
        if isinstance(part, promql.VectorSelector):
            found.append((part.name, depth > 0))

    def leave(part: promql.Expr) -> None:
        nonlocal depth
        depth -= isinstance(part, promql.MatrixSelector)

    promql.walk(promql.parse(expression), enter, leave)
    return found


@pytest.mark.parametrize("expression", [*of_dashboard(), *of_operations()])
def test_prometheus_understands_it_and_finds_what_it_asks_for(
    expression: str, kinds: dict[str, str]
) -> None:
    assert selected(expression)
    for name, over_time in selected(expression):
        assert name in kinds
        # What grows is of use as a rate, and a rate is of use where something grows.
        assert over_time is (kinds[name] != "gauge")


def test_both_ask_for_something() -> None:
    assert len(of_dashboard()) > 50 and len(of_operations()) > 5


@pytest.mark.parametrize(
    "wrong", ["sum(rate(a_total[5m])", "rate(a_total)", "sum by (x rate(a_total[5m])", "a > > 1"]
)
def test_what_is_no_expression_is_seen(wrong: str) -> None:
    with pytest.raises(ValueError):
        promql.parse(wrong)
