"""The figures of one turn, each from where it arises.

P and the router only count totals: nothing in /metrics names a request, nor does any reply say how
its prompt was prefilled. So the counters are read before and after each request, and one client
asks one thing at a time: then all growth is that request's own. That exactly one prefill was
counted is checked, so that a second client is noticed rather than mixed in.

vLLM takes NIXL's figures of a read into /metrics with the engine step in which the read ended,
before P computes the rest of the prompt; only its log lines are periodic. They are complete when
the answer ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.demo.client import Answer
from tools.demo.errors import DemoError
from tools.demo.metrics import Reading, read_metrics

# P's own: what it took from peers. D counts its handover under the same names in its own process.
READ_BACK_TOKENS = "vllm:external_prefix_cache_hits_total"
READS = "vllm:nixl_xfer_time_seconds_count"
READ_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
PREFILLS = "bidir_router_prefill_seconds_count"
PREFILL_SECONDS = "bidir_router_prefill_seconds_sum"
TURNS = "bidir_router_turns_total"


@dataclass(frozen=True)
class Turn:
    """One turn as measured. Times in seconds.

    prefill_s: the router's, from sending the request to P until P's answer, reads included.
    transfer_s: NIXL's, for P's reads from D; None when P read nothing.
    ttft_s: the client's. outcome and reason: the router's words.
    """

    prompt_tokens: int
    read_back_tokens: int
    prefill_s: float
    transfer_s: float | None
    ttft_s: float
    outcome: str
    reason: str
    text: str

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that P computed itself. Its own prefix cache is off in the demo."""
        return self.prompt_tokens - self.read_back_tokens


@dataclass(frozen=True)
class Readings:
    """P's and the router's counters at one moment."""

    prefill: Reading
    router: Reading


@dataclass(frozen=True)
class Meter:
    """Where to read. Addresses without a path."""

    prefill_url: str
    router_url: str

    def measure(self, ask: Callable[[], Answer]) -> Turn:
        """Run one request and measure it; raises DemoError."""
        before = self._read()
        answer = ask()
        return turn_of(answer, before, self._read())

    def _read(self) -> Readings:
        return Readings(read_metrics(self.prefill_url), read_metrics(self.router_url))


def turn_of(answer: Answer, before: Readings, after: Readings) -> Turn:
    """The figures of the one request between two readings; DemoError if it was not one."""
    prefills = after.router.growth(before.router, PREFILLS)
    turns = after.router.grown(before.router, TURNS)
    if prefills != 1 or len(turns) != 1 or turns[0].value != 1:
        raise DemoError(
            f"the router counted {prefills:.0f} prefills and {sum(t.value for t in turns):.0f} "
            "turns, expected one of each: a leg failed, or somebody else uses this router"
        )
    if answer.ttft_s is None:
        raise DemoError("the answer has no text")
    reads = after.prefill.growth(before.prefill, READS)
    return Turn(
        prompt_tokens=answer.prompt_tokens,
        read_back_tokens=round(after.prefill.growth(before.prefill, READ_BACK_TOKENS)),
        prefill_s=after.router.growth(before.router, PREFILL_SECONDS),
        transfer_s=after.prefill.growth(before.prefill, READ_SECONDS) if reads else None,
        ttft_s=answer.ttft_s,
        outcome=turns[0].label("outcome"),
        reason=turns[0].label("reason"),
        text=answer.text,
    )
