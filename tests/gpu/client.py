"""The router's part over plain HTTP, without a router: one completion, one counter, one reset."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.gpu.compare import TOP
from tools.demo.metrics import read_metrics

FIRST = {"do_remote_decode": True, "do_remote_prefill": False}
_TIMEOUT_S = 120.0
_RESET_S = 60.0
# Proxies of the environment are not for this machine's own ports.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EngineError(Exception):
    """An engine did not answer as it must."""


@dataclass(frozen=True)
class Answer:
    """Generated ids, the TOP log-probabilities at the first, D's or P's params, tokens cached."""

    tokens: list[int]
    first: dict[int, float]
    params: dict[str, Any] | None
    cached: int | None


def complete(
    url: str,
    prompt: Sequence[int],
    max_tokens: int = 1,
    params: Mapping[str, Any] | None = None,
    salt: str | None = None,
) -> Answer:
    """One greedy completion. EngineError for any status but 200."""
    body: dict[str, Any] = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    if salt is not None:
        body["cache_salt"] = salt
    return parse(_post(f"{url}/v1/completions", body))


def parse(answer: Mapping[str, Any]) -> Answer:
    """The parts of a completion that are compared."""
    choice = answer["choices"][0]
    first = choice["logprobs"]["top_logprobs"][0]
    named = {int(name.removeprefix("token_id:")): value for name, value in first.items()}
    best = sorted(named, key=lambda token: -named[token])[:TOP]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Answer(
        list(choice["token_ids"]),
        {token: float(named[token]) for token in best},
        answer.get("kv_transfer_params"),
        details.get("cached_tokens"),
    )


def tokens_read(url: str) -> int:
    """Tokens that this engine has read back so far."""
    samples = read_metrics(url).samples
    name = "vllm:bidir_tokens_total"
    return int(sum(s.value for s in samples if s.name == name and s.label("kind") == "read"))


def decisions(url: str) -> dict[str, int]:
    """This engine's read-backs by outcome or reason."""
    found: dict[str, int] = {}
    for sample in read_metrics(url).samples:
        if sample.name == "vllm:bidir_read_back_total":
            key = sample.label("reason") or sample.label("outcome")
            found[key] = found.get(key, 0) + int(sample.value)
    return found


def reset_prefix_cache(url: str) -> None:
    """Wait until what was handed over has been fetched and freed, and forget all blocks."""
    end = time.monotonic() + _RESET_S
    while not _post(f"{url}/reset_prefix_cache", None)["success"]:
        if time.monotonic() > end:
            raise EngineError(f"{url}: blocks are still in use after {_RESET_S:.0f} s")
        time.sleep(0.02)


def _post(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    data = b"" if body is None else json.dumps(body).encode("utf-8")
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _opener.open(request, timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise EngineError(f"{url}: {error.code} {error.read()[:500]!r}") from error
    except OSError as error:
        raise EngineError(f"{url}: {error}") from error
    return answer
