"""A stream whose request fails in the engine ends with an error, never as if it were whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

COMPLETION: dict[str, Any] = {"prompt": "Hello", "max_tokens": 8}
FAILED = {"text": "", "finish": "error"}


def error_of(payload: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(payload)["error"]
    return found


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"logprobs": 1}])
def test_a_completion_that_fails_before_its_first_token_says_so(
    serve: Any, more: dict[str, Any]
) -> None:
    """Without it, such a stream is nothing but [DONE]."""
    sent = serve([[FAILED]]).lines("/v1/completions", **COMPLETION, **more)
    assert len(sent) == 2 and sent[1] == "[DONE]"
    assert error_of(sent[0])["code"] == 500


def test_a_completion_that_fails_after_a_token_says_so(serve: Any) -> None:
    sent = serve([[{"text": "Hello"}], [FAILED]]).lines("/v1/completions", **COMPLETION)
    assert json.loads(sent[0])["choices"][0]["text"].strip() == "Hello"
    assert error_of(sent[1])["code"] == 500 and sent[2:] == ["[DONE]"]


def test_a_prompt_in_pieces_is_no_event(serve: Any) -> None:
    """What the check comes before: reports that have nothing to say are not sent."""
    end = {"text": "big", "finish": "length"}
    script = [[{"text": ""}], [{"text": ""}], [end]]
    sent = serve(script).lines("/v1/completions", **COMPLETION)
    assert len(sent) == 2 and json.loads(sent[0])["choices"][0]["finish_reason"] == "length"
