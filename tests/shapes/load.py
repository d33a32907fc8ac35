"""Conversations that go on turn after turn, streamed and not, and what their clients saw."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.oracle import CHAT, IDS, MAX_TOKENS, Kind
from tests.e2e.turns import MODEL, http, metric, tokens
from tools.cluster import Engine
from tools.cluster.router import RouterProcess

FIRST, QUESTION = 300, 60
# Then a client begins another conversation.
MOST = 1100


@dataclass
class Told:
    """One turn as its client saw it; times are monotonic.

    `began`: when the first event of a stream had come, or a whole answer; `finish`: the finish
    reason; `whole`: it ended at the length that was asked for; `error`: of an answer that is none,
    or of a stream's last event.
    """

    conversation: str
    kind: Kind
    history: Any
    stream: bool
    sent: float
    status: int | None = None
    began: float | None = None
    ended: float = 0.0
    said: list[Any] = field(default_factory=list)
    finish: str | None = None
    whole: bool = False
    error: str = ""
    code: int | None = None
    reuse: str = ""
    request_id: str = ""

    def __str__(self) -> str:
        begun = "had begun" if self.began is not None else "had not begun"
        how = "stream" if self.stream else "answer"
        end = self.error or f"finish_reason {self.finish}"
        return f"{self.conversation} ({self.kind.name}, {how}, {begun}): {self.status} {end}"


def say(
    router: RouterProcess,
    conversation: str,
    kind: Kind,
    history: Any,
    stream: bool,
    max_tokens: int = MAX_TOKENS,
    began: Callable[[], object] = lambda: None,
) -> Told:
    """One turn, to its end or failure; `began` is called when its first event has come."""
    told = Told(conversation, kind, history, stream, time.monotonic())
    body = {"model": MODEL, "temperature": 0, "max_tokens": max_tokens, "stream": stream}
    body |= {"ignore_eos": True, **kind.body(history)}
    url, headers = router.url + kind.path, {"X-Session-ID": conversation}
    try:
        with http() as client, client.stream("POST", url, json=body, headers=headers) as answer:
            told.status, told.reuse = answer.status_code, answer.headers.get("x-kv-reuse", "")
            told.request_id = answer.headers.get("x-request-id", "")
            if stream and answer.status_code == httpx.codes.OK:
                _follow(told, answer.iter_lines(), began)
            else:
                _take(told, json.loads(answer.read()))
    except httpx.TransportError as error:
        told.error = type(error).__name__
    told.ended = time.monotonic()
    return told


def _take(told: Told, answer: dict[str, Any]) -> None:
    if told.status == httpx.codes.OK:
        told.began, told.said = time.monotonic(), told.kind.pieces(answer)
        told.finish = answer["choices"][0]["finish_reason"]
        told.whole = told.finish == "length"
    else:
        told.error = str(answer)


def _follow(told: Told, lines: Iterator[str], began: Callable[[], object]) -> None:
    for line in lines:
        if not line.startswith("data: "):
            continue
        told.began = told.began or time.monotonic()
        began()
        if line == "data: [DONE]":
            # An engine ends a stream with it that has failed, too.
            told.whole = not told.error and told.finish == "length"
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            told.error, told.code = event["error"]["message"], event["error"]["code"]
            continue
        assert not told.error, "an error is the last event"
        for choice in event["choices"]:
            told.said += _pieces(told.kind, choice)
            told.finish = choice["finish_reason"] or told.finish


def _pieces(kind: Kind, choice: dict[str, Any]) -> list[Any]:
    if kind is IDS:
        return list(choice["token_ids"] or [])
    return list(choice["delta"].get("content") or "")


def used(engine: Engine, rank: int = 0) -> float:
    """Share of the engine's blocks that somebody holds; one that rests says so with a step."""
    body = {"model": MODEL, "prompt": tokens(5, rank), "max_tokens": 1}
    headers = {"X-data-parallel-rank": str(rank)}
    with http() as client:
        answer = client.post(f"{engine.url}/v1/completions", json=body, headers=headers)
    assert answer.status_code == httpx.codes.OK, answer.text
    return metric(engine, "vllm:kv_cache_usage_perc", engine=str(rank))


def text(count: int, seed: int) -> str:
    return "".join(map(chr, tokens(count, seed)))


def begin(kind: Kind, seed: int, count: int = FIRST) -> Any:
    """The history of a conversation's first turn."""
    return go_on(kind, [], [], seed, count)


def go_on(kind: Kind, history: Any, said: Sequence[Any], seed: int, count: int = QUESTION) -> Any:
    """The next turn's history, after an answer."""
    if kind is IDS:
        return [*history, *said, *tokens(count, seed)]
    answer = [{"role": "assistant", "content": "".join(said)}] if said else []
    return [*history, *answer, {"role": "user", "content": text(count, seed)}]


class Load:
    """A few clients, each with one conversation after the other, until they are told to stop.

    `name`: what the names of its conversations begin with.
    """

    def __init__(self, router: RouterProcess, clients: int, name: str = "load") -> None:
        self._router = router
        self._name = name
        self._clients = clients
        self._stop = threading.Event()
        self._told: list[Told] = []
        self._errors: list[BaseException] = []

    @property
    def told(self) -> list[Told]:
        """All turns that have ended so far."""
        return list(self._told)

    @contextmanager
    def running(self) -> Iterator[None]:
        """It runs within this block; turns under way at its end are waited for."""
        threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(self._clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def wait_for_turns(self, more: int, seconds: float) -> None:
        """Until so many turns more have begun after now and ended."""
        now, end = time.monotonic(), time.monotonic() + seconds
        while sum(told.sent > now for told in self.told) < more:
            if self._errors:
                raise self._errors[0]
            assert time.monotonic() < end, f"not {more} turns within {seconds:.0f} s"
            time.sleep(0.1)

    def _run(self, number: int) -> None:
        try:
            self._converse(number)
        except BaseException as error:
            self._errors.append(error)

    def _converse(self, number: int) -> None:
        # Every third client chats; streamed and whole answers take turns.
        kind = CHAT if number % 3 == 2 else IDS
        talk, turn, length = 0, 0, 0
        history: Any = []
        said: list[Any] = []
        while not self._stop.is_set():
            if length + QUESTION > MOST:
                talk, length, history, said = talk + 1, 0, [], []
            count = QUESTION if length else FIRST
            history = go_on(kind, history, said, 10_000 * number + turn, count)
            name = f"{self._name}-{number}-{talk}"
            told = say(self._router, name, kind, history, stream=bool(turn % 2))
            self._told.append(told)
            # What was not answered is asked again with the next question.
            said, turn, length = told.said if told.whole else [], turn + 1, length + count
            length += len(told.said)
