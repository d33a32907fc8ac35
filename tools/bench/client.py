"""Streams one completion of token ids, and measures it at the chunks that carry tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tools.bench.errors import BenchError

_PATH = "/v1/completions"
_CONNECT_S = 10.0
_SILENCE_S = 600.0

Watch = Callable[[float, int], None]
"""Told of each chunk as it comes: when (seconds of `time.perf_counter`), and how many tokens."""


@dataclass(frozen=True)
class Target:
    """Who is asked, by which model name; `links`: it takes a conversation_id."""

    url: str
    model: str
    links: bool = True


@dataclass(frozen=True)
class Reply:
    """A whole reply. `arrivals`: (ms since sending, tokens) of each chunk that carried tokens."""

    token_ids: tuple[int, ...]
    start_ms: float
    latency_ms: float
    arrivals: tuple[tuple[float, int], ...]

    @property
    def ttft_ms(self) -> float:
        return self.arrivals[0][0]

    @property
    def tpot_ms(self) -> float:
        """ms per token after the first chunk; 0 when there is no later one."""
        later = len(self.token_ids) - self.arrivals[0][1]
        return (self.latency_ms - self.ttft_ms) / later if later else 0.0

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """ms between one chunk with tokens and the next."""
        times = [at for at, _ in self.arrivals]
        return tuple(after - before for before, after in itertools.pairwise(times))


def new_session() -> aiohttp.ClientSession:
    """A session without limits of its own, and without regard to proxies in the environment."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S),
        trust_env=False,
    )


async def complete(
    session: aiohttp.ClientSession,
    target: Target,
    prompt: Sequence[int],
    output_tokens: int,
    request_id: str,
    conversation_id: str,
    watch: Watch | None = None,
) -> Reply:
    """One greedy completion of exactly `output_tokens` tokens; BenchError if it is any other."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if target.links:
        body["conversation_id"] = conversation_id
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    token_ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    prompt_tokens = None
    begun = time.perf_counter()
    try:
        async with session.post(target.url + _PATH, data=data, headers=headers) as response:
            if response.status != 200:
                text = (await response.read())[:2000].decode("utf-8", errors="replace")
                raise _failed(target, request_id, "status 200", f"{response.status}: {text}")
            async for event in _events(response.content, target, request_id):
                at = (time.perf_counter() - begun) * 1000
                new = [t for choice in event["choices"] for t in choice.get("token_ids") or ()]
                if new:
                    token_ids += new
                    arrivals.append((at, len(new)))
                    if watch is not None:
                        watch(begun + at / 1000, len(new))
                if event.get("usage"):
                    prompt_tokens = event["usage"]["prompt_tokens"]
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        what = f"{type(error).__name__}: {error}"
        raise _failed(target, request_id, "an answer", what) from error
    latency = (time.perf_counter() - begun) * 1000
    if len(token_ids) != output_tokens or prompt_tokens != len(prompt):
        raise _failed(
            target,
            request_id,
            f"{output_tokens} tokens for a prompt of {len(prompt)}",
            f"{len(token_ids)} tokens for a prompt of {prompt_tokens}",
        )
    return Reply(tuple(token_ids), begun * 1000, latency, tuple(arrivals))


async def _events(
    content: aiohttp.StreamReader, target: Target, request_id: str
) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream up to [DONE].

    By pieces, not by lines: the first chunk repeats the prompt, and may be longer than a reader's
    limit.
    """
    rest = b""
    while piece := await content.readany():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                return
            event: dict[str, Any] = json.loads(value)
            if "error" in event:
                raise _failed(target, request_id, "a stream without an error", event["error"])
            yield event
    raise _failed(target, request_id, "a stream that ends in [DONE]", "its end before that")


def _failed(target: Target, request_id: str, expected: str, found: object) -> BenchError:
    return BenchError(
        f"request {request_id} failed",
        file=target.url + _PATH,
        expected=expected,
        found=found,
        next_step="see the engines' logs; what is measured is kept, and the same command goes on",
    )
