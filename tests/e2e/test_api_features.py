"""Tools, structured output, several answers, stop strings and stored responses through the router:
clients get what a single engine gives them, and conversations still hit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.conftest import Route
from tests.e2e.turns import FIELD, MODEL, TIMEOUT_S, http, outcomes
from tools.cluster import Cluster
from tools.cluster.router import RouterProcess

PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
CHAT: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "temperature": 0.0}
# Every value is one of few, so that a random model ends what it writes.
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["s", "ms"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "set_lease", "description": "Set a lease", "parameters": SCHEMA}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "lease", "schema": SCHEMA, "strict": True},
}
# New in each answer; how much of a prompt was cached depends on who has computed it.
NEW = {"id", "created", "created_at", "completed_at", "call_id", "item_id", "previous_response_id"}
CACHED = {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"}


@dataclass
class Clients:
    """Both SDKs before one router, and before D alone."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    alone: openai.OpenAI
    anthropic_alone: anthropic.Anthropic
    router: RouterProcess


@pytest.fixture(scope="module")
def clients(pair: Cluster, route: Route) -> Iterator[Clients]:
    decode = pair.decode[0].url
    options: dict[str, Any] = {"api_key": "none", "timeout": TIMEOUT_S, "max_retries": 0}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        # Clients follow the environment's proxies, which cannot reach this machine's servers.
        patch.setenv("NO_PROXY", "127.0.0.1")
        router = stack.enter_context(route(pair))
        yield Clients(
            *(
                stack.enter_context(client)
                for client in (
                    openai.OpenAI(base_url=f"{router.url}/v1", **options),
                    anthropic.Anthropic(base_url=router.url, **options),
                    openai.OpenAI(base_url=f"{decode}/v1", **options),
                    anthropic.Anthropic(base_url=decode, **options),
                )
            ),
            router,
        )


def asked(of: str) -> list[Any]:
    """The first message of a test's own conversation: the same words would continue another's."""
    return [{"role": "user", "content": f"{of}: {PROMPT}"}]


def same(answer: Any, alone: Any) -> dict[str, Any]:
    """Both, which must be equal but for what is new in each answer."""
    got = answer.to_dict()
    assert FIELD not in json.dumps(got)
    assert stable(got) == stable(alone.to_dict())
    made: dict[str, Any] = got
    return made


def stable(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if key not in NEW | CACHED | {FIELD}}
        return {key: stable(one) for key, one in kept.items() if one is not None}
    return [stable(one) for one in value] if isinstance(value, list) else value


def hits(clients: Clients) -> int:
    return outcomes(clients.router).get("hit", 0)


def test_a_required_tool_is_answered_as_by_a_single_engine(clients: Clients) -> None:
    """A random model does not come to the end of its list of calls: what it writes is the same."""
    body = {**CHAT, "messages": asked("required"), "tool_choice": "required"}
    body["tools"] = [{"type": "function", "function": FUNCTION}]
    alone = clients.alone.chat.completions.create(**body)
    same(clients.openai.chat.completions.create(**body), alone)
    assert alone.usage is not None and alone.usage.completion_tokens > 10
    streams = []
    for client in (clients.openai, clients.alone):
        with client.chat.completions.create(**body, stream=True) as stream:
            deltas = [choice.delta for chunk in stream for choice in chunk.choices]
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        said = "".join(call.arguments or "" for call in calls if call)
        streams.append((said, "".join(delta.content or "" for delta in deltas)))
    assert streams[0] == streams[1]


def test_structured_output_is_that_of_a_single_engine(clients: Clients) -> None:
    body = {**CHAT, "messages": asked("schema"), "response_format": RESPONSE_FORMAT}
    body["max_tokens"] = 200
    alone = clients.alone.chat.completions.create(**body)
    answer = same(clients.openai.chat.completions.create(**body), alone)
    content = answer["choices"][0]["message"]["content"]
    assert json.loads(content)["unit"] in ("s", "ms")
    with clients.openai.chat.completions.create(**body, stream=True) as stream:
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == content


def test_several_answers_come_from_d_alone(clients: Clients) -> None:
    body = {**CHAT, "messages": asked("n"), "n": 2, "temperature": 1.0, "seed": 7}
    before = decoded_alone(clients, "bypass_n")
    answer = same(
        clients.openai.chat.completions.create(**body),
        clients.alone.chat.completions.create(**body),
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    texts = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
    streamed = dict.fromkeys(texts, "")
    with clients.openai.chat.completions.create(**body, stream=True) as stream:
        for chunk in stream:
            assert FIELD not in chunk.to_dict()
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    assert decoded_alone(clients, "bypass_n") == before + 2


def decoded_alone(clients: Clients, reason: str) -> float:
    with http() as client:
        text = client.get(f"{clients.router.url}/status").json()
    return float(text["decode_alone"].get(reason, 0))


def test_a_stop_string_ends_a_turn_that_the_next_one_hits(clients: Clients) -> None:
    body: dict[str, Any] = {**CHAT, "messages": asked("stop")}
    plain = clients.alone.chat.completions.create(**body).choices[0].message.content
    assert plain is not None
    stop = plain[9:11]
    body["stop"] = [stop]
    create, named = clients.openai.chat.completions.create, {"conversation_id": "stop"}
    answer = same(create(**body, extra_body=named), clients.alone.chat.completions.create(**body))
    (choice,) = answer["choices"]
    said = choice["message"]["content"]
    assert choice["finish_reason"] == "stop" and said and stop not in said
    body["messages"] += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "Go on. " * 40},
    ]
    before = hits(clients)
    same(create(**body, extra_body=named), clients.alone.chat.completions.create(**body))
    assert hits(clients) == before + 1


def test_completions_have_logprobs_and_usage(clients: Clients) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.0}
    body |= {"logprobs": 2, "stream": True, "stream_options": {"include_usage": True}}
    texts = []
    for client, extra in ((clients.openai, {"conversation_id": "text"}), (clients.alone, {})):
        with client.completions.create(**body, extra_body=extra) as stream:
            chunks = list(stream)
        tokens = [token for one in chunks for c in one.choices for token in c.logprobs.tokens]
        assert len(tokens) == 12 and chunks[-1].usage.completion_tokens == 12
        texts.append((tokens, chunks[-1].usage.prompt_tokens))
    assert texts[0] == texts[1]


def test_responses_follow_each_other_by_id(clients: Clients) -> None:
    """The router knows what D does not: D alone gets the whole history, and says the same."""
    body: dict[str, Any] = {"model": MODEL, "max_output_tokens": 24, "temperature": 0.0}
    before, history, previous = hits(clients), [], None
    for question in (asked("responses")[0]["content"], "Go on. " * 20):
        history.append({"role": "user", "content": question})
        answer = clients.openai.responses.create(
            **body, input=question, previous_response_id=previous
        )
        alone = clients.alone.responses.create(**body, input=history)
        assert answer.output_text and answer.output_text == alone.output_text
        assert answer.usage.input_tokens == alone.usage.input_tokens
        assert answer.usage.output_tokens == alone.usage.output_tokens
        history += [item.to_dict() for item in answer.output]
        previous = answer.id
    assert hits(clients) == before + 1
    with pytest.raises(openai.APIStatusError) as caught:
        clients.openai.responses.create(**body, input="x", previous_response_id="resp_unknown")
    assert caught.value.status_code < 500


def test_responses_stream_structured_output(clients: Clients) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": asked("text"), "temperature": 0.0}
    body["text"] = {
        "format": {"type": "json_schema", "name": "lease", "schema": SCHEMA, "strict": True}
    }
    alone = clients.alone.responses.create(**body, max_output_tokens=200)
    with clients.openai.responses.create(**body, max_output_tokens=200, stream=True) as stream:
        seen = list(stream)
    assert seen[-1].type == "response.completed"
    assert seen[-1].response.output_text == alone.output_text
    assert json.loads(alone.output_text)["unit"] in ("s", "ms")


def test_anthropics_client_calls_tools(clients: Clients) -> None:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": asked("anthropic"),
        "tools": [{"name": "set_lease", "description": "x", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "set_lease"},
        "extra_body": {"temperature": 0.0},
    }
    alone = clients.anthropic_alone.messages.create(**body)
    answer = same(clients.anthropic.messages.create(**body), alone)
    (call,) = [one for one in answer["content"] if one["type"] == "tool_use"]
    assert call["name"] == "set_lease" and call["input"]["unit"] in ("s", "ms")
    with clients.anthropic.messages.stream(**body) as stream:
        streamed = stream.get_final_message().to_dict()
    assert stable(streamed["content"]) == stable(answer["content"])
    before = hits(clients)
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "done " * 40}
    body["messages"] = [
        *body["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [result]},
    ]
    same(clients.anthropic.messages.create(**body), clients.anthropic_alone.messages.create(**body))
    assert hits(clients) == before + 1


def test_a_stop_sequence_of_anthropics_client_ends_a_turn_that_the_next_one_hits(
    clients: Clients,
) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": asked("sequence")}
    body["extra_body"] = {"temperature": 0.0}
    (plain,) = clients.anthropic_alone.messages.create(**body).content
    assert plain.type == "text"
    stop = plain.text[9:11]
    body["stop_sequences"] = [stop]
    answer = same(
        clients.anthropic.messages.create(**body), clients.anthropic_alone.messages.create(**body)
    )
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == stop
    with clients.anthropic.messages.stream(**body) as stream:
        streamed = stream.get_final_message().to_dict()
    assert stable(streamed["content"]) == stable(answer["content"])
    before = hits(clients)
    body["messages"] = [
        *body["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": "Go on. " * 40},
    ]
    same(clients.anthropic.messages.create(**body), clients.anthropic_alone.messages.create(**body))
    assert hits(clients) == before + 1
