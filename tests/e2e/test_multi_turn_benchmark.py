"""The base release's own multi-turn benchmark runs against the router to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Route
from tests.e2e.turns import MODEL, outcomes
from tools.build.fetch import cache_folder
from tools.build.pins import read_pins
from tools.build.sdist import extract, fetch_sdist
from tools.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path("benchmarks/multi_turn")
CLIENTS = 2
CONVERSATIONS = 4
# Users' messages; the answers to them double the count.
TURNS = 3
TIMEOUT_S = 300.0


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmark's folder, out of the pinned source distribution."""
    local = os.environ.get("UPSTREAM_SDIST")
    archive = fetch_sdist(
        read_pins(ROOT / "upstream.toml").sdist(),
        cache_folder(dict(os.environ)),
        Path(local) if local else None,
        print,
    )
    tree = tmp_path_factory.mktemp("sdist") / "tree"
    extract(archive, [str(SCRIPTS)], tree)
    return tree / SCRIPTS


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the benchmark is to generate, in the form of its generate_multi_turn.json."""
    folder = tmp_path_factory.mktemp("workload")
    text = folder / "text.txt"
    text.write_text(
        "".join(
            f"Line {i}: a decode node keeps what a prefill node will ask for.\n" for i in range(200)
        ),
        encoding="utf-8",
    )
    workload = folder / "generate.json"
    workload.write_text(
        json.dumps(
            {
                "filetype": "generate_conversations",
                "num_conversations": CONVERSATIONS,
                "text_files": [str(text)],
                "prompt_input": {
                    "num_turns": {"distribution": "constant", "value": 2 * TURNS},
                    "common_prefix_num_tokens": {"distribution": "constant", "value": 50},
                    "prefix_num_tokens": {"distribution": "constant", "value": 200},
                    "num_tokens": {"distribution": "uniform", "min": 100, "max": 130},
                },
                "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 10, "max": 20}},
            }
        ),
        encoding="utf-8",
    )
    return workload


@pytest.mark.parametrize("sends_id", [True, False], ids=["with-id", "without-id"])
def test_benchmark_ends_and_later_turns_hit_with_and_without_ids(
    benchmark: Path,
    workload: Path,
    pair: Cluster,
    model_folder: Path,
    route: Route,
    tmp_path: Path,
    sends_id: bool,
) -> None:
    """All requests succeed, and each turn but a conversation's first is a hit, named or not."""
    answers = tmp_path / "answers.json"
    with route(pair) as router:
        command = [sys.executable, str(benchmark / "benchmark_serving_multi_turn.py")]
        command += ["--url", router.url, "--model", str(model_folder), "--served-model-name", MODEL]
        command += ["--input-file", str(workload), "--output-file", str(answers)]
        command += ["--num-clients", str(CLIENTS), "--no-early-stop"]
        command += ["--send-conversation-id"] if sends_id else []
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        counted = outcomes(router)
    assert done.returncode == 0, done.stdout[-3000:]
    finished = re.search(r"finished (\d+) out of (\d+) conversations", done.stdout)
    assert finished is not None, done.stdout[-3000:]
    assert finished.groups() == (str(CONVERSATIONS), str(CONVERSATIONS))
    assert "Statistics summary" in done.stdout
    requests = CONVERSATIONS * TURNS
    assert counted == {"first_turn": CONVERSATIONS, "hit": requests - CONVERSATIONS}
    conversations = json.loads(answers.read_text(encoding="utf-8"))
    assert [len(one["messages"]) for one in conversations] == [2 * TURNS] * CONVERSATIONS
    assert all(message["content"] for one in conversations for message in one["messages"])
