"""What a pass of a pair has come to, from its turns and from what the nodes have counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tools.bench.policies.load import Turn
from tools.demo.metrics import Reading

SOURCES = {
    "computed": "local_compute",
    "own_cache": "local_cache_hit",
    "from_peer": "external_kv_transfer",
}
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_SERVED = "vllm:request_success_total"
_TURNS = "bidir_router_turns_total"


@dataclass(frozen=True)
class Counted:
    """All nodes' metrics at one moment, by name, such as `prefill-0`."""

    nodes: Mapping[str, Reading]

    def grown(self, before: Counted) -> dict[str, dict[str, int]]:
        """By node: turns served, and prompt tokens by where their KV came from."""
        return {
            name: {
                "turns": round(after.growth(before.nodes[name], _SERVED)),
                **_by_source(before.nodes[name], after),
            }
            for name, after in self.nodes.items()
        }


def _by_source(before: Reading, after: Reading) -> dict[str, int]:
    grown = after.grown(before, _BY_SOURCE)
    return {
        key: round(sum(one.value for one in grown if one.label("source") == source))
        for key, source in SOURCES.items()
    }


def reuse(router: Reading) -> dict[str, int]:
    """The router's turns: `hit`, and the misses by reason. It has counted from 0."""
    return {
        one.label("reason") or one.label("outcome"): round(one.value)
        for one in router.samples
        if one.name == _TURNS
    }


def times(turns: Sequence[Turn]) -> dict[str, float]:
    """ms over these turns; 0 of none."""
    ttft = sorted(turn.ttft_ms for turn in turns)
    whole = sorted(turn.turn_ms for turn in turns)
    return {
        "turns": len(turns),
        "ttft_p50_ms": median(ttft) if ttft else 0.0,
        "ttft_p99_ms": at(ttft, 0.99),
        "turn_p50_ms": median(whole) if whole else 0.0,
        "turn_p99_ms": at(whole, 0.99),
    }


def at(values: Sequence[float], share: float) -> float:
    """The value of sorted `values` below which that share of them lies; 0 of none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def summary(made: Mapping[str, Any], pair: str) -> dict[str, float]:
    """A pair's figures over all its passes.

    `spread`: how far the passes' median TTFT lie apart, as a share of the median of all; `balance`:
    the busiest node's share of its role's tokens computed (P) or turns (D), 0.5 of two is even.
    """
    passes = [one for one in made["passes"] if one["pair"] == pair]
    turns = [Turn(**turn) for one in passes for turn in one["turns"]]
    medians = [times([Turn(**turn) for turn in one["turns"]])["ttft_p50_ms"] for one in passes]
    nodes: dict[str, dict[str, int]] = {}
    for one in passes:
        for name, counts in one["nodes"].items():
            sums = nodes.setdefault(name, dict.fromkeys(counts, 0))
            for key, value in counts.items():
                sums[key] += value
    p = [counts for name, counts in nodes.items() if name.startswith("prefill")]
    d = [counts for name, counts in nodes.items() if name.startswith("decode")]
    found = times(turns)
    hits = sum(one["reuse"].get("hit", 0) for one in passes)
    return {
        **found,
        "later_ttft_p50_ms": times([one for one in turns if one.number > 1])["ttft_p50_ms"],
        "spread": (max(medians) - min(medians)) / found["ttft_p50_ms"],
        "hit_share": hits / len(turns),
        "seconds": sum(one["seconds"] for one in passes) / len(passes),
        **{f"p_{key}": sum(one[key] for one in p) / len(passes) for key in SOURCES},
        "d_from_peer": sum(one["from_peer"] for one in d) / len(passes),
        "d_own_cache": sum(one["own_cache"] for one in d) / len(passes),
        "p_balance": _largest_share([one["computed"] for one in p]),
        "d_balance": _largest_share([one["turns"] for one in d]),
    }


def _largest_share(values: Sequence[int]) -> float:
    return max(values) / sum(values) if sum(values) else 0.0
