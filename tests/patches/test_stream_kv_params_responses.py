"""A stream of /v1/responses carries `kv_transfer_params` in response.completed.

The base release does this already, so no patch belongs to it; later work relies on it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai

MODEL = "scripted"
KEY = "kv_transfer_params"
PARAMS = {"remote_engine_id": "d0", "remote_block_ids": [[4, 5]], "remote_port": 5600}
END = {"text": "<eos>", "finish": "stop", "params": PARAMS}
HELLO_WORLD = [[{"text": "Hello"}], [{"text": "world"}], [END]]


def test_completed_event_carries_params(serve: Any) -> None:
    """response.completed holds the params in its response; no other event names any."""
    events = serve(HELLO_WORLD).stream("/v1/responses", input="Hello")
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"][KEY] == PARAMS
    assert not [e for e in events[:-1] if e.get("response", e).get(KEY)]


def test_openai_client_reads_params(serve: Any) -> None:
    """The openai client keeps the field as an extra of the completed response."""
    server = serve(HELLO_WORLD)

    async def read() -> list[Any]:
        async with (
            server.listen() as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client,
        ):
            stream = await client.responses.create(model=MODEL, input="Hello", stream=True)
            return [event async for event in stream]

    completed = asyncio.run(read())[-1]
    assert completed.response.model_extra[KEY] == PARAMS
    assert completed.response.output_text.split() == ["Hello", "world"]
