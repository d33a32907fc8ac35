"""Whatever a client does to its history, no request ever attends to KV that is not its own."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.bidir.connector.decision import Match, parse_source
from vllm.bidir.connector.read_back import ReadBack

from tests.connector.histories import D_TURN, Engines, run
from tests.connector.memory import BLOCK, WrongKVError
from tests.connector.sim import FIRST_TURN, Engine

COUNT = int(os.environ.get("BIDIR_HISTORIES", "300"))


@pytest.fixture
def p(model: Path) -> Engine:
    return Engine(model, "p")


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d")


def numbers(rng: random.Random, count: int, values: int = 1000) -> list[int]:
    return [rng.randrange(values) for _ in range(count)]


def finished_turn(d: Engine, prompt: list[int], answer: list[int], salt: str | None = None) -> Any:
    params, request_id = d.run(prompt, D_TURN, max_tokens=len(answer), answer=answer, salt=salt)
    assert params is not None
    return params, request_id


ROWS = [
    ("append", lambda h, o, new: h + o + new(100), 739),
    ("edited_front", lambda h, o, new: new(400) + h[400:] + o + new(100), 0),
    ("edited_middle", lambda h, o, new: h[:400] + new(50) + h[450:] + o + new(100), 400),
    ("truncated", lambda h, o, new: h[:300] + new(20), 288),
    ("reasoning_stripped", lambda h, o, new: h + o[20:] + new(100), 688),
    ("other_conversation", lambda h, o, new: new(900), 0),
    ("regenerated", lambda h, o, new: list(h), 688),
]


@pytest.mark.parametrize(("name", "second", "expected"), ROWS, ids=[row[0] for row in ROWS])
def test_the_histories_that_the_base_release_answers_wrong(
    p: Engine, d: Engine, name: str, second: Any, expected: int
) -> None:
    rng = random.Random(1)
    h, out = numbers(rng, 700), numbers(rng, 40)
    params, _ = finished_turn(d, h, out)
    prompt = second(h, out, lambda count: numbers(rng, count))
    p.run(prompt, params, source=d)
    assert sum(order.total for order in p.orders) == expected
    # Nothing wrong was filed: a plain request for the same prompt is still right.
    p.run(prompt, None)
    d.run(prompt, None)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_random_histories_on_real_schedulers(model: Path, prefix_caching: bool) -> None:
    def make(decode_caching: bool) -> tuple[Engine, Engine]:
        p = Engine(model, "p", prefix_caching=prefix_caching, batched_tokens=256)
        return p, Engine(model, "d", blocks=2000, prefix_caching=decode_caching)

    assert run(Engines(make), COUNT, seed=int(prefix_caching)) > COUNT // 10


def test_the_oracle_finds_wrong_kv_when_verification_is_off(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With matching by count, as in the base release, this very suite fails."""

    def by_count(params: dict[str, Any], *rest: Any) -> Any:
        source = parse_source(params)
        tokens = min(params["remote_num_tokens"], len(rest[3]) - 1)
        return Match(source, tokens, None)  # type: ignore[arg-type]

    monkeypatch.setattr("vllm.bidir.connector.scheduler.match", by_count)
    # What may be read is known to the histories; here only the memory is asked.
    monkeypatch.setattr("tests.connector.histories.check", lambda *args: None)
    engines = Engines(lambda caching: (Engine(model, "p"), Engine(model, "d", blocks=2000)))
    with pytest.raises(WrongKVError):
        run(engines, 50, seed=3, shrink=False)


def test_p_reads_only_what_its_own_prefix_cache_lacks(p: Engine, d: Engine) -> None:
    rng = random.Random(2)
    h, out = numbers(rng, 640), numbers(rng, 33)
    p.run(h, FIRST_TURN)
    params, _ = finished_turn(d, h, out)
    p.run(h + out + numbers(rng, 50), params, source=d)
    (order,) = p.orders
    assert (order.local, order.total) == (640, 672)
    assert order.first_block == 640 // BLOCK


def test_siblings_read_the_same_turn(p: Engine, d: Engine) -> None:
    rng = random.Random(3)
    h, out = numbers(rng, 200), numbers(rng, 20)
    params, _ = finished_turn(d, h, out)
    for _ in range(4):
        p.scheduler.reset_prefix_cache()
        p.run(h + out + numbers(rng, 30), params, source=d)
    assert [order.total for order in p.orders] == [219] * 4


def freed(d: Engine, order: ReadBack) -> None:
    """D's time is over between HOLD and the last byte, and the blocks are used again."""
    for turn in list(d.bidir.kept._turns.values()):
        d.expire(turn.request_id)
    d.run(list(range(3000, 3000 + 700)), None)


def restarted(d: Engine, order: ReadBack) -> None:
    d.bidir.kept.__init__()  # type: ignore[misc]


def reset(d: Engine, order: ReadBack) -> None:
    d.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("fault", [freed, restarted, reset])
@pytest.mark.parametrize("local", [0, 320])
def test_what_changes_under_a_read_is_not_used(
    p: Engine, d: Engine, fault: Any, local: int
) -> None:
    """CONFIRM says so; P computes the prompt, and its cache has learned nothing wrong."""
    rng = random.Random(4)
    h, out = numbers(rng, 700), numbers(rng, 40)
    if local:
        p.run(h[:local], FIRST_TURN)
    params, _ = finished_turn(d, h, out)
    prompt = h + out + numbers(rng, 30)
    p.run(prompt, params, source=d, fault=fault)
    assert len(p.orders) == 1
    p.run(prompt, None)


def test_a_lost_read_back_is_tried_once_and_leaks_no_block(p: Engine, d: Engine) -> None:
    rng = random.Random(5)
    h, out = numbers(rng, 300), numbers(rng, 40)
    params, request_id = finished_turn(d, h, out)
    d.expire(request_id)
    free = p.free_blocks
    params_p, _ = p.run(h + out, params, source=d)
    assert len(p.orders) == 1
    assert params_p is not None and params_p["readback"] == 1
    assert p.free_blocks == free


def test_another_conversations_lease_is_not_read(p: Engine, d: Engine) -> None:
    """Params put together from two turns: the lease of one, the proof of the other."""
    rng = random.Random(6)
    one, other = numbers(rng, 300), numbers(rng, 300)
    params, _ = finished_turn(d, one, [1] * 20)
    stolen, _ = finished_turn(d, other, [1] * 20)
    prompt = one + [1] * 20 + [2]
    p.run(prompt, {**params, "lease_id": stolen["lease_id"]}, source=d)
    p.run(prompt, None)
    assert len(p.orders) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"remote_num_tokens": 10**6},
        {"remote_block_ids": [[0] * 500]},
        {"remote_block_ids": "x"},
        {"lease_id": "unknown"},
        {"lease_id": 7},
        {"lease_id": None},
        {"prefix_proof": None},
        {"prefix_proof": "A" * 10_000_000},
        {"prefix_proof": {"v": 1}},
        {"remote_port": "x"},
        {"remote_port": 0},
        {"remote_host": None},
        {"remote_engine_id": 3},
        {"tp_size": -1},
        {"tp_size": "2"},
    ],
)
def test_tampered_params_cost_a_recompute_at_most(
    p: Engine, d: Engine, change: dict[str, Any]
) -> None:
    rng = random.Random(7)
    h, out = numbers(rng, 300), numbers(rng, 20)
    params, _ = finished_turn(d, h, out)
    prompt = h + out + [5]
    p.run(prompt, {**params, **change}, source=d)
    p.run(prompt, None)


def test_both_words_at_once_read_nothing_past_verification(p: Engine, d: Engine) -> None:
    """The base would read what the params name, beside what D's HOLD answered."""
    rng = random.Random(10)
    h, out = numbers(rng, 300), numbers(rng, 20)
    params, _ = finished_turn(d, h, out)
    both = {**params, "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]]}
    p.add(h + out + [5], both)
    metadata = p.scheduler.schedule().kv_connector_metadata
    assert len(metadata.read_backs) == 1
    assert metadata.reqs_to_recv == {}


def test_a_turn_that_d_served_alone_is_announced_to_its_workers(d: Engine) -> None:
    """Else no worker would ever end it, and its blocks would be pinned for good."""
    finished_turn(d, list(range(100)), [1] * 10)
    metadata = d.scheduler.schedule().kv_connector_metadata
    assert set(metadata.reqs_to_send) <= metadata.reqs_in_batch
    assert len(metadata.reqs_to_send) == 1


def test_the_threshold_applies_to_what_is_gained(model: Path, d: Engine) -> None:
    rng = random.Random(8)
    h, out = numbers(rng, 160), numbers(rng, 17)
    params, _ = finished_turn(d, h, out)
    for threshold, reads in ((176, 1), (177, 0)):
        p = Engine(model, "p", threshold=threshold)
        p.run(h + out + [1, 2], params, source=d)
        assert len(p.orders) == reads
    p = Engine(model, "p", threshold=17)
    p.run(h, FIRST_TURN)
    p.run(h + out + [1, 2], params, source=d)
    assert p.orders == []


def test_a_turn_that_proves_nothing_keeps_no_block(d: Engine) -> None:
    free = d.free_blocks
    params, _ = d.run([1, 2, 3], D_TURN, max_tokens=2)
    assert params is None
    assert d.free_blocks == free
    assert len(d.bidir.kept) == 0


def test_kept_blocks_come_back_when_their_time_is_over(d: Engine) -> None:
    free = d.free_blocks
    _, request_id = finished_turn(d, list(range(100)), [1] * 10)
    assert d.free_blocks < free
    d.expire(request_id)
    assert d.free_blocks == free
    assert len(d.bidir.kept) == 0
