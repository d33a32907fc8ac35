"""The GPU profile's report: tables and charts out of written results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.bench.gpu.counters import Transfer
from tools.bench.gpu.holding import Held
from tools.bench.gpu.report import report
from tools.bench.gpu.rows import Row
from tools.bench.model import SHAPES


def write(
    folder: Path, sets: tuple[str, ...], slow: bool = False, hold: tuple[int, ...] = ()
) -> None:
    folder.mkdir(parents=True)
    rows = []
    for repeat, name, length in (
        (n, s, t) for n in (-1, 0, 1) for s in sets for t in (2048, 24576)
    ):
        base = length / 25
        pull = Transfer(1, base / 10, base / 20, length * 147456, length // 16 * 36, 0)
        rows += [
            Row(name, "recompute", length, repeat, prefill_ms=base, decode_ms=30),  # type: ignore[arg-type]
            Row(
                name,  # type: ignore[arg-type]
                "read_back",
                length,
                repeat,
                prefill_ms=base / 5,
                decode_ms=30,
                pull=pull,
                first_contact=repeat < 0 and length == 2048,
                log={"transfer_ms": base / 10, "engine_ms": 1.0} if name == "ours" else {},
            ),
        ]
    held = [
        Held(name, n, 5.5, 5.4, 6.0, 194, 20, 10, 0.1, 1500 * n, True)
        for name in sets
        for n in (0, 10)
    ]  # type: ignore[arg-type]
    about: dict[str, Any] = {
        "command": "python -m tools.bench.gpu run",
        "versions": {name: {"vllm": "0.29.0", "torch": "2", "nixl": "1"} for name in sets},
        "hardware": {"gpus": ["a GPU"], "cpu": "a CPU"},
        "model": "qwen3-8b",
        "shape": SHAPES["qwen3-8b"].config,
        "device": "cuda",
        "gpus": ["0"],
        "decode_graphs": False,
        "slow_transport": slow,
        "plan": {"hold": hold},
        "engine_args": [],
    }
    ceilings = {"copy_gb_per_s": 4000.0, "bfloat16_tflop_per_s": 700.0, "fp8_tflop_per_s": None}
    made = {
        "gpu_profile": 1,
        "about": about,
        "ceilings": ceilings,
        "holding": [one.as_json() for one in held],
        "rows": [row.as_json() for row in rows],
    }
    (folder / "qwen3-8b.json").write_text(json.dumps(made), encoding="utf-8")


def test_runs_of_one_setting_share_a_section_with_its_charts(tmp_path: Path) -> None:
    write(tmp_path / "ours", ("ours",))
    write(tmp_path / "stock", ("stock",))
    write(tmp_path / "slow", ("ours",), slow=True)
    write(tmp_path / "hold", ("ours",), hold=(0, 10))
    page = report([tmp_path / name for name in ("ours", "stock", "slow", "hold")], tmp_path / "to")
    text = page.read_text(encoding="utf-8")
    assert text.count("\n## ") == 3
    assert "## qwen3-8b, P and D on one GPU, conversations held" in text
    assert "Sets of different runs did not take turns." in text
    assert "| TTFT, of recompute" in text
    assert "at most 5% above recompute" in text
    folder = tmp_path / "to" / "qwen3-8b-p-and-d-on-one-gpu"
    names = {"ttft_by_prompt", "prefill_split", "itl_while_held", "pull"}
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("svg", "png")
    }
    assert "read-back, stock" in (folder / "pull.svg").read_text(encoding="utf-8")
