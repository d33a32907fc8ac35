"""Streams through the router that go on whatever happens to nodes, and what became of each."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.gpu.client import completion, first_logprobs
from tests.gpu.histories import New, source

_TIMEOUT_S = 60.0
# Tokens: the first prompt, what is said between two answers, an answer.
_FIRST, _MORE, _ANSWER = 600, 100, 24
_TURNS = 3


@dataclass
class Sent:
    """One streamed turn. Times are seconds since the load began.

    reuse: what the router said of it. tokens and first: what came, and the log-probabilities at
    the first of them. error: None when all came.
    """

    prompt: list[int]
    started: float
    reuse: str = ""
    tokens: list[int] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    ended: float = 0.0
    error: str | None = None

    @property
    def began(self) -> bool:
        """Whether the client had seen any of the answer."""
        return bool(self.tokens)

    @property
    def outcome(self) -> str:
        if self.error is None:
            return "whole"
        return "broken" if self.began else "failed"


class Load:
    """`clients` threads that hold conversations of three turns until `stop`."""

    def __init__(self, router: str, clients: int, seed: int) -> None:
        self.sent: list[Sent] = []
        self._router = router
        self._begin = time.monotonic()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._converse, args=(f"{seed}-{number}",), daemon=True)
            for number in range(clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._begin

    def stop(self) -> list[Sent]:
        """Let every conversation's turn end; all turns, by when they started."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return sorted(self.sent, key=lambda one: one.started)

    def _converse(self, name: str) -> None:
        new, number = source(random.Random(name)), 0
        while not self._stopping.is_set():
            number += 1
            self._conversation(f"{name}-{number}", new)

    def _conversation(self, name: str, new: New) -> None:
        history = new(_FIRST)
        for turn in range(_TURNS):
            if self._stopping.is_set():
                return
            one = Sent(history, self.seconds())
            send(self._router, name, one, _ANSWER, last=turn == _TURNS - 1)
            one.ended = self.seconds()
            with self._lock:
                self.sent.append(one)
            # A client whose stream broke off says all of it again, with what it has.
            history = history + one.tokens + new(_MORE)


def send(router: str, conversation: str, one: Sent, answer: int, last: bool = False) -> None:
    """Stream one turn into `one`; whatever fails is its `error`. last: none follows it."""
    body = completion(one.prompt, answer, conversation_id=conversation, stream=True)
    connection = http.client.HTTPConnection(urlsplit(router).netloc, timeout=_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    if last:
        headers["X-Conversation-End"] = "true"
    with closing(connection):
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                one.error = f"status {response.status}: {response.read()[:200]!r}"
                return
            one.reuse = response.getheader("x-kv-reuse", "")
            for line in response:
                if line.startswith(b"data: {"):
                    take(json.loads(line[len(b"data: ") :]), one)
        except (OSError, http.client.HTTPException, ValueError) as error:
            one.error = f"{type(error).__name__}: {error}"
    if one.error is None and len(one.tokens) != answer:
        one.error = f"{len(one.tokens)} of {answer} tokens came"


def take(event: dict[str, Any], one: Sent) -> None:
    """One event of a stream."""
    if "error" in event:
        one.error = str(event["error"].get("message", event["error"]))[:200]
        return
    for choice in event.get("choices", ()):
        if choice.get("token_ids"):
            if not one.tokens:
                one.first = first_logprobs(choice)
            one.tokens += choice["token_ids"]


def by_phase(sent: Sequence[Sent], ends: Sequence[float]) -> list[dict[str, int]]:
    """Turns by outcome, and hits among the whole ones, in each phase; `ends` part the phases.

    A turn counts where it ended: one that a kill broke is of the phase after it.
    """
    found: list[Counter[str]] = [Counter() for _ in range(len(ends) + 1)]
    for one in sent:
        phase = found[sum(one.ended >= end for end in ends)]
        phase[one.outcome] += 1
        phase["hits"] += one.outcome == "whole" and one.reuse.startswith("hit")
    return [dict(phase) for phase in found]


def wait_for(what: Callable[[], bool], seconds: float) -> bool:
    """Whether it became so in time."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
