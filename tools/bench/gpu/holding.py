"""What it costs D to keep finished conversations: gaps between a stream's tokens, and CPU time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.bench.cpu import shares
from tools.bench.gpu import plan
from tools.bench.gpu.client import FIRST, body, encode, first_token, gaps, whole
from tools.bench.gpu.counters import kv_usage
from tools.bench.gpu.plan import SetName
from tools.bench.gpu.turns import PairOfNodes, at_once, params_of

_CPU_S = 5.0
# Of a stream: the first gaps have the prompt's end in them.
_FIRST_GAPS = 5
# What the last request has left to do does not belong to rest.
_REST_S = 0.5


@dataclass(frozen=True)
class Held:
    """One D while it keeps `held` conversations.

    Gaps between the tokens of one stream, ms. CPU in percent of one core, at rest: the engine's
    processes, and its API server. kv_usage: share of the KV cache in use; kept_tokens: how many
    tokens of it are finished turns, by the client's account, after all was measured;
    kept_all: whether none had come to its end by then.
    """

    set_name: SetName
    held: int
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    itl_count: int
    engine_cpu_percent: float
    api_cpu_percent: float
    kv_usage: float
    kept_tokens: int
    kept_all: bool

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def make_contact(nodes: PairOfNodes, tokens: int) -> None:
    """A handover of which D keeps nothing, since its client leaves, and a stream: both warm up.

    So D without held conversations has met P too. Raises RequestError.
    """
    prompt = encode(nodes.prompt(tokens))
    handed, _ = whole(nodes.prefill.url, body(prompt, 1, FIRST))
    first_token(nodes.decode.url, body(prompt, plan.SECOND_ANSWER, params_of(handed), stream=True))
    prompt = encode(nodes.prompt(plan.STREAM_PROMPT))
    gaps(nodes.decode.url, body(prompt, plan.STREAM_ANSWER, stream=True))


def measure_held(nodes: PairOfNodes, held: int, already: int, tokens: int) -> Held:
    """Finish turns of `tokens` until `held` are kept, `already` of which there are, and measure.

    With none it waits first until D has given back all that it still keeps.
    """
    if held == 0:
        nodes.kept.wait_until_empty()
    else:
        at_once(nodes, [tokens] * (held - already), plan.SHORT_ANSWER)
    time.sleep(_REST_S)
    engine, api = shares(nodes.decode, _CPU_S)
    prompt = encode(nodes.prompt(plan.STREAM_PROMPT))
    between = gaps(nodes.decode.url, body(prompt, plan.STREAM_ANSWER, stream=True))[_FIRST_GAPS:]
    kept = nodes.kept.tokens()
    return Held(
        nodes.name,
        held,
        itl_mean_ms=round(statistics.mean(between), 3),
        itl_p50_ms=round(statistics.median(between), 3),
        itl_p99_ms=round(percentile(between, 0.99), 3),
        itl_count=len(between),
        engine_cpu_percent=round(engine * 100, 1),
        api_cpu_percent=round(api * 100, 1),
        kv_usage=round(kv_usage(nodes.decode.url), 4),
        kept_tokens=kept,
        kept_all=kept >= held * tokens,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are below, the largest at most."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))]
