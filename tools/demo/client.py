"""A client that streams one chat completion and measures the time to its first token."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tools.demo.errors import DemoError

_TIMEOUT_S = 120.0
_NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True)
class Answer:
    """A streamed answer, whole or so far. ``ttft_s``: from sending to the first text."""

    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_s: float | None = None


def stream_chat(
    url: str,
    body: Mapping[str, Any],
    progress: Callable[[Answer], None],
    headers: Mapping[str, str] = _NO_HEADERS,
) -> Answer:
    """Send ``body``, streamed, to the server at ``url`` (no path); call ``progress`` per event.

    Raises DemoError on a status other than 200, an error event, or a stream without a proper end.
    """
    wanted = {**body, "stream": True, "stream_options": _USAGE_IN_EVERY_EVENT}
    target = urlsplit(url)
    # Of the standard library, also because it takes no notice of proxies in the environment.
    connection = http.client.HTTPConnection(target.netloc, timeout=_TIMEOUT_S)
    begun = time.monotonic()
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(wanted),
            {"Content-Type": "application/json", **headers},
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            refusal = response.read(2000).decode("utf-8", errors="replace")
            raise DemoError(f"{url} answered {response.status}, expected 200: {refusal.strip()}")
        answer = Answer()
        for event in events(response):
            answer = added(answer, event, time.monotonic() - begun)
            progress(answer)
    except (OSError, http.client.HTTPException) as error:
        raise DemoError(f"{url}: the request failed: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if answer.ttft_s is None:
        raise DemoError(f"{url}: the stream ended without any text")
    return answer


def events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events; DemoError without a final [DONE]."""
    for line in lines:
        name, _, value = line.decode("utf-8").strip().partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        event: dict[str, Any] = json.loads(value)
        if "error" in event:
            raise DemoError(f"the stream ended in an error: {event['error']['message']}")
        yield event
    raise DemoError("the stream ended before [DONE]")


def added(answer: Answer, event: Mapping[str, Any], elapsed_s: float) -> Answer:
    """The answer with one more event, which came ``elapsed_s`` after the request was sent."""
    text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    usage = event.get("usage") or {}
    return Answer(
        text=answer.text + text,
        prompt_tokens=usage.get("prompt_tokens", answer.prompt_tokens),
        completion_tokens=usage.get("completion_tokens", answer.completion_tokens),
        ttft_s=elapsed_s if text and answer.ttft_s is None else answer.ttft_s,
    )


_USAGE_IN_EVERY_EVENT = {"include_usage": True, "continuous_usage_stats": True}
