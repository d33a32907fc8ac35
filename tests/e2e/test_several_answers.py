"""Requests that are more than one prompt with one answer, sent to the engines with a turn's params.

The router sends them to a decode node alone; engines themselves must answer right, too.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.turns import MODEL, http, metric
from tools.cluster import Cluster, Engine
from tools.cluster.tokenizer import GENERATED_IDS

FIRST = {"do_remote_decode": True, "do_remote_prefill": False}


def complete(engine: Engine, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    with http() as client:
        response = client.post(f"{engine.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@pytest.fixture
def prompts() -> list[list[int]]:
    rng = random.Random(41)
    return [rng.choices(GENERATED_IDS, k=300) for _ in range(2)]


def test_a_list_of_prompts_is_answered_right(pair: Cluster, prompts: list[list[int]]) -> None:
    """One set of params cannot name the blocks of both."""
    p, d = pair.prefill[0], pair.decode[0]
    plain = [texts(complete(d, prompt))[0] for prompt in prompts]
    handed = complete(p, prompts, max_tokens=1, kv_transfer_params=FIRST)
    assert handed.get("kv_transfer_params") is None
    one = complete(p, prompts[0], max_tokens=1, kv_transfer_params=FIRST)["kv_transfer_params"]
    assert texts(complete(d, prompts, kv_transfer_params=one)) == plain


def test_several_answers_to_one_prompt_are_right(pair: Cluster, prompts: list[list[int]]) -> None:
    p, d = pair.prefill[0], pair.decode[0]
    plain = texts(complete(d, prompts[0]))
    handed = complete(p, prompts[0], max_tokens=1, kv_transfer_params=FIRST)["kv_transfer_params"]
    # Of the one most probable token each time: greedy, which `n` would not be allowed with.
    greedy = {"temperature": 1, "top_k": 1}
    both = complete(d, prompts[0], n=2, kv_transfer_params=handed, **greedy)
    assert texts(both) == plain * 2
    assert both.get("kv_transfer_params") is None


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}])
def test_logprobs_of_the_prompt_are_those_of_a_plain_request(
    fields: dict[str, Any], pair: Cluster, prompts: list[list[int]]
) -> None:
    """Loaded KV has none: D computes the prompt by itself, and P's blocks are let go."""
    p, d = pair.prefill[0], pair.decode[0]
    plain = complete(d, prompts[0], **fields)["choices"][0]
    handed = complete(p, prompts[0], max_tokens=1, kv_transfer_params=FIRST)["kv_transfer_params"]
    through = complete(d, prompts[0], kv_transfer_params=handed, **fields)["choices"][0]
    assert through["text"] == plain["text"]
    assert through["logprobs"] == plain["logprobs"]
    assert through.get("prompt_logprobs") == plain.get("prompt_logprobs")
    assert (through["logprobs"] or through["prompt_logprobs"]) is not None
    assert metric(d, "vllm:num_requests_running") == 0
