"""The dashboard and docs/operations.md speak of the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "overlay/vllm/bidir"
DASHBOARD = ROOT / "deploy/grafana/vllm-bidir.json"
_NAME = re.compile(r"(?:bidir_router|vllm:bidir)_[a-z_]+")
# What Prometheus' client adds to the names of counters and histograms.
_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def defined() -> set[str]:
    """The metrics of the sources, as they are named there."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    names = {name for text in texts.values() for name in re.findall(f'"({_NAME.pattern})"', text)}
    gauges = texts[SOURCES / "connector/lease_gauges.py"]
    names |= {f"vllm:bidir_{name}" for name in re.findall(r'^    "(lease\w*)": "', gauges, re.M)}
    return names - {"vllm:bidir_"}


def used(text: str) -> set[str]:
    return {_SUFFIX.sub("", name) for name in _NAME.findall(text)}


def dashboard() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return made


def test_there_are_metrics_of_all_three() -> None:
    assert {"bidir_router_turns", "vllm:bidir_read_back", "vllm:bidir_leases"} <= defined()


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert defined() - used(page) == set()


def reasons() -> dict[str, str]:
    """All reasons, by the names that the sources give them."""
    text = (SOURCES / "reasons.py").read_text(encoding="utf-8")
    return dict(re.findall(r'^    ([A-Z_]+) = "(\w+)"', text, re.M))


def named_in(expression: str, *files: str) -> set[str]:
    """What an expression finds in modules of the router; of reasons their words."""
    by_name = {name: list((SOURCES / "router").rglob(name)) for name in files}
    assert all(by_name.values()), by_name
    paths = [path for found in by_name.values() for path in found]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    found = {word for text in texts for word in re.findall(expression, text)}
    return {reasons().get(word, word) for word in found}


# By metric and label: the words that it can have, by the code that gives them.
WORDS: dict[str, set[str]] = {
    "turns_total{outcome,reason}": {"hit", "budget"}
    | (named_in(r"Reason\.([A-Z_]+)", "conversations.py", "recall.py", "legs.py"))
    | named_in(r"found\b.* = Reason\.([A-Z_]+)", "turns.py"),
    "decode_alone_total{reason}": named_in(r"decode_alone\(Reason\.([A-Z_]+)", "*_leg.py")
    | named_in(r"Reason\.(BYPASS_\w+)", "*.py"),
    "params_asked_total{outcome}": {"found"} | named_in(r"Reason\.([A-Z_]+)", "recall.py"),
    "lease_releases_total{reason}": named_in(r'(?m)^    [A-Z]+ = "(\w+)"', "leases.py"),
    "refused_total{role,reason}": named_in(r'\.refused\([^()]+, "(\w+)"\)', "*.py"),
    "state_failures_total{kind}": named_in(
        r'(?:complain\(|state_failure\(|kind = |else )"(\w+)"',
        "redis_link.py",
        "shared.py",
        "lines.py",
    ),
    "prompt_tokens_total{kind}": named_in(r'_prompt_tokens\.count\("(\w+)"', "metrics.py"),
    "identified_total{by}": named_in(r'(?:return \S+, |else )"(\w+)"', "identity.py")
    | named_in(r'identified\("(\w+)"', "turns.py"),
}


@pytest.mark.parametrize("metric", WORDS)
def test_every_word_of_a_label_is_explained_with_its_metric(metric: str) -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `bidir_router_{metric}`"))
    assert len(WORDS[metric]) > 1
    assert {word for word in WORDS[metric] if f"`{word}`" not in row} == set()


def test_every_reason_is_explained_somewhere() -> None:
    pages = ("operations.md", "router.md", "verified-reuse.md", "failure-modes.md", "leases.md")
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages]
    assert {word for word in reasons().values() if f"`{word}`" not in " ".join(texts)} == set()


def test_every_metric_is_on_the_dashboard_and_no_other() -> None:
    shown = used(" ".join(one["expr"] for panel in dashboard()["panels"] for one in targets(panel)))
    assert shown == defined()


def test_no_share_counts_tokens_twice() -> None:
    """Those that were read are among the verified."""
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert "bidir_tokens_total{" in page and "bidir_tokens_total[" not in page


def targets(panel: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = panel.get("targets", [])
    return found


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and targets(panel)
            assert all(one["datasource"]["uid"] == "${datasource}" for one in targets(panel))
