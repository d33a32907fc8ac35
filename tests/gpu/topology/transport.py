"""Which way KV went between the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.gpu.client import decisions
from tests.gpu.topology.findings import Findings
from tools.bench.gpu.engines import telling
from tools.cluster import Engine
from tools.demo.metrics import read_metrics

_RATE = "vllm:bidir_peer_gigabytes_per_second"
_BYTES = "vllm:bidir_transfer_bytes_total"


def transport(engines: Sequence[Engine], on_gpus: bool, findings: Findings) -> None:
    """Counters of all that still run; on GPUs every one of them must have copied between GPUs."""
    alive = [one for one in engines if one.is_alive()]
    by_node = {one.name: decisions(one.url) for one in alive if one.role == "prefill"}
    findings.figures["decisions"] = by_node
    findings.figures["bytes"] = {one.name: _by_label(one.url, _BYTES) for one in alive}
    findings.figures["gigabytes per second of the last read"] = {
        one.name: _by_label(one.url, _RATE) for one in alive
    }
    refused = {
        name: {reason: found[reason] for reason in ("slow_link", "unsupported") if reason in found}
        for name, found in by_node.items()
    }
    findings.check("link used by every P", not any(refused.values()), f"{refused}")
    lines = telling(engines)
    findings.figures["log"] = lines
    if on_gpus:
        copied = {line.split(":")[0] for line in lines if "zero-copy" in line}
        missing = sorted({one.name for one in engines} - copied)
        findings.check("copies between GPUs", not missing, f"{sorted(copied)}, not {missing}")


def _by_label(url: str, name: str) -> dict[str, float]:
    """By direction; of several peers the fastest, of several ranks' counters the sum."""
    found: dict[str, float] = {}
    for sample in read_metrics(url).samples:
        if sample.name == name:
            key = sample.label("direction")
            old = found.get(key, 0.0)
            new = max(old, sample.value) if name == _RATE else old + sample.value
            found[key] = round(new, 2)
    return found
