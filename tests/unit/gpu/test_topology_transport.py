"""Which link was used is judged by every node on its own, killed ones by their logs alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu.topology import transport
from tests.gpu.topology.findings import Findings
from tools.demo.metrics import Reading

METRICS = """vllm:bidir_transfer_bytes_total{engine="0",direction="read_back"} 100.0
vllm:bidir_transfer_bytes_total{engine="1",direction="read_back"} 50.0
vllm:bidir_peer_gigabytes_per_second{direction="read_back",peer="a"} 2.0
vllm:bidir_peer_gigabytes_per_second{direction="read_back",peer="b"} 7.0
"""
COPY, TCP = "| 0..inf | zero-copy | cuda_ipc/cuda |", "| 0..inf | software emulation | tcp/lo |"


def engine(tmp_path: Path, role: str, name: str, line: str, alive: bool = True) -> SimpleNamespace:
    log = tmp_path / f"{name}.log"
    log.write_text(f"INFO] {line}\n")
    # Engines of several clusters have the same names.
    return SimpleNamespace(
        name=f"{role}-0", role=role, url=name, log_path=log, is_alive=lambda: alive
    )


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {"p": {"read": 3}, "q": {"read": 1}}
    monkeypatch.setattr(transport, "decisions", lambda url: found[url])
    monkeypatch.setattr(transport, "read_metrics", lambda url: Reading(METRICS))
    return found


def verdicts(engines: Mapping[str, object], on_gpus: bool = True) -> Findings:
    findings = Findings()
    transport.transport(engines, on_gpus, findings)  # type: ignore[arg-type]
    return findings


def test_all_that_copied_between_gpus_are_right(tmp_path: Path) -> None:
    nodes = {
        "prefill-0": engine(tmp_path, "prefill", "p", COPY, alive=False),
        "prefill-1": engine(tmp_path, "prefill", "q", COPY),
        "decode-0": engine(tmp_path, "decode", "d", COPY),
    }
    found = verdicts(nodes)
    assert all(one.right for one in found.checks) and len(found.checks) == 2
    assert found.figures["decisions"] == {"prefill-1": {"read": 1}}, "the other one is dead"
    assert found.figures["bytes"]["decode-0"] == {"read_back": 150.0}
    rates = found.figures["gigabytes per second of the last read"]
    assert rates["prefill-1"] == {"read_back": 7.0}


def test_a_node_without_copies_and_a_slow_link_are_found(
    tmp_path: Path, counted: dict[str, dict[str, int]]
) -> None:
    counted["p"]["slow_link"] = 2
    nodes = {
        "prefill-0": engine(tmp_path, "prefill", "p", COPY),
        "decode-0": engine(tmp_path, "decode", "d", TCP),
    }
    link, copies = verdicts(nodes).checks
    assert not link.right and "slow_link" in link.found
    assert not copies.right and "['decode-0']" in copies.found
    assert len(verdicts(nodes, on_gpus=False).checks) == 1
