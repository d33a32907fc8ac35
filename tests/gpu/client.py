"""The router's part over plain HTTP, without a router: completions, leases, counters, resets."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


class RefusedError(EngineError):
    """It answered, with that status."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """Generated ids, the TOP log-probabilities at the first, D's or P's params, tokens cached.

    last: the log-probabilities at the last.
    """

    tokens: list[int]
    first: dict[int, float]
    params: dict[str, Any] | None
    cached: int | None
    last: dict[int, float] = field(default_factory=dict)


def complete(
    url: str,
    prompt: Sequence[int],
    max_tokens: int = 1,
    params: Mapping[str, Any] | None = None,
    salt: str | None = None,
    rank: int | None = None,
    **more: Any,
) -> Answer:
    """One greedy completion, by that data-parallel rank (None: the engine's choice).

    `more` are further fields of the body. EngineError for any status but 200.
    """
    body = completion(prompt, max_tokens, **more)
    if params is not None:
        body["kv_transfer_params"] = dict(params)
    if salt is not None:
        body["cache_salt"] = salt
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return parse(_post(f"{url}/v1/completions", body, headers))


def completion(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy completion of exactly `max_tokens`, with what is compared."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def parse(answer: Mapping[str, Any]) -> Answer:
    """The parts of a completion that are compared."""
    choice = answer["choices"][0]
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return Answer(
        list(choice["token_ids"]),
        first_logprobs(choice),
        answer.get("kv_transfer_params"),
        details.get("cached_tokens"),
        _logprobs(choice, -1),
    )


def first_logprobs(choice: Mapping[str, Any]) -> dict[int, float]:
    """Of a choice's first token: the TOP most probable ids."""
    return _logprobs(choice, 0)


def _logprobs(choice: Mapping[str, Any], at: int) -> dict[int, float]:
    found = choice["logprobs"]["top_logprobs"][at]
    named = {int(name.removeprefix("token_id:")): float(value) for name, value in found.items()}
    return {token: named[token] for token in sorted(named, key=lambda one: -named[one])[:TOP]}


def leases(url: str) -> dict[str, Any]:
    """What D keeps: totals, and those of each rank."""
    return _get(f"{url}/v1/kv_leases")


def renew(url: str, lease_ids: Sequence[str]) -> list[str]:
    """Prolong them; the ids that were."""
    return list(_post(f"{url}/v1/kv_leases/renew", {"lease_ids": list(lease_ids)})["renewed"])


def release(url: str, lease_ids: Sequence[str]) -> list[str]:
    """Give turns back; the ids that were there."""
    return list(_post(f"{url}/v1/kv_leases/release", {"lease_ids": list(lease_ids)})["released"])


def lease_ids(*answers: Answer) -> list[str]:
    """Of the turns that D says it keeps."""
    told = [one.params or {} for one in answers]
    return [str(params["lease_id"]) for params in told if "lease_id" in params]


def tokens_read(url: str) -> int:
    """Tokens that this engine has read back so far."""
    samples = read_metrics(url).samples
    name = "vllm:bidir_tokens_total"
    return int(sum(s.value for s in samples if s.name == name and s.label("kind") == "read"))


def decisions(url: str) -> dict[str, int]:
    """This engine's read-backs by outcome or reason."""
    return _by_reason(url, "vllm:bidir_read_back_total")


def lost(url: str) -> dict[str, int]:
    """Handovers that this D has lost, by reason."""
    return _by_reason(url, "vllm:bidir_lost_handovers_total")


def _by_reason(url: str, name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for sample in read_metrics(url).samples:
        if sample.name == name:
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


def _post(
    url: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    data = b"" if body is None else json.dumps(body).encode("utf-8")
    sent = {"Content-Type": "application/json", **(headers or {})}
    return _answer(urllib.request.Request(url, data, sent))


def _get(url: str) -> dict[str, Any]:
    return _answer(urllib.request.Request(url))


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    url = request.full_url
    try:
        with _opener.open(request, timeout=_TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        told = f"{url}: {error.code} {error.read()[:500]!r}"
        raise RefusedError(error.code, told) from error
    except OSError as error:
        raise EngineError(f"{url}: {error}") from error
    return answer
