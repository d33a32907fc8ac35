"""The base release's own benchmark: its input, and its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.base import read_stats, write_workload
from tools.bench.errors import BenchError
from tools.bench.records import RecordFile

STATS = {
    "ttft_ms": 12.5,
    "tpot_ms": 2.0,
    "latency_ms": 90.0,
    "start_time_ms": 7.0,
    "input_num_turns": 3,
    "input_num_tokens": 2100,
    "output_num_tokens": 40,
    "output_num_chunks": 39,
    "output_num_first_chunk_tokens": 1,
    "approx_cached_percent": 95.0,
    "conversation_id": "CONV_ID_4",
    "client_id": 2,
}


def test_its_figures_are_taken_over_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_text(json.dumps([STATS]))
    (one,) = read_stats(path, "on", 2, 2048)
    for name, value in STATS.items():
        if name != "conversation_id":
            assert getattr(one, name) == value
    # The second question, by the API key that the sweep gives each of its runs.
    assert (one.turn, one.conversation_id) == (2, "on-2-2048/CONV_ID_4")
    RecordFile(tmp_path / "r.jsonl").append([one])


@pytest.mark.parametrize("text", ["", "{}", "[{}]", '[{"ttft_ms": 1}]'])
def test_what_are_no_figures_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stats.json"
    path.write_text(text)
    with pytest.raises(BenchError) as error:
        read_stats(path, "on", 0, 2048)
    assert str(path) in str(error.value) and "expected" in str(error.value)


def test_its_input_asks_for_the_length_and_has_text_enough(tmp_path: Path) -> None:
    made = json.loads(write_workload(tmp_path, 24576, 3, 4, 64).read_text())
    asked = made["prompt_input"]
    assert asked["prefix_num_tokens"]["value"] + asked["num_tokens"]["value"] == 24576
    assert (asked["num_turns"]["value"], made["num_conversations"]) == (6, 4)
    (text,) = made["text_files"]
    # A token is no longer than a word in any tokenizer worth the name.
    assert len(Path(text).read_text().split()) > 4 * 24576
