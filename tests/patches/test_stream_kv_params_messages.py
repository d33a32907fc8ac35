"""A stream of /v1/messages carries `kv_transfer_params` on message_delta.

Not on message_stop: the `anthropic` client's stream helper builds that event anew and drops
what it does not know.
"""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

PATH = "/v1/messages"
MODEL = "scripted"
KEY = "kv_transfer_params"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
PARAMS = {"remote_engine_id": "d0", "remote_block_ids": [[4, 5]], "remote_port": 5600}
END = {"text": "<eos>", "finish": "stop", "params": PARAMS}
HELLO_WORLD = [[{"text": "Hello"}], [{"text": "world"}], [END]]
ADD_TOOL = {"name": "add", "input_schema": {"type": "object"}}


def carriers(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events if KEY in event]


def test_message_delta_carries_params(serve: Any) -> None:
    """message_delta has the params; no other event has the key."""
    events = serve(HELLO_WORLD).stream(PATH, **ASK)
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].get(KEY) == PARAMS
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    assert carriers(events) == ["message_delta"]


@pytest.mark.parametrize("params", [None, {}])
def test_key_is_absent_without_params(serve: Any, params: dict[str, Any] | None) -> None:
    """A request that has no params has no such key on the wire, not even as null."""
    lines = serve([[{"text": "Hello"}], [END | {"params": params}]]).lines(PATH, **ASK)
    assert not [line for line in lines if KEY in line]


@pytest.mark.parametrize(
    ("script", "options", "parsers"),
    [
        ([[END | {"finish": "length"}]], {}, {}),
        ([[{"text": "Hello"}], [{"text": "big"}, {"text": "world"}, END]], {}, {}),
        (
            [[{"text": "hm"}], [END | {"text": "</think>"}]],
            {},
            {"reasoning_parser": "deepseek_r1"},
        ),
        (
            [
                [{"text": "<tool_call>"}],
                [{"text": '{"name":"add","arguments":{}}'}],
                [END | {"text": "</tool_call>"}],
            ],
            {"tools": [ADD_TOOL]},
            {"tool_parser": "hermes"},
        ),
    ],
    ids=["one-token", "merged", "thinking", "tool-use"],
)
def test_every_kind_of_ending(
    serve: Any, script: Any, options: dict[str, Any], parsers: dict[str, str]
) -> None:
    """One token, a merged output, a thinking block, a tool call: message_delta has the params."""
    events = serve(script, **parsers).stream(PATH, **ASK, **options)
    assert carriers(events) == ["message_delta"]
    assert events[-2][KEY] == PARAMS


def test_failed_request_has_no_params(serve: Any) -> None:
    """A generation that ends in an error carries no params."""
    lines = serve([[{"text": "Hello"}], [END | {"finish": "error"}]]).lines(PATH, **ASK)
    assert not [line for line in lines if KEY in line]


def without_ids(event: dict[str, Any]) -> dict[str, Any]:
    shown = {k: v for k, v in event.items() if k != KEY}
    if "message" in shown:
        shown["message"] = {k: v for k, v in shown["message"].items() if k != "id"}
    return shown


def test_params_change_nothing_else(serve: Any) -> None:
    """Apart from the key, a stream with params equals one without, event for event."""
    with_params = serve(HELLO_WORLD).stream(PATH, **ASK)
    without = serve([*HELLO_WORLD[:-1], [END | {"params": None}]]).stream(PATH, **ASK)
    assert list(map(without_ids, with_params)) == list(map(without_ids, without))


def test_anthropic_client_reads_params_from_raw_events(serve: Any) -> None:
    """Iterating over the client's raw events shows the field as an extra of message_delta."""
    server = serve(HELLO_WORLD)

    async def read() -> list[Any]:
        async with (
            server.listen() as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="none") as client,
        ):
            stream = await client.messages.create(model=MODEL, stream=True, **ASK)
            return [event async for event in stream]

    events = asyncio.run(read())
    extras = {e.type: e.model_extra[KEY] for e in events if KEY in (e.model_extra or {})}
    assert extras == {"message_delta": PARAMS}


def test_anthropic_stream_helper_keeps_params_and_message(serve: Any) -> None:
    """The accumulating helper passes the field through and still builds the whole message."""
    server = serve(HELLO_WORLD)

    async def read() -> tuple[list[Any], Any]:
        async with (
            server.listen() as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="none") as client,
            client.messages.stream(model=MODEL, **ASK) as stream,
        ):
            events = [event async for event in stream]
            return events, await stream.get_final_message()

    events, message = asyncio.run(read())
    extras = {e.type: e.model_extra[KEY] for e in events if KEY in (e.model_extra or {})}
    assert extras == {"message_delta": PARAMS}
    assert message.content[0].text.split() == ["Hello", "world"]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 3
