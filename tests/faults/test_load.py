"""Little memory, clients that go away, and many mixed turns: all blocks come back."""

from __future__ import annotations

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.oracle import IDS, Compared, ask, compare
from tests.e2e.turns import http, metric
from tests.faults.turns import (
    FIRST_TURN,
    check_right,
    clear_cache,
    clear_cache_now,
    decode,
    prefill,
    read,
    rests,
    tokens,
    turn,
)
from tools.cluster import Cluster, Engine

# Mixed turns of the leak check; make test-full asks for 500.
TURNS = int(os.environ.get("BIDIR_LEAK_TURNS", "60"))
ABORTS = 20
# Tokens of a prompt and of its answer: four prompts fit into the pool, their answers by far not.
OTHERS, ANSWER = 1100, 650
PREEMPTIONS = "vllm:num_preemptions_total"
# How a crowd has gone: seconds in the engine's queue, and from its arrival there to its end.
COURSE = (
    PREEMPTIONS,
    "vllm:request_queue_time_seconds_sum",
    "vllm:e2e_request_latency_seconds_sum",
)


def long_answer(engine: Engine, prompt: list[int], params: Any, max_tokens: int) -> list[int]:
    more = {} if params is None else {"kv_transfer_params": params}
    answer = ask(engine, IDS, prompt, max_tokens=max_tokens, ignore_eos=True, **more)
    return IDS.pieces(answer)


@dataclass(frozen=True)
class Crowd:
    """Requests that together need more blocks than there are: what each said, and how it went."""

    prompts: list[list[int]]
    answers: list[list[int]]
    said: list[int]
    preemptions: float
    course: str


def crowd(engine: Engine, seed: object, prompt: list[int], params: Any) -> Crowd:
    """Four long answers, and ours for `prompt` with `params` as the last to come."""
    prompts = [tokens((seed, k), OTHERS) for k in range(4)]
    before = {name: metric(engine, name) for name in COURSE}
    began = time.monotonic()
    took: list[str] = []

    def timed(*request: Any) -> list[int]:
        answer = long_answer(engine, *request)
        took.append(f"{time.monotonic() - began:.1f}")
        return answer

    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(timed, other, None, ANSWER) for other in prompts]
        time.sleep(0.5)
        ours = pool.submit(timed, prompt, params, 300)
        answers = [one.result() for one in others]
        said = ours.result()
    course = {name: metric(engine, name) - value for name, value in before.items()}
    return Crowd(
        prompts, answers, said, course[PREEMPTIONS], f"answered after {', '.join(took)} s; {course}"
    )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_preempted_request_finishes_and_is_right(
    role: str, faulty: Cluster, compared: Compared
) -> None:
    """One that has read KV is scheduled again, once more without a read."""
    engine = faulty.prefill[0] if role == "prefill" else faulty.decode[0]
    seen: list[str] = []
    # A crowd that comes too far apart need not preempt anybody: a busy machine can delay it.
    for attempt in range(4):
        for one in faulty.engines:
            rests(one)
        seed = (role, attempt)
        history, kept = turn(faulty, tokens((seed, "preempted"), 600))
        prompt = history + tokens("more", 20)
        clear_cache(faulty.prefill[0])
        if role == "decode":
            kept = prefill(faulty.prefill[0], prompt, kept)
        found = crowd(engine, seed, prompt, kept)
        seen.append(found.course)
        if found.preemptions:
            break
    assert found.preemptions > 0, "\n".join(seen)
    check_long(engine, prompt, found.said, 300, compared)
    for other, answer in zip(found.prompts, found.answers, strict=True):
        check_long(engine, other, answer, ANSWER, compared)
    for one in faulty.engines:
        rests(one)


def check_long(
    engine: Engine, prompt: list[int], said: list[int], length: int, compared: Compared
) -> None:
    found = {"choices": [{"token_ids": said}]}
    compare(IDS, engine, prompt, found, True, compared, max_tokens=length, ignore_eos=True)


def goes_away(engine: Engine, prompt: list[int], params: Any, seconds: float) -> Any:
    """A client that disconnects after so long; the params if it was answered before."""
    body = {"model": engine.model, "prompt": prompt, "max_tokens": 64, "temperature": 0}
    try:
        with http() as client:
            answer = client.post(
                f"{engine.url}/v1/completions",
                json={**body, "ignore_eos": True, "kv_transfer_params": params},
                timeout=httpx.Timeout(30, read=seconds),
            )
        return answer.json()["kv_transfer_params"]
    except httpx.ReadTimeout:
        return None


def test_clients_that_go_away_leave_no_block(faulty: Cluster, compared: Compared) -> None:
    """At random moments of either leg; also while a receive and a send are both under way."""
    p, d = faulty.prefill[0], faulty.decode[0]
    rng = random.Random(13)
    gone = 0
    for number in range(ABORTS):
        history, kept = turn(faulty, tokens(("abort", number), 300))
        clear_cache_now(p)  # not where a client before has left blocks: they stay for a while
        prompt = history + tokens("more", 200)
        if number % 2:
            answered = goes_away(p, prompt, kept, rng.uniform(0.001, 0.4))
        else:
            answered = goes_away(d, prompt, prefill(p, prompt, kept), rng.uniform(0.001, 0.8))
        gone += answered is None
    assert gone >= ABORTS // 4  # the others were answered first
    for engine in faulty.engines:
        rests(engine)
        check_right(engine, tokens(("abort", 0), 300), compared)


def mixed_turn(faulty: Cluster, rng: random.Random, number: int) -> str:
    """One turn of a kind drawn at random; its name."""
    p, d = faulty.prefill[0], faulty.decode[0]
    kind = rng.choice(("finished", "aborted on P", "aborted on D", "expired", "failed", "stopped"))
    history, kept = turn(faulty, tokens(("mixed", number), rng.choice((100, 200, 400))))
    prompt = history + tokens(number, rng.choice((1, 150)))
    if kind == "finished":
        turn(faulty, prompt, kept)
    elif kind == "aborted on P":
        goes_away(p, prompt, kept, rng.uniform(0.001, 0.2))
    elif kind == "aborted on D":
        goes_away(d, prompt, prefill(p, prompt, kept), rng.uniform(0.001, 0.4))
    elif kind == "expired":
        # Nobody ever reads what P or D keeps.
        prefill(p, prompt, FIRST_TURN)
    elif kind == "failed":
        forged = {**(kept or {}), "lease_id": "d0-" + "0" * 32}
        decode(d, prompt, prefill(p, prompt, {**FIRST_TURN, **forged}))
    else:
        ask(d, IDS, prompt, kv_transfer_params=prefill(p, prompt, FIRST_TURN), stop=["a", "e"])
    return kind


def test_mixed_turns_leak_no_block(faulty: Cluster, compared: Compared) -> None:
    rng = random.Random(17)
    reads = read(faulty.prefill[0])
    kinds = {mixed_turn(faulty, rng, number) for number in range(TURNS)}
    assert len(kinds) == 6
    assert read(faulty.prefill[0]) > reads
    for engine in faulty.engines:
        rests(engine)
        check_right(engine, tokens("after all", 300), compared)
