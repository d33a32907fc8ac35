"""Which way KV went between the nodes."""

from __future__ import annotations

from collections.abc import Mapping

from tests.gpu.client import decisions
from tests.gpu.topology.findings import Findings
from tools.bench.gpu.engines import telling
from tools.cluster import Engine
from tools.demo.metrics import read_metrics

_RATE = "vllm:bidir_peer_gigabytes_per_second"
_BYTES = "vllm:bidir_transfer_bytes_total"
# In the lines of `telling`.
_COPY = "zero-copy"


def transport(engines: Mapping[str, Engine], on_gpus: bool, findings: Findings) -> None:
    """Counters of all that still run; on GPUs every one of them must have copied between GPUs."""
    alive = {name: one for name, one in engines.items() if one.is_alive()}
    by_node = {name: decisions(one.url) for name, one in alive.items() if one.role == "prefill"}
    findings.figures["decisions"] = by_node
    findings.figures["bytes"] = {name: _by_label(one.url, _BYTES) for name, one in alive.items()}
    findings.figures["gigabytes per second of the last read"] = {
        name: _by_label(one.url, _RATE) for name, one in alive.items()
    }
    refused = {
        name: {reason: found[reason] for reason in ("slow_link", "unsupported") if reason in found}
        for name, found in by_node.items()
    }
    findings.check("link used by every P", not any(refused.values()), f"{refused}")
    lines = {name: telling([one]) for name, one in engines.items()}
    findings.figures["log"] = lines
    if on_gpus:
        copied = [name for name, said in lines.items() if any(_COPY in line for line in said)]
        missing = sorted(engines.keys() - set(copied))
        findings.check("copies between GPUs", not missing, f"{copied}, not {missing}")


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
