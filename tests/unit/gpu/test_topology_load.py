"""What a client sees of streams that end, break off or never begin."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.gpu.topology.load import Load, Sent, by_phase, send, wait_for

ERROR = {"error": {"message": "a node has failed", "code": 502}}


def chunk(token: int) -> dict[str, Any]:
    logprobs = {"top_logprobs": [{f"token_id:{token}": -0.5}]}
    return {"choices": [{"token_ids": [token], "logprobs": logprobs}]}


class Handler(BaseHTTPRequestHandler):
    """Streams as many tokens as were asked for; the prompt's first id says what goes wrong."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault, answer = body["prompt"][0], body["max_tokens"]
        seen.append((body, self.headers.get("X-Conversation-End")))
        self.send_response(503 if fault == 1 else 200)
        self.send_header("x-kv-reuse", "hit; tokens=7")
        self.end_headers()
        if fault == 1:
            return
        for number in range(1 if fault in (2, 3) else answer):
            self._event(chunk(number + 5))
        if fault == 2:
            self._event(ERROR)
        if fault != 3:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *args: object) -> None:
        pass


seen: list[tuple[dict[str, Any], str | None]] = []


@pytest.fixture
def url() -> Iterator[str]:
    seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def sent(url: str, fault: int) -> Sent:
    one = Sent([fault, 9], 0.0)
    send(url, "c", one, 3)
    return one


def test_a_whole_stream_has_its_tokens_its_first_probabilities_and_what_was_reused(
    url: str,
) -> None:
    one = sent(url, 0)
    assert (one.outcome, one.tokens, one.first) == ("whole", [5, 6, 7], {5: -0.5})
    assert one.reuse == "hit; tokens=7"


def test_a_turn_that_never_began_is_told_from_one_that_broke_off(url: str) -> None:
    refused, broken, short = sent(url, 1), sent(url, 2), sent(url, 3)
    assert (refused.outcome, broken.outcome, short.outcome) == ("failed", "broken", "broken")
    assert "503" in str(refused.error) and broken.error == "a node has failed"
    assert short.error == "1 of 3 tokens came"
    gone = Sent([0], 0.0)
    send("http://127.0.0.1:9", "c", gone, 3)
    assert gone.outcome == "failed"


def test_a_load_goes_on_until_it_is_stopped_and_ends_its_conversations(url: str) -> None:
    load = Load(url, 2, 1)
    load.start()
    assert wait_for(lambda: len(load.sent) >= 8, 20.0)
    turns = load.stop()
    assert len(turns) == len(load.sent) >= 8 and {one.outcome for one in turns} == {"whole"}
    by_name: dict[str, list[str | None]] = {}
    for body, end in seen:
        by_name.setdefault(body["conversation_id"], []).append(end)
    assert [None, None, "true"] in by_name.values()
    assert all(turns[:-1] == [None] * (len(turns) - 1) for turns in by_name.values())


def test_turns_count_in_the_phase_in_which_they_ended() -> None:
    before = Sent([1], 0.0, "hit; tokens=7", [5], ended=1.0)
    killed = Sent([1], 0.5, "hit", [5], ended=2.0, error="broke off")
    after = Sent([1], 3.0, "miss; reason=expired", [5], ended=4.0)
    assert by_phase([before, killed, after], [2.0]) == [
        {"whole": 1, "hits": 1},
        {"broken": 1, "hits": 0, "whole": 1},
    ]


def test_what_does_not_come_is_given_up() -> None:
    assert not wait_for(lambda: False, 0.0)
