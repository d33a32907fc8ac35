"""The whole benchmark on real engines, in its smallest form: off and on, three prompt lengths."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.bench.charts import read_chart
from tests.bench.test_charts import AXES, NAMES
from tools.bench.records import read_records

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (512, 1024, 2048)
NEW, OUTPUT, TURNS, FIRST = 128, 8, 3, 300
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Smoke:
    """A finished run."""

    out: Path
    done: subprocess.CompletedProcess[str]

    @property
    def report(self) -> dict[str, Any]:
        text = (self.out / "report/report.json").read_text(encoding="utf-8")
        data: dict[str, Any] = json.loads(text)
        return data


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    out = tmp_path_factory.mktemp("bench") / "out"
    command = [sys.executable, "-m", "tools.bench", "run", "--device", "cpu", "--arms", "off,on"]
    command += ["--repeats", "1", "--lengths", ",".join(map(str, LENGTHS))]
    command += ["--new-tokens", str(NEW)]
    command += ["--output-tokens", str(OUTPUT), "--turns", str(TURNS), "--first-tokens", str(FIRST)]
    command += ["--hold", "1", "--hold-tokens", "200", "--stream-tokens", "24", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return Smoke(out, done)


def test_both_legs_have_all_requests(smoke: Smoke) -> None:
    records = read_records(smoke.out / "records.jsonl")
    keys = {arm: {one.key[1:] for one in records if one.arm == arm} for arm in ("off", "on")}
    assert keys["off"] == keys["on"]
    assert len(keys["off"]) == 2 * len(LENGTHS) + TURNS + 3
    assert all(0 < one.ttft_ms < one.latency_ms for one in records)


def test_the_on_leg_is_proven_request_by_request(smoke: Smoke) -> None:
    """P has read all that D kept: the history but for the last token, which was never fed back."""
    off, on = smoke.report["proofs"]
    assert (off["arm"], off["reads"], off["holds"]) == ("off", 0, True)
    assert (on["arm"], on["holds"], on["problems"]) == ("on", True, [])
    expected = [length - NEW - 1 for length in LENGTHS]
    expected += [FIRST + (turn - 1) * (OUTPUT + NEW) + OUTPUT - 1 for turn in range(1, TURNS)]
    assert (on["reads"], on["tokens_read"]) == (len(expected), sum(expected))
    assert smoke.report["unjoined"] == []


def test_reading_back_changes_no_reply(smoke: Smoke) -> None:
    assert not any("another reply" in line for line in smoke.report["warnings"])
    assert smoke.report["warnings"][0] == "1 repeat(s): at least 3 are needed to see the spread"


@pytest.mark.parametrize("name", NAMES)
def test_each_chart_has_axes_and_both_series(smoke: Smoke, name: str) -> None:
    chart = read_chart(smoke.out / "report", name)
    assert set(AXES[name]) <= set(chart.texts)
    for arm in ("off", "on"):
        drawn = [
            count for series, count in chart.points.items() if series.startswith(f"{name}-{arm}")
        ]
        assert drawn and min(drawn) > 0
    assert chart.colours > 20
    assert json.loads((smoke.out / f"report/{name}.json").read_text(encoding="utf-8"))


def test_the_transfer_is_a_part_of_the_on_bar(smoke: Smoke) -> None:
    off, on = smoke.report["figures"]["prefill_split"]
    assert [bar["prompt_tokens"] for bar in on["bars"]] == list(LENGTHS)
    assert all(0 < bar["transfer"] < bar["prefill"] for bar in on["bars"])
    assert all(bar["transfer"] == 0 for bar in off["bars"])


def test_the_page_is_whole_and_says_where_it_is(smoke: Smoke) -> None:
    path = Path(smoke.done.stdout.strip().splitlines()[-1])
    text = path.read_text(encoding="utf-8")
    assert text.count("<svg") == len(NAMES)
    assert not re.search(r"""(src|href)=["'](?!#)""", text.replace("xlink:href", "href"))
    for wanted in ("Proof that KV was moved", "bidirectional_kv_xfer true", "0.29.0+cpu.bidir"):
        assert wanted in text
