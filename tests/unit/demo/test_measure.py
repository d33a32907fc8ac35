from __future__ import annotations

import pytest

from tools.demo.client import Answer
from tools.demo.errors import DemoError
from tools.demo.measure import Readings, turn_of
from tools.demo.metrics import Reading

ANSWER = Answer("text", prompt_tokens=1340, completion_tokens=48, ttft_s=0.2)


def readings(
    tokens: int = 0, reads: int = 0, read_s: float = 0, prefills: int = 0, turns: str = ""
) -> Readings:
    prefill = (
        f'vllm:external_prefix_cache_hits_total{{engine="0"}} {tokens}\n'
        f'vllm:nixl_xfer_time_seconds_count{{engine="0"}} {reads}\n'
        f'vllm:nixl_xfer_time_seconds_sum{{engine="0"}} {read_s}\n'
    )
    router = (
        f"bidir_router_prefill_seconds_count {prefills}\n"
        f"bidir_router_prefill_seconds_sum {prefills * 0.5}\n{turns}"
    )
    return Readings(Reading(prefill), Reading(router))


MISS = 'bidir_router_turns_total{outcome="miss",reason="first_turn"} 1.0\n'
HIT = 'bidir_router_turns_total{outcome="hit",reason=""} 1.0\n'


def test_hit_has_what_grew() -> None:
    """Tokens and time of the read are P's growth; what was not read was computed."""
    before = readings(100, 1, 0.01, 1, MISS)
    turn = turn_of(ANSWER, before, readings(1303, 2, 0.014, 2, MISS + HIT))
    assert (turn.prompt_tokens, turn.read_back_tokens, turn.computed_tokens) == (1340, 1203, 137)
    assert turn.transfer_s == pytest.approx(0.004)
    assert (turn.prefill_s, turn.ttft_s) == (0.5, 0.2)
    assert (turn.outcome, turn.reason, turn.text) == ("hit", "", "text")


def test_miss_has_no_transfer() -> None:
    """Without a read there is no transfer time, which is not the same as a time of zero."""
    turn = turn_of(ANSWER, readings(100, 1, 0.01), readings(100, 1, 0.01, 1, MISS))
    assert (turn.read_back_tokens, turn.computed_tokens, turn.transfer_s) == (0, 1340, None)
    assert (turn.outcome, turn.reason) == ("miss", "first_turn")


@pytest.mark.parametrize(
    ("prefills", "turns"),
    [(2, HIT), (0, HIT), (1, HIT + MISS), (1, HIT.replace("1.0", "2.0")), (1, "")],
)
def test_figures_of_more_or_less_than_one_request_are_refused(prefills: int, turns: str) -> None:
    """Another client's request, or a prefill leg that failed, cannot pass for this one's."""
    with pytest.raises(DemoError, match="expected one of each"):
        turn_of(ANSWER, readings(), readings(prefills=prefills, turns=turns))
