"""The conversations: one turn of each, a few at a time, and how many were read back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from tools.bench.gpu.client import FIRST, body, encode, to_read_back, whole
from tools.bench.gpu.turns import params_of, token_ids
from tools.bench.leases.plan import Plan
from tools.bench.prompts import Words
from tools.demo.metrics import Reading

# P's, of ours and of the base release.
DECISIONS = "vllm:bidir_read_back_total"
READS = "vllm:nixl_xfer_time_seconds_count"
AT_ONCE = 4


class Front(Protocol):
    """Who takes a conversation's turns. Raises RequestError."""

    def turn(self, conversation: str, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        """The answer, and the ms until it was whole."""
        ...


@dataclass(frozen=True)
class RouterFront:
    """The router, which links the turns of a conversation by its id."""

    url: str

    def turn(self, conversation: str, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        content = body(encode(prompt), tokens, return_token_ids=True, conversation_id=conversation)
        answer, took = whole(self.url, content)
        return token_ids(answer), took


@dataclass(frozen=True)
class LegsFront:
    """P, then D, as the base release's sample proxy calls them, and as little as possible more."""

    prefill_url: str
    decode_url: str
    _kept: dict[str, dict[str, Any]] = field(default_factory=dict)

    def turn(self, conversation: str, prompt: list[int], tokens: int) -> tuple[list[int], float]:
        text = encode(prompt)
        last = self._kept.get(conversation)
        given = FIRST if last is None else to_read_back(last)
        handed, prefill_ms = whole(self.prefill_url, body(text, 1, given))
        content = body(text, tokens, params_of(handed), return_token_ids=True)
        answer, decode_ms = whole(self.decode_url, content)
        told = answer.get("kv_transfer_params")
        if told is not None:  # a D that keeps nothing has nothing to tell
            self._kept[conversation] = told
        return token_ids(answer), prefill_ms + decode_ms


@dataclass
class Talks:
    """All conversations of an arm; prompts are the same in all arms as long as answers are."""

    plan: Plan
    words: Words
    _histories: dict[int, list[int]] = field(default_factory=dict)

    def warm_up(self, front: Front) -> None:
        """Two short turns of a conversation that counts nowhere."""
        prompt = self.words.random(f"{self.plan.seed}-warm-up", self.plan.warm_up_tokens)
        answer, _ = front.turn("warm-up", prompt, 1)
        front.turn("warm-up", [*prompt, *answer, prompt[0]], 1)

    def turn(self, front: Front, turn: int) -> float:
        """Each conversation's turn of that number, from 1: the median ms that one has taken."""

        def one(number: int) -> float:
            history = self._histories.get(number, [])
            seed = f"{self.plan.seed}-talk-{number}-{turn}"
            fresh = self.plan.prompt_tokens(turn) - len(history)
            prompt = [*history, *self.words.random(seed, fresh)]
            answer, took = front.turn(f"talk-{number}", prompt, self.plan.answer_tokens)
            self._histories[number] = [*prompt, *answer]
            return took

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return median(pool.map(one, range(self.plan.conversations)))


def hits(before: Reading, after: Reading, stock: bool) -> tuple[int, dict[str, int]]:
    """Turns that P read back between two of its readings, and the others that were offered one by
    reason; the base release counts its reads only, one for each turn."""
    if stock:
        return round(after.growth(before, READS)), {}
    reasons: dict[str, int] = {}
    found = 0
    for sample in after.grown(before, DECISIONS):
        if sample.label("outcome") == "read":
            found += round(sample.value)
        else:
            reason = sample.label("reason")
            reasons[reason] = reasons.get(reason, 0) + round(sample.value)
    return found, reasons
