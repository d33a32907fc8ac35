"""The tiny model and its tokenizer: what the end-to-end tests rest on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tools.cluster import Cluster, make_model
from tools.cluster.tokenizer import GENERATED_IDS, SPECIAL_TOKENS, VOCAB_SIZE

ROUNDS = 3000


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


def test_generated_ids_survive_text(tokenizer: Any) -> None:
    """Any sequence of ids that the model can generate is what its text encodes to."""
    source = random.Random(0)
    for _ in range(ROUNDS):
        ids = source.choices(GENERATED_IDS, k=source.randint(1, 80))
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_text_survives_ids(tokenizer: Any) -> None:
    """Any text, also beyond ASCII and with special tokens in it, is what its ids decode to."""
    source = random.Random(1)
    alphabet = [chr(c) for c in range(0x20, 0x7F)] + list("\n\t\r\0äß€漢😀\u0301\u200d\x85\x1c")
    alphabet += SPECIAL_TOKENS
    for _ in range(ROUNDS):
        text = "".join(source.choices(alphabet, k=source.randint(1, 80)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < VOCAB_SIZE == len(tokenizer)


def test_history_is_a_prefix_of_the_next_turn(tokenizer: Any) -> None:
    """The ids of a prompt and the answer generated for it begin the next turn's prompt."""
    source = random.Random(2)
    for _ in range(ROUNDS // 10):
        messages = [{"role": "system", "content": "You answer."}]
        history: list[int] = []
        for turn in range(4):
            messages.append({"role": "user", "content": f"question {turn} ä"})
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert prompt[: len(history)] == history
            answer = source.choices(GENERATED_IDS, k=source.randint(1, 40))
            messages.append({"role": "assistant", "content": tokenizer.decode(answer)})
            history = prompt + answer


def test_same_shape_gives_the_same_bytes(model_folder: Path, tmp_path: Path) -> None:
    """Two runs of the model maker write identical files."""
    again = make_model(tmp_path / "model")
    names = sorted(path.name for path in model_folder.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    for name in names:
        assert (again / name).read_bytes() == (model_folder / name).read_bytes(), name


def test_served_chat_keeps_its_ids(pair: Cluster) -> None:
    """On a real engine, turn 2's prompt ids begin with turn 1's prompt and generated ids."""
    messages = [{"role": "user", "content": "Tell me about leases."}]
    first = _chat(pair, messages)
    answer = first["choices"][0]
    messages += [
        {"role": "assistant", "content": answer["message"]["content"]},
        {"role": "user", "content": "And renewals?"},
    ]
    second = _chat(pair, messages)
    history = first["prompt_token_ids"] + answer["token_ids"]
    assert second["prompt_token_ids"][: len(history)] == history


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_output_is_varied_and_round_trips(pair: Cluster, temperature: float) -> None:
    """Output runs to the limit, is not one repeated token, and stays in the round-trip set."""
    body = _chat(
        pair,
        [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 10}],
        temperature=temperature,
        seed=0,
    )
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert len(set(choice["token_ids"])) >= 20
    assert set(choice["token_ids"]) <= set(GENERATED_IDS)


def _chat(pair: Cluster, messages: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    engine = pair.decode[0]
    request = {
        "model": engine.model,
        "messages": messages,
        "max_tokens": 60,
        "temperature": 0.0,
        "return_token_ids": True,
        **extra,
    }
    with httpx.Client(trust_env=False, timeout=120) as client:
        response = client.post(f"{engine.url}/v1/chat/completions", json=request)
    assert response.status_code == httpx.codes.OK, response.text
    body: dict[str, Any] = response.json()
    return body
