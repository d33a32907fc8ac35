"""New blocks lie as the peer's do: few pieces, each position its own block, nothing else moved."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.bidir.connector.placing import last_blocks, only_group, place
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from tests.connector.sim import FIRST_TURN, Engine
from tests.connector.test_scheduling import turn, unrelated


def pieces(ours: list[int], theirs: list[int]) -> int:
    """As NIXL merges them: neighbours that rise on both sides are one."""
    pairs = sorted(zip(ours, theirs, strict=True))
    steps = itertools.pairwise(pairs)
    return 1 + sum((b[0] - a[0], b[1] - a[1]) != (1, 1) for a, b in steps)


def new(ids: list[int]) -> list[KVCacheBlock]:
    blocks = [KVCacheBlock(block_id) for block_id in ids]
    for block in blocks:
        block.ref_cnt = 1
    return blocks


def ids(table: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in table]


def test_runs_that_go_the_other_way_are_turned_round() -> None:
    table = new([99, 98, 30, 29, 28, 12, 11, 10, 7])
    theirs = [40, 41, 42, 20, 21, 22]
    assert pieces(ids(table)[2:8], theirs) == 6
    place(table, 2, theirs)
    assert ids(table) == [99, 98, 28, 29, 30, 10, 11, 12, 7]
    assert pieces(ids(table)[2:8], theirs) == 2


def test_any_order_keeps_every_block_once() -> None:
    rng = random.Random(3)
    for _ in range(200):
        count = rng.randrange(1, 40)
        mine = rng.sample(range(1, 1000), count + 3)
        theirs = rng.choices(range(2000), k=count)  # a client may name one twice
        table = new(mine)
        place(table, 2, theirs)
        assert ids(table)[:2] == mine[:2] and ids(table)[-1] == mine[-1]
        assert sorted(ids(table)[2:-1]) == sorted(mine[2:-1])
        assert pieces(ids(table)[2:-1], theirs) <= max(1, pieces(mine[2:-1], theirs))


def hashed(table: list[KVCacheBlock]) -> None:
    table[1]._block_hash = b"h"  # type: ignore[assignment]


def shared(table: list[KVCacheBlock]) -> None:
    table[1].ref_cnt = 2


def null(table: list[KVCacheBlock]) -> None:
    table[1].is_null, table[1].ref_cnt = True, 0


@pytest.mark.parametrize("change", [hashed, shared, null])
def test_blocks_that_hold_something_stay_where_they_are(change: Any) -> None:
    table = new([9, 8, 7])
    change(table)
    place(table, 0, [1, 2, 3])
    assert ids(table) == [9, 8, 7]


@pytest.mark.parametrize(
    "theirs",
    [
        None,
        5,
        "abc",
        [1],
        [1, "2", 3],
        [1, 2.0, 3],
        [[1], [2, 3], 4],
        [[1], [2], [3]],
        [2**70, 1, 2],
    ],
)
def test_what_is_no_list_of_blocks_says_nothing(theirs: Any) -> None:
    table = new([9, 8, 7])
    place(table, 0, theirs)
    place(table, *last_blocks(table, [theirs]))
    place(table, *last_blocks(table, theirs))
    place(table, *last_blocks(table, [theirs, theirs]))
    assert ids(table) == [9, 8, 7]
    assert only_group([theirs, theirs]) is None


def test_of_a_handover_the_last_blocks_are_read() -> None:
    table = new([5, 9, 8, 7])
    table[0]._block_hash = b"h"  # type: ignore[assignment]
    place(table, *last_blocks(table, [[50, 10, 20, 30]]))
    assert ids(table) == [5, 7, 8, 9]


def test_pools_that_have_served_for_a_while_are_read_in_few_pieces(model: Path) -> None:
    """Real schedulers; what D keeps and P reads is checked by the simulated memory as well."""
    p, d = Engine(model, "p", blocks=400), Engine(model, "d", blocks=600)
    rng = random.Random(5)
    for seed in range(12):
        told, params = turn(d, rng.randrange(100, 1500) + seed)
        p.run(told + unrelated(30, seed), params, source=d)
        p.run(unrelated(rng.randrange(50, 900), seed), FIRST_TURN)
        if seed % 3 == 2:
            d.forget()
    p.ordered.clear()
    told, params = turn(d, 3000)
    p.run(told + unrelated(30), params, source=d)
    (order,) = p.ordered.values()
    theirs = params["remote_block_ids"][0][order.remote_positions]
    assert len(theirs) > 150
    assert pieces(list(order.local_block_ids), theirs) <= 12


def test_a_handover_is_read_in_few_pieces(model: Path) -> None:
    p, d = Engine(model, "p", blocks=400), Engine(model, "d", blocks=600)
    for engine, turned in ((p, False), (d, True)):
        pool = engine.scheduler.kv_cache_manager.block_pool
        blocks = pool.get_new_blocks(350)
        pool.free_blocks(reversed(blocks) if turned else blocks)
    tokens = unrelated(3000)
    handed, _ = p.run(tokens, FIRST_TURN)
    assert handed is not None
    request = d.add(tokens, handed)
    d.step()
    (ours,) = d.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert len(ours) > 150
    assert pieces(ours, handed["remote_block_ids"][0][: len(ours)]) <= 12


def test_whoever_is_asked_first_sees_the_placed_order(model: Path) -> None:
    """Another connector in front of ours may note the order, and store KV by it."""
    p, d = Engine(model, "p", blocks=400), Engine(model, "d", blocks=600)
    pool = d.scheduler.kv_cache_manager.block_pool
    pool.free_blocks(reversed(pool.get_new_blocks(350)))
    told, params = turn(d, 3000)
    connector, seen = p.scheduler.connector, []
    update = connector.update_state_after_alloc

    def noting(request: Any, blocks: Any, external: int) -> None:
        seen.append(ids(blocks.blocks[0]))
        update(request, blocks, external)
        seen.append(ids(blocks.blocks[0]))

    connector.update_state_after_alloc = noting
    request = p.add(told + unrelated(30), params, source=d)
    p.serve(request)
    (order,) = p.ordered.values()
    assert seen[0] == seen[1]
    assert seen[0][: len(order.local_block_ids)] == list(order.local_block_ids)
    theirs = params["remote_block_ids"][0][order.remote_positions]
    assert pieces(list(order.local_block_ids), theirs) <= 12


def test_pools_alone_do_not_do_it() -> None:
    """Else the tests above would pass without."""
    one, other = (BlockPool(2000, enable_caching=False, hash_block_size=16) for _ in range(2))
    one.free_blocks(one.get_new_blocks(600))
    other.free_blocks(reversed(other.get_new_blocks(600)))
    ours, theirs = (ids(pool.get_new_blocks(600)) for pool in (one, other))
    assert pieces(ours, theirs) > 500
    table = new(ours)
    place(table, 0, theirs)
    assert pieces(ids(table), theirs) == 1
