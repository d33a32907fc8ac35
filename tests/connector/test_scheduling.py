"""Read-back under what real schedulers do: steps that overlap, preemption, chunks, ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.connector.histories import D_TURN, Engines, run
from tests.connector.sim import STOP, Engine
from tests.connector.test_simulated import COUNT, finished_turn, numbers

ASYNC = [False, True]


def unrelated(count: int, seed: int = 99) -> list[int]:
    return numbers(random.Random(seed), count)


def turn(d: Engine, count: int, said: int = 20) -> tuple[list[int], Any]:
    """A turn that D keeps: all its tokens, and D's params."""
    h, out = unrelated(count, count), unrelated(said, said)
    params, _ = finished_turn(d, h, out)
    return h + out, params


@pytest.mark.parametrize("async_scheduling", ASYNC)
def test_random_histories_where_requests_crowd_and_blocks_are_few(
    model: Path, async_scheduling: bool
) -> None:
    """Three at a time in memory for two, so that real schedulers preempt."""
    made: list[Engine] = []
    options = {"blocks": 60, "batched_tokens": 64, "chunk": 48}

    def make(decode_caching: bool) -> tuple[Engine, Engine]:
        p = Engine(model, "p", read_steps=2, async_scheduling=async_scheduling, **options)
        d = Engine(
            model,
            "d",
            prefix_caching=decode_caching,
            async_scheduling=async_scheduling,
            **options,
        )
        made.extend((p, d))
        return p, d

    assert run(Engines(make), COUNT // 3, seed=5, crowd=3) > COUNT // 10
    assert isinstance(made[0].scheduler, AsyncScheduler) is async_scheduling
    assert min(sum(one.resumed for one in made[side::2]) for side in (0, 1)) > 0


def test_a_token_in_flight_is_never_claimed(model: Path) -> None:
    """D stops while its next step, which would feed the last token, is still under way."""
    p, d = Engine(model, "p"), Engine(model, "d", async_scheduling=True)
    h = unrelated(300)
    params, _ = d.run(h, D_TURN, max_tokens=50, answer=[5, 6, STOP])
    assert d.in_flight == 1
    assert params is not None and params["remote_num_tokens"] == 302
    p.run([*h, 5, 6, STOP, 8, 9], params, source=d)
    assert [order.total for order in p.orders] == [302]
    d.forget()


@pytest.mark.parametrize("kv_role", ["kv_producer", "kv_both", "kv_consumer"])
def test_a_step_in_flight_does_not_write_into_what_is_read_back(model: Path, kv_role: str) -> None:
    """Its request was aborted; its blocks are another's only when the step is over."""
    p = Engine(model, "p", blocks=30, batched_tokens=256, async_scheduling=True, kv_role=kv_role)
    d = Engine(model, "d")
    tokens, params = turn(d, 400)
    aborted = p.add(unrelated(450), None)
    p.step()
    assert p.in_flight == 1
    p.abort(aborted)
    p.run(tokens, params, source=d)
    assert len(p.loaded) == 1
    p.forget()


@pytest.mark.parametrize("async_scheduling", ASYNC)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_preempted_request_is_not_read_for_again(
    model: Path, prefix_caching: bool, async_scheduling: bool
) -> None:
    p = Engine(
        model, "p", blocks=40, prefix_caching=prefix_caching, async_scheduling=async_scheduling
    )
    d = Engine(model, "d")
    tokens, params = turn(d, 250)
    first = p.add(unrelated(250), None, max_tokens=90)
    p.step()
    read = p.add([*tokens, 1], params, max_tokens=90, source=d)
    p.serve(first, read)
    assert read.num_preemptions > 0
    assert [order.total for order in p.orders] == [269]
    assert len(p.loaded) == 1
    assert [row[0] for row in p.decisions] == ["read"], "decided once"
    p.forget()


@pytest.mark.parametrize("async_scheduling", ASYNC)
def test_two_that_need_the_last_block_both_finish(model: Path, async_scheduling: bool) -> None:
    """Their prompts take all 59 blocks in the same step; both then need one more.

    Blocks of a preempted request may come back with the step in flight only.
    """
    d = Engine(
        model,
        "d",
        blocks=60,
        chunk=48,
        batched_tokens=64,
        prefix_caching=False,
        async_scheduling=async_scheduling,
    )
    both = [d.add(unrelated(count, count), None, max_tokens=2) for count in (704, 225)]
    d.serve(*both)
    assert 0 < sum(one.num_preemptions for one in both) < 4, "one makes room, once"
    d.forget()


@pytest.mark.parametrize("async_scheduling", ASYNC)
@pytest.mark.parametrize("lost", [False, True])
def test_a_read_back_that_waits_keeps_its_blocks_while_others_are_preempted(
    model: Path, lost: bool, async_scheduling: bool
) -> None:
    p = Engine(model, "p", blocks=52, read_steps=60, async_scheduling=async_scheduling)
    d = Engine(model, "d")
    tokens, params = turn(d, 250)
    others = [p.add(unrelated(200, k), None, max_tokens=90) for k in range(2)]
    p.step()
    read = p.add([*tokens, 1], params, source=d)
    p.step()
    assert len(p.orders) == 1
    if lost:
        d.forget()
    p.serve(*others, read)
    assert sum(one.num_preemptions for one in others) > 0
    assert [row[0] for row in p.decisions] == ["recompute" if lost else "read"]
    p.forget()


@pytest.mark.parametrize("async_scheduling", ASYNC)
def test_an_aborted_requests_blocks_come_back_when_its_read_has_ended(
    model: Path, async_scheduling: bool
) -> None:
    p = Engine(model, "p", read_steps=5, async_scheduling=async_scheduling)
    d = Engine(model, "d")
    tokens, params = turn(d, 250)
    free = p.free_blocks
    read = p.add(tokens, params, source=d)
    p.step()
    p.abort(read)
    assert p.free_blocks < free, "NIXL may still write there"
    for _ in range(10):
        p.step()
    assert p.free_blocks == free
    p.forget()


def test_a_request_that_finds_no_blocks_is_asked_again_and_attempts_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = Engine(model, "p", blocks=40), Engine(model, "d")
    tokens, params = turn(d, 250)
    asked = []
    found = p.bidir.get_num_new_matched_tokens

    def ask(request: Any, local: int) -> tuple[int, bool]:
        asked.append(request.request_id)
        return found(request, local)

    monkeypatch.setattr(p.bidir, "get_num_new_matched_tokens", ask)
    first = p.add(unrelated(500), None, max_tokens=30)
    p.step()
    read = p.add(tokens, params, source=d)
    p.serve(first, read)
    assert asked.count(read.request_id) > 10
    assert len(p.orders) == len(p.loaded) == 1
    p.forget()


@pytest.mark.parametrize("budget", [16, 40, 100])
def test_small_chunks_read_and_compute_the_same(model: Path, budget: int) -> None:
    p = Engine(model, "p", batched_tokens=budget)
    d = Engine(model, "d", batched_tokens=budget)
    tokens, params = turn(d, 250)
    p.run([*tokens, *unrelated(130)], params, source=d)
    assert [order.total for order in p.orders] == [269]
    p.run([*tokens, *unrelated(130)], None)


def test_a_turn_of_one_token_keeps_its_whole_prompt(model: Path) -> None:
    p, d = Engine(model, "p"), Engine(model, "d")
    h = unrelated(300)
    params, _ = finished_turn(d, h, [9])
    assert params["remote_num_tokens"] == 300
    p.run([*h, 9, 9], params, source=d)
    assert [order.total for order in p.orders] == [300]


def test_a_data_parallel_rank_keeps_and_answers_for_its_own_turns(model: Path) -> None:
    p = Engine(model, "p")
    ranks = [Engine(model, "d", rank=rank) for rank in range(2)]
    made = [turn(d, 250) for d in ranks]
    assert [params["lease_id"].split("-")[0] for _, params in made] == ["d0", "d1"]
    ports = [params["remote_port"] for _, params in made]
    assert ports[1] == ports[0] + 1, "each rank listens for itself"
    tokens, params = made[1]
    p.run([*tokens, 1], params, source=ranks[1])
    assert len(p.loaded) == 1
    # The other rank kept the same tokens, in blocks of its own.
    p.scheduler.reset_prefix_cache()
    p.run([*tokens, 1], params, source=ranks[0])
    assert len(p.orders) == 2 and len(p.loaded) == 1
