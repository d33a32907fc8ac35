"""A streamed P->D turn ends with kv_transfer_params that name the decode engine's blocks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tools.cluster import Cluster, Engine

FIELD = "kv_transfer_params"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 12
MAX_TOKENS = 24
BLOCK_TOKENS = 128
TIMEOUT_S = 120.0
MESSAGES = [{"role": "user", "content": PROMPT}]
# What a router asks of a prefill engine for the first turn of a conversation.
ASK_FOR_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Event = dict[str, Any]


@dataclass(frozen=True)
class Api:
    """One streaming API. ``is_terminal`` knows the event that must carry the params."""

    path: str
    prompt: dict[str, Any]
    limit: str
    text: Callable[[Event], str]
    is_terminal: Callable[[Event], bool]
    params: Callable[[Event], Any] = lambda event: event.get(FIELD)

    def body(self, engine: Engine, max_tokens: int = MAX_TOKENS, **extra: Any) -> dict[str, Any]:
        request = {"model": engine.model, "temperature": 0.0, self.limit: max_tokens}
        return {**request, **self.prompt, **extra}


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        {"messages": MESSAGES},
        "max_tokens",
        text=lambda e: e["choices"][0]["delta"].get("content") or "",
        is_terminal=lambda e: [c["finish_reason"] for c in e["choices"]] == ["length"],
    ),
    "completions": Api(
        "/v1/completions",
        {"prompt": PROMPT},
        "max_tokens",
        text=lambda e: e["choices"][0]["text"],
        is_terminal=lambda e: [c["finish_reason"] for c in e["choices"]] == ["length"],
    ),
    "responses": Api(
        "/v1/responses",
        {"input": PROMPT},
        "max_output_tokens",
        text=lambda e: e["delta"] if e["type"] == "response.output_text.delta" else "",
        is_terminal=lambda e: e["type"] == "response.completed",
        params=lambda e: e.get("response", {}).get(FIELD),
    ),
    "messages": Api(
        "/v1/messages",
        {"messages": MESSAGES},
        "max_tokens",
        text=lambda e: e["delta"]["text"] if e["type"] == "content_block_delta" else "",
        is_terminal=lambda e: (
            e["type"] == "message_delta" and e["delta"]["stop_reason"] == "max_tokens"
        ),
    ),
}

each_api = pytest.mark.parametrize(
    "api", [pytest.param(api, id=name) for name, api in APIS.items()]
)


@each_api
def test_turn_ends_with_params_that_name_decodes_blocks(pair: Cluster, api: Api) -> None:
    """Only the terminal event carries params; they name D's blocks, and the text is D's own."""
    prefill, decode = pair.prefill[0], pair.decode[0]
    alone = _stream(decode, api, api.body(decode))
    from_prefill = _prefill(prefill, api)
    assert from_prefill["remote_engine_id"] == prefill.engine_id
    pulled_before = _external_tokens(decode)

    events = _stream(decode, api, api.body(decode, kv_transfer_params=from_prefill))

    carriers = [event for event in events if api.params(event) is not None]
    assert len(carriers) == 1
    assert api.is_terminal(carriers[0])
    _assert_names_blocks(api.params(carriers[0]), decode)
    assert _text(api, events) == _text(api, alone)
    assert _external_tokens(decode) - pulled_before == from_prefill["remote_num_tokens"]


@pytest.mark.parametrize("name", ["chat", "completions", "messages"])
def test_field_is_absent_rather_than_null(pair: Cluster, name: str) -> None:
    """On the wire the field's name stands in one event of the turn and nowhere else."""
    api, decode = APIS[name], pair.decode[0]
    from_prefill = _prefill(pair.prefill[0], api)
    lines = _stream_lines(decode, api, api.body(decode, kv_transfer_params=from_prefill))
    assert sum(FIELD in line for line in lines) == 1


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_usage_chunk_does_not_carry_params(pair: Cluster, name: str) -> None:
    """With a usage chunk at the end, the params stay on the last chunk that has a choice."""
    api, decode = APIS[name], pair.decode[0]
    body = api.body(
        decode,
        kv_transfer_params=_prefill(pair.prefill[0], api),
        stream_options={"include_usage": True},
    )
    *_, finish, usage = _stream(decode, api, body)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == MAX_TOKENS
    assert FIELD not in usage
    _assert_names_blocks(finish[FIELD], decode)


@each_api
def test_plain_request_has_no_params(pair: Cluster, api: Api) -> None:
    """A request without params gets none, and D keeps none of its blocks, as in the base."""
    decode = pair.decode[0]
    kept_before = _kept_share(decode)
    lines = _stream_lines(decode, api, api.body(decode))
    assert all(api.params(event) is None for event in _events(lines))
    # Responses sends the field as null in every event that holds the response, as the base does.
    assert api is APIS["responses"] or not any(FIELD in line for line in lines)
    # What earlier tests have kept may end meanwhile, so that the share can only fall.
    assert _kept_share(decode) <= kept_before


@pytest.fixture
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients follow the environment's proxies, which cannot reach this machine's engines."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.usefixtures("without_proxy")
def test_openai_client_reads_the_params(pair: Cluster) -> None:
    """The openai client streams the turn on its three APIs and shows the params on the last."""
    prefill, decode = pair.prefill[0], pair.decode[0]
    with openai.OpenAI(
        base_url=f"{decode.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
    ) as client:
        for name, create in (
            ("chat", client.chat.completions.create),
            ("completions", client.completions.create),
            ("responses", client.responses.create),
        ):
            api = APIS[name]
            params = {FIELD: _prefill(prefill, api)}
            with create(**api.body(decode), stream=True, extra_body=params) as stream:
                last = list(stream)[-1]
            carrier = last.response if name == "responses" else last
            _assert_names_blocks(carrier.model_extra[FIELD], decode)


@pytest.mark.usefixtures("without_proxy")
def test_anthropic_client_reads_the_params(pair: Cluster) -> None:
    """The anthropic client's stream helper gives the text, and the params on message_delta."""
    prefill, decode = pair.prefill[0], pair.decode[0]
    api = APIS["messages"]
    alone = _text(api, _stream(decode, api, api.body(decode)))
    params = {FIELD: _prefill(prefill, api)}
    with (
        anthropic.Anthropic(
            base_url=decode.url, api_key="none", timeout=TIMEOUT_S, max_retries=0
        ) as client,
        client.messages.stream(
            model=decode.model,
            max_tokens=MAX_TOKENS,
            messages=[{"role": "user", "content": PROMPT}],
            extra_body={"temperature": 0.0, **params},
        ) as stream,
    ):
        events = list(stream)
        assert stream.get_final_text() == alone
    carriers = [event for event in events if (event.model_extra or {}).get(FIELD)]
    assert [event.type for event in carriers] == ["message_delta"]
    _assert_names_blocks(carriers[0].model_extra[FIELD], decode)


def _assert_names_blocks(params: dict[str, Any], decode: Engine) -> None:
    """The params are D's, for the whole turn, and in the form that a prefill request takes."""
    assert params["remote_engine_id"] == decode.engine_id
    assert params["remote_host"] == decode.host
    assert params["remote_port"] == decode.side_channel_port
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    (blocks,) = params["remote_block_ids"]
    assert len(set(blocks)) == len(blocks) > 0
    tokens = params["remote_num_tokens"]
    assert tokens > len(PROMPT)
    assert (len(blocks) - 1) * BLOCK_TOKENS < tokens <= len(blocks) * BLOCK_TOKENS


def _prefill(prefill: Engine, api: Api) -> dict[str, Any]:
    body = api.body(prefill, 1, stream=False, kv_transfer_params=ASK_FOR_BLOCKS)
    with _http() as client:
        response = client.post(prefill.url + api.path, json=body)
    assert response.status_code == httpx.codes.OK, response.text
    params: dict[str, Any] = response.json()[FIELD]
    return params


def _stream(decode: Engine, api: Api, body: dict[str, Any]) -> list[Event]:
    return _events(_stream_lines(decode, api, body))


def _stream_lines(decode: Engine, api: Api, body: dict[str, Any]) -> list[str]:
    with (
        _http() as client,
        client.stream("POST", decode.url + api.path, json={**body, "stream": True}) as response,
    ):
        lines = list(response.iter_lines())
    assert response.status_code == httpx.codes.OK, lines
    return lines


def _events(lines: list[str]) -> list[Event]:
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


def _text(api: Api, events: list[Event]) -> str:
    text = "".join(api.text(event) for event in events)
    assert len(text) == MAX_TOKENS, "the model's tokens are one character each"
    return text


def _external_tokens(engine: Engine) -> int:
    """Tokens that the engine has taken from its peers so far."""
    return int(_metric(engine, "vllm:external_prefix_cache_hits_total"))


def _kept_share(engine: Engine) -> float:
    """Share of the KV blocks in use; of an idle engine: kept for peers."""
    return _metric(engine, "vllm:kv_cache_usage_perc")


def _metric(engine: Engine, name: str) -> float:
    with _http() as client:
        text = client.get(f"{engine.url}/metrics").text
    (value,) = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, flags=re.MULTILINE)
    return float(value)


def _http() -> httpx.Client:
    """A client that ignores proxy settings: the engines are on this machine."""
    return httpx.Client(trust_env=False, timeout=TIMEOUT_S)
