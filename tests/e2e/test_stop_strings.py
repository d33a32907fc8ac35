"""Turns that end on a stop string (ReAct's `stop=["Observation:"]`) are reused like others."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import Route
from tests.e2e.oracle import CHAT, TEXT, Compared, Kind, ask, compare
from tests.e2e.test_verified import characters
from tests.e2e.turns import MODEL, events, http, metric, outcomes
from tools.cluster import Cluster
from tools.cluster.router import RouterProcess

TOKENS = 40


def streamed(server: RouterProcess, kind: Kind, history: Any, **fields: Any) -> tuple[str, Any]:
    """The text of a streamed answer, and its finish reason."""
    body = {"model": MODEL, "temperature": 0, "stream": True, **kind.body(history), **fields}
    with http() as client:
        response = client.post(server.url + kind.path, json=body)
    assert response.status_code == 200, response.text
    assert "kv_transfer_params" not in response.text, "for engines and routers only"
    choices = [choice for event in events(response.text) for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    return "".join(filter(None, texts)), choices[-1]["finish_reason"]


def whole(server: RouterProcess, kind: Kind, history: Any, **fields: Any) -> tuple[str, Any]:
    answer = ask(server, kind, history, **fields)
    assert "kv_transfer_params" not in json.dumps(answer)
    return "".join(kind.pieces(answer)), answer["choices"][0]["finish_reason"]


def first(kind: Kind, rng: random.Random) -> Any:
    text = "".join(characters(rng, 400))
    return text if kind is TEXT else [{"role": "user", "content": text}]


def then(kind: Kind, history: Any, said: str, more: str) -> Any:
    if kind is TEXT:
        return history + said + more
    return [
        *history,
        {"role": "assistant", "content": said},
        {"role": "user", "content": more},
    ]


@pytest.mark.parametrize("send", [streamed, whole])
@pytest.mark.parametrize("kind", [TEXT, CHAT], ids=lambda kind: kind.name)
def test_a_turn_that_ends_on_a_stop_string_is_read_back(
    kind: Kind, send: Any, pair: Cluster, route: Route, compared: Compared
) -> None:
    rng = random.Random(f"{kind.name} {send.__name__}")
    history = first(kind, rng)
    prefill, decode = pair.prefill[0], pair.decode[0]
    plain = "".join(kind.pieces(ask(decode, kind, history, max_tokens=TOKENS)))
    stop = plain[12:15]
    with route(pair) as router:
        limits = {"max_tokens": TOKENS, "conversation_id": "react"}
        said, reason = send(router, kind, history, stop=[stop], **limits)
        assert reason == "stop"
        assert said == plain[: plain.index(stop)]
        before = metric(prefill, "vllm:bidir_tokens_total", kind="read")
        longer = then(kind, history, said, "".join(characters(rng, 60)))
        answer = ask(router, kind, longer, conversation_id="react")
        compare(kind, decode, longer, answer, False, compared)
        assert metric(prefill, "vllm:bidir_tokens_total", kind="read") - before >= 400
        assert outcomes(router)["hit"] == 1


def test_a_stop_string_for_each_of_many_at_once(
    pair: Cluster, route: Route, compared: Compared
) -> None:
    """Each last chunk waits for its own answer, and gets its own."""
    rng = random.Random(31)
    histories = ["".join(characters(rng, 200 + number)) for number in range(8)]
    decode = pair.decode[0]
    plain = ["".join(TEXT.pieces(ask(decode, TEXT, one, max_tokens=TOKENS))) for one in histories]
    with route(pair) as router, ThreadPoolExecutor(8) as pool:

        def turn(number: int) -> str:
            stop = plain[number][5 + number : 7 + number]
            said, reason = streamed(
                router,
                TEXT,
                histories[number],
                stop=[stop],
                max_tokens=TOKENS,
                conversation_id=f"many {number}",
            )
            assert reason == "stop"
            return said

        for number, said in enumerate(pool.map(turn, range(8))):
            assert plain[number].startswith(said)
            answer = ask(
                router, TEXT, histories[number] + said + "more", conversation_id=f"many {number}"
            )
            compare(TEXT, decode, histories[number] + said + "more", answer, False, compared)
        assert outcomes(router)["hit"] == 8
