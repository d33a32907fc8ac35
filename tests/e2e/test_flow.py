"""The whole flow on real engines: the next turn's prefill takes back what the decode node kept.

Prompts are token ids and prefix caches are off, so that a history is exactly what was generated,
and each token that is not computed has come from the other engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.e2e.conftest import THRESHOLD, Route
from tests.e2e.turns import FIELD, KvCounters, Turn, ask, converse, metric, outcomes, tokens
from tools.cluster import Cluster, ModelShape
from tools.cluster.router import RouterProcess

BLOCK_TOKENS = 128
BYTES_PER_TOKEN = ModelShape().kv_bytes_per_token
# Tokens that each turn adds: histories end in the middle of a block and at most once at its end.
QUESTIONS = [tokens(count, seed) for seed, count in enumerate((300, 90, 128, 37))]
LOG_INTERVAL_S = 10.0


@dataclass(frozen=True)
class Told:
    """A conversation that has been led through the router, and what each turn moved."""

    turns: list[Turn]
    prefill: list[KvCounters]
    decode: list[KvCounters]
    outcomes: dict[str, int]
    log: str

    @property
    def kept_before(self) -> list[int]:
        """For each turn, the tokens that D had kept of the one before."""
        return [0, *(turn.kept for turn in self.turns[:-1])]


@pytest.fixture(scope="module")
def told(pair: Cluster, route: Route) -> Told:
    """Four streamed turns of one conversation."""
    prefill, decode = pair.prefill[0], pair.decode[0]
    turns: list[Turn] = []
    at_p, at_d = [KvCounters.of(prefill)], [KvCounters.of(decode)]
    with route(pair) as router:
        for turn in converse(router, QUESTIONS, conversation_id="four-turns"):
            turns.append(turn)
            at_p.append(KvCounters.of(prefill))
            at_d.append(KvCounters.of(decode))
        return Told(turns, _steps(at_p), _steps(at_d), outcomes(router), router.log_text)


@pytest.fixture
def router(pair: Cluster, route: Route) -> Iterator[RouterProcess]:
    """A router that nobody has asked yet."""
    with route(pair) as running:
        yield running


def test_every_turn_after_the_first_is_a_hit(told: Told) -> None:
    assert told.outcomes == {"first_turn": 1, "hit": 3}
    assert re.findall(r"cache (?:HIT|MISS \(\w+\))", told.log) == [
        "cache MISS (first_turn)",
        *["cache HIT"] * 3,
    ]
    assert len(re.findall(r"Prefill done in \d+ms", told.log)) == 4


def test_p_reads_the_tokens_that_d_kept_and_computes_the_rest(told: Told) -> None:
    assert [counted.read for counted in told.prefill] == told.kept_before
    prompts = [len(turn.prompt) for turn in told.turns]
    assert [counted.asked for counted in told.prefill] == prompts
    assert [counted.computed for counted in told.prefill] == [
        prompt - kept for prompt, kept in zip(prompts, told.kept_before, strict=True)
    ]


def test_nixl_moves_the_blocks_of_these_tokens_and_no_others(told: Told) -> None:
    assert [counted.moved for counted in told.prefill] == [
        _bytes_of_blocks(kept) for kept in told.kept_before
    ]
    assert [counted.moved for counted in told.decode] == [
        _bytes_of_blocks(len(turn.prompt)) for turn in told.turns
    ]


def test_d_takes_each_prompt_from_p(told: Told) -> None:
    prompts = [len(turn.prompt) for turn in told.turns]
    assert [counted.read for counted in told.decode] == prompts


def test_p_frees_a_prompt_when_d_has_read_it(pair: Cluster, router: RouterProcess) -> None:
    """Not only when its time is over, which is 30 s."""
    ask(router, tokens(300, 77))
    end = time.monotonic() + 20
    while metric(pair.prefill[0], "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert metric(pair.decode[0], "vllm:bidir_lost_handovers_total") == 0


def test_text_equals_that_of_a_single_engine(told: Told, pair: Cluster) -> None:
    for turn in told.turns:
        assert ask(pair.decode[0], turn.prompt).generated == turn.generated


def test_text_equals_that_without_read_back(
    told: Told, pair: Cluster, router: RouterProcess
) -> None:
    """Without a conversation id P computes everything, the miss says why, the text is the same."""
    before = KvCounters.of(pair.prefill[0])
    for turn in told.turns:
        assert ask(router, turn.prompt).generated == turn.generated
    assert KvCounters.of(pair.prefill[0]).since(before).read == 0
    assert outcomes(router) == {"no_conversation": 4}
    assert router.log_text.count("cache MISS (no_conversation)") == 4


def test_client_never_sees_where_the_kv_is(told: Told) -> None:
    assert not any(FIELD in turn.wire or "remote_block_ids" in turn.wire for turn in told.turns)


@pytest.mark.usefixtures("told")
def test_engines_log_their_transfers(pair: Cluster) -> None:
    """The base release's line, which operators look for, stands in the logs of P and D."""
    end = time.monotonic() + 3 * LOG_INTERVAL_S
    for engine in (pair.prefill[0], pair.decode[0]):
        while "KV Transfer metrics:" not in engine.log_path.read_text(encoding="utf-8"):
            assert time.monotonic() < end, f"{engine.name} has logged no transfer"
            time.sleep(0.2)


def test_expired_entry_is_a_miss_with_the_right_answer(pair: Cluster, route: Route) -> None:
    """A turn that comes after --conversation-ttl is computed by P, and the reason is counted."""
    with route(pair, "--conversation-ttl", "0.2") as router:
        first = ask(router, QUESTIONS[0], conversation_id="late")
        time.sleep(0.3)
        before = KvCounters.of(pair.prefill[0])
        second = ask(router, first.history + QUESTIONS[1], conversation_id="late")
        assert KvCounters.of(pair.prefill[0]).since(before).read == 0
        assert second.generated == ask(pair.decode[0], second.prompt).generated
        assert outcomes(router) == {"first_turn": 1, "expired": 1}
        assert "cache MISS (expired)" in router.log_text


@pytest.mark.parametrize(
    ("gain", "read"), [(THRESHOLD, THRESHOLD), (THRESHOLD - 1, 0)], ids=["equal", "below"]
)
def test_p_reads_when_the_gain_reaches_the_threshold(
    pair: Cluster, router: RouterProcess, gain: int, read: int
) -> None:
    """A turn that could save kv_recompute_threshold tokens reads them; one less is computed."""
    first = ask(router, tokens(gain - 9, gain), max_tokens=10, conversation_id="short")
    assert first.kept == gain
    before = KvCounters.of(pair.prefill[0])
    second = ask(router, first.history + QUESTIONS[1], conversation_id="short")
    counted = KvCounters.of(pair.prefill[0]).since(before)
    assert (counted.read, counted.computed) == (read, len(second.prompt) - read)
    assert counted.moved == _bytes_of_blocks(read)
    assert second.generated == ask(pair.decode[0], second.prompt).generated
    assert outcomes(router) == {"first_turn": 1, "hit": 1}


def test_conversations_in_turns_read_their_own(pair: Cluster, router: RouterProcess) -> None:
    """Two conversations, begun by body field and continued by header, never meet."""
    names = ("c1", "c2")
    first = [ask(router, tokens(200, i), conversation_id=name) for i, name in enumerate(names)]
    for name, turn in zip(names, first, strict=True):
        second = ask(router, turn.history + QUESTIONS[3], session=name, stream=False)
        assert FIELD not in second.wire
        assert second.generated == ask(pair.decode[0], second.prompt).generated
    assert outcomes(router) == {"first_turn": 2, "hit": 2}


def _steps(counted: list[KvCounters]) -> list[KvCounters]:
    return [after.since(before) for before, after in pairwise(counted)]


def _bytes_of_blocks(token_count: int) -> int:
    """Bytes of the whole blocks that hold the first ``token_count`` tokens of a sequence."""
    return -(-token_count // BLOCK_TOKENS) * BLOCK_TOKENS * BYTES_PER_TOKEN
