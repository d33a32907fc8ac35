from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.gpu import client
from tests.gpu.client import (
    EngineError,
    complete,
    decisions,
    lease_ids,
    leases,
    release,
    renew,
    reset_prefix_cache,
    tokens_read,
)

METRICS = """vllm:bidir_tokens_total{engine="0",kind="read"} 739.0
vllm:bidir_tokens_total{engine="0",kind="computed"} 101.0
vllm:bidir_read_back_total{engine="0",outcome="read",reason=""} 1.0
vllm:bidir_read_back_total{engine="0",outcome="recompute",reason="diverged"} 2.0
"""
ANSWER = {
    "choices": [
        {
            "token_ids": [7, 8],
            "logprobs": {"top_logprobs": [{f"token_id:{k}": -float(k) for k in range(1, 23)}, {}]},
        }
    ],
    "kv_transfer_params": {"lease_id": "d0-1"},
    "usage": {"prompt_tokens_details": {"cached_tokens": 32}},
}
TOTALS = {"leases": 1, "ranks": [{"rank": 0, "leases": 1}]}
LEASE_CALLS = {
    "/v1/kv_leases/renew": lambda ids: {"renewed": {ids[0]: 30.0}, "lost": ids[1:]},
    "/v1/kv_leases/release": lambda ids: {"released": ids[:1], "lost": ids[1:]},
}


class Engine(HTTPServer):
    """Answers as an engine does; resets succeed from the third on."""

    bodies: list[dict[str, object]]
    ranks: list[str | None]
    resets: int


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def do_GET(self) -> None:
        self._send(200, METRICS if self.path == "/metrics" else json.dumps(TOTALS))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/reset_prefix_cache":
            self.server.resets += 1
            self._send(200, json.dumps({"success": self.server.resets > 2}))
            return
        if self.path.startswith("/v1/kv_leases/"):
            self._send(200, json.dumps(LEASE_CALLS[self.path](json.loads(body)["lease_ids"])))
            return
        self.server.bodies.append(json.loads(body))
        self.server.ranks.append(self.headers.get("X-data-parallel-rank"))
        refused = self.server.bodies[-1]["prompt"] == [0]
        self._send(400 if refused else 200, "why" if refused else json.dumps(ANSWER))

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    server = Engine(("127.0.0.1", 0), Handler)
    server.bodies, server.ranks, server.resets = [], [], 0
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def url(engine: Engine) -> str:
    return f"http://127.0.0.1:{engine.server_port}"


def test_a_completion_carries_what_turns_need_and_no_more(engine: Engine, url: str) -> None:
    """Params and salt only when given: a plain request must be plain."""
    complete(url, [1, 2])
    complete(url, [1, 2], 40, {"lease_id": "x"}, "salt")
    plain, turn = engine.bodies
    assert "kv_transfer_params" not in plain and "cache_salt" not in plain
    assert (turn["kv_transfer_params"], turn["cache_salt"]) == ({"lease_id": "x"}, "salt")
    assert (plain["max_tokens"], turn["max_tokens"]) == (1, 40)
    assert plain["temperature"] == 0.0


def test_a_rank_is_named_by_a_header_and_only_when_given(engine: Engine, url: str) -> None:
    complete(url, [1])
    complete(url, [1], rank=0)
    assert engine.ranks == [None, "0"]


def test_leases_are_counted_renewed_and_given_back(url: str) -> None:
    assert leases(url) == TOTALS
    assert renew(url, ["d0-1", "d1-2"]) == release(url, ["d0-1", "d1-2"]) == ["d0-1"]
    assert lease_ids(complete(url, [1])) == ["d0-1"]


def test_an_answer_gives_ids_and_the_twenty_most_probable(url: str) -> None:
    answer = complete(url, [1])
    assert answer.tokens == [7, 8]
    assert answer.first == {k: -float(k) for k in range(1, 21)}
    assert answer.params == {"lease_id": "d0-1"}
    assert answer.cached == 32


def test_a_refusal_says_why(url: str) -> None:
    with pytest.raises(EngineError, match="400 b'why'"):
        complete(url, [0])


def test_counters_are_told_apart_by_their_labels(url: str) -> None:
    assert tokens_read(url) == 739
    assert decisions(url) == {"read": 1, "diverged": 2}


def test_a_reset_is_asked_for_until_blocks_are_free(
    engine: Engine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reset_prefix_cache(url)
    assert engine.resets == 3
    engine.resets = -(10**9)
    monkeypatch.setattr(client, "_RESET_S", 0.1)
    with pytest.raises(EngineError, match="still in use"):
        reset_prefix_cache(url)
