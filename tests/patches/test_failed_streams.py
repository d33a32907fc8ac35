"""A stream whose request has failed is never an empty answer."""

from __future__ import annotations

from typing import Any

import pytest

ASK: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 8},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 8,
    },
    "/v1/messages": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
}


def errors(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["error"] for event in events if "error" in event]


@pytest.mark.parametrize("path", ASK)
@pytest.mark.parametrize("said", [[], ["Hello"]], ids=["before its first token", "after it"])
def test_a_stream_that_fails_says_so(serve: Any, path: str, said: list[str]) -> None:
    script = [[{"text": word}] for word in said] + [[{"text": "", "finish": "error"}]]
    events = serve(script).stream(path, **ASK[path])
    assert len(errors(events)) == 1, events


@pytest.mark.parametrize("path", ASK)
def test_a_prompt_that_takes_several_steps_is_no_failure(serve: Any, path: str) -> None:
    script = [[{"text": ""}], [{"text": "Hello"}], [{"text": "<eos>", "finish": "stop"}]]
    events = serve(script).stream(path, **ASK[path])
    assert not errors(events)
