"""The clients that people use get through the router what a single engine would give them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import Route
from tests.e2e.turns import FIELD, MODEL, TIMEOUT_S, events, http, outcomes
from tools.cluster import Cluster
from tools.cluster.router import RouterProcess

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
MESSAGES = [{"role": "user", "content": PROMPT}]
REQUEST: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 24,
    "temperature": 0.0,
    "logprobs": True,
    "top_logprobs": 3,
}
# Every value is one of few, so that a random model ends its call.
TOOL = {
    "type": "function",
    "function": {
        "name": "set_lease",
        "description": "Set a lease",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["s", "ms"]}},
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}
TOOL_CHOICE = {"type": "function", "function": {"name": "set_lease"}}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
# Fewer than any of these answers has.
MIN_TOKENS = 10

Answer = dict[str, Any]


@pytest.fixture
def router(pair: Cluster, route: Route) -> Iterator[RouterProcess]:
    with route(pair) as running:
        yield running


@pytest.fixture
def client(router: RouterProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[openai.OpenAI]:
    # The client follows the environment's proxies, which cannot reach this machine's servers.
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with openai.OpenAI(
        base_url=f"{router.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as made:
        yield made


def test_openai_client_streams_a_conversation(
    client: openai.OpenAI, router: RouterProcess, pair: Cluster
) -> None:
    """Both turns have a single engine's text, logprobs and usage; the second is a hit."""
    messages = list(MESSAGES)
    for _ in range(2):
        body = {**REQUEST, **STREAMED, "messages": messages}
        with client.chat.completions.create(
            **body, extra_body={"conversation_id": "streamed"}
        ) as stream:
            chunks = [chunk.to_dict() for chunk in stream]
        assert FIELD not in json.dumps(chunks)
        _assert_same_stream(chunks, _alone_streamed(pair, body))
        messages = _next(messages, _text(chunks))
    assert outcomes(router) == {"first_turn": 1, "hit": 1}


def test_openai_client_gets_whole_answers(
    client: openai.OpenAI, router: RouterProcess, pair: Cluster
) -> None:
    """Not streamed, the whole JSON is a single engine's: usage, logprobs, all; the second hits."""
    messages = list(MESSAGES)
    for _ in range(2):
        body = {**REQUEST, "messages": messages}
        answer = client.chat.completions.create(
            **body, extra_body={"conversation_id": "whole"}
        ).to_dict()
        assert FIELD not in answer
        _assert_same_answer(answer, _alone(pair, body))
        messages = _next(messages, answer["choices"][0]["message"]["content"])
    assert outcomes(router) == {"first_turn": 1, "hit": 1}


def test_tool_call_is_kept(client: openai.OpenAI, pair: Cluster) -> None:
    """A forced tool call, streamed or not, is the one that a single engine makes."""
    body = {**REQUEST, "max_tokens": 200, "tools": [TOOL], "tool_choice": TOOL_CHOICE}
    alone = _alone(pair, body)
    (call,) = alone["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "set_lease"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["unit"] in ("s", "ms")

    answer = client.chat.completions.create(**body, extra_body={"conversation_id": "whole"})
    _assert_same_answer(answer.to_dict(), alone)

    with client.chat.completions.create(
        **body, stream=True, extra_body={"conversation_id": "streamed"}
    ) as stream:
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    functions = [piece.function for delta in deltas for piece in delta.tool_calls or []]
    assert "".join(function.name or "" for function in functions) == "set_lease"
    assert json.loads("".join(function.arguments or "" for function in functions)) == arguments


def test_openai_client_lists_the_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_curl_streams_a_conversation(router: RouterProcess, pair: Cluster) -> None:
    """`curl -N` shows D's own events both times, and not where the KV is; the second hits."""
    messages = list(MESSAGES)
    for _ in range(2):
        body = {**REQUEST, **STREAMED, "messages": messages}
        wire = _curl("-N", f"{router.url}/v1/chat/completions", {**body, "conversation_id": "c"})
        assert FIELD not in wire
        chunks = list(events(wire))
        _assert_same_stream(chunks, _alone_streamed(pair, body))
        messages = _next(messages, _text(chunks))
    assert outcomes(router) == {"first_turn": 1, "hit": 1}


def test_curl_gets_a_whole_answer(router: RouterProcess, pair: Cluster) -> None:
    answer = json.loads(_curl("-f", f"{router.url}/v1/chat/completions", REQUEST))
    assert FIELD not in answer
    _assert_same_answer(answer, _alone(pair, REQUEST))


def _next(messages: list[dict[str, str]], answer: str) -> list[dict[str, str]]:
    """The next turn's messages: the history with the answer, and one more question."""
    return [
        *messages,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Go on."},
    ]


def _curl(flag: str, url: str, body: dict[str, Any]) -> str:
    program = shutil.which("curl")
    assert program is not None, "this test runs curl; install it (apt-get install curl)"
    command = [program, "-sS", flag, "--noproxy", "*", "--max-time", str(TIMEOUT_S), url]
    command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def _alone(pair: Cluster, body: dict[str, Any]) -> Answer:
    """What D answers when it is asked without router and without P."""
    answer: Answer = json.loads(_post_to_decode(pair, body))
    return answer


def _alone_streamed(pair: Cluster, body: dict[str, Any]) -> list[Answer]:
    return list(events(_post_to_decode(pair, body)))


def _post_to_decode(pair: Cluster, body: dict[str, Any]) -> str:
    with http() as client:
        response = client.post(f"{pair.decode[0].url}/v1/chat/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return response.text


def _assert_same_answer(answer: Answer, alone: Answer) -> None:
    """All is equal but what is new in each answer; logprobs may differ by a rounding error."""
    _assert_same_logprobs([answer], [alone])
    assert _rest(answer) == _rest(alone)


def _assert_same_stream(chunks: list[Answer], alone: list[Answer]) -> None:
    """The same in all, however the tokens are spread over chunks."""
    _assert_same_logprobs(chunks, alone)
    assert _text(chunks) == _text(alone)
    last, last_alone = _rest(chunks[-1]), _rest(alone[-1])
    assert last == last_alone and last["usage"]["completion_tokens"] == REQUEST["max_tokens"]
    assert _finish(chunks) == _finish(alone) == ["length"]
    assert {key for chunk in chunks for key in chunk} == {key for chunk in alone for key in chunk}


def _assert_same_logprobs(answers: list[Answer], alone: list[Answer]) -> None:
    tops, tops_alone = _tops(answers), _tops(alone)
    assert [top["token"] for top in tops] == [top["token"] for top in tops_alone]
    assert [top["logprob"] for top in tops] == pytest.approx(
        [top["logprob"] for top in tops_alone], abs=1e-3
    )


def _tops(answers: list[Answer]) -> list[dict[str, Any]]:
    """For each generated token, it and the alternatives that the request asks for."""
    found = [choice.get("logprobs") for answer in answers for choice in answer["choices"]]
    entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    assert len(entries) >= MIN_TOKENS
    return [top for entry in entries for top in (entry, *entry["top_logprobs"])]


def _rest(answer: Answer) -> Answer:
    """A deep copy without what is new in each answer, and without logprobs."""
    rest: Answer = json.loads(json.dumps(answer))
    del rest["id"], rest["created"]
    # Null when D is asked without a router, absent from it.
    assert rest.pop(FIELD, None) is None
    for choice in rest["choices"]:
        del choice["logprobs"]
        for call in choice["message"].get("tool_calls") or []:
            del call["id"]
    return rest


def _text(chunks: list[Answer]) -> str:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def _finish(chunks: list[Answer]) -> list[str]:
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [reason for reason in reasons if reason is not None]
