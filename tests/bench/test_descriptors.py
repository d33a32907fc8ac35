"""The descriptor benchmark, small: real NIXL between two processes."""

from __future__ import annotations

import itertools

import pytest

from tools.bench.descriptors import (
    CASES,
    Cache,
    Case,
    Read,
    arguments,
    block_ids,
    chosen,
    descriptors,
    measure,
    table,
)

CACHE = Cache(layers=3, page_bytes=4096, pool=256, blocks=128)


@pytest.mark.parametrize("falling", [True, False])
def test_ids_are_runs_in_the_order_that_is_asked_for(falling: bool) -> None:
    case = Case("", rows=True, run=4, falling=falling)
    ids = block_ids(case, CACHE, seed=1)
    assert len(set(ids)) == CACHE.blocks
    steps = [b - a for a, b in itertools.pairwise(ids)]
    assert steps.count(-1 if falling else 1) >= 96
    assert ids != block_ids(case, CACHE, seed=2)


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="--pool 64"):
        block_ids(CASES[0], Cache(3, 100, pool=64, blocks=65), seed=1)


def test_every_descriptor_is_the_page_or_row_of_its_block() -> None:
    cache = Cache(layers=3, page_bytes=100, pool=64, blocks=2)
    layers = descriptors(1000, cache, rows=False)[chosen([5, 2], cache, rows=False)]
    assert [int(one) for one in layers[:, 0]] == [
        1000 + (layer * cache.pool + block) * 100 for layer in range(3) for block in (5, 2)
    ]
    rows = descriptors(1000, cache, rows=True)[chosen([5, 2], cache, rows=True)]
    assert rows.tolist() == [[2500, 300, 0], [1600, 300, 0]]


def test_nixl_merges_what_rises_together_only() -> None:
    """What rows.py relies on."""
    reads = {read.case: read for read in measure(CACHE, "cpu", threads=4, repeats=1)}
    assert set(reads) == {case.name for case in CASES}
    assert reads["layers, falling runs of 64"].merged == 3 * 128
    assert reads["layers, rising runs of 64"].merged == 3 * 2
    assert reads["rows, scattered"].given == 128
    assert reads["rows, rising runs of 8"].merged == 16
    assert reads["rows, rising runs of 64"].merged == 2
    for read in reads.values():
        assert 0 < read.post_ms <= read.all_ms


def test_the_table_shows_medians() -> None:
    reads = [Read("rows, scattered", 1555, 1555, post, 9.0, 400.0) for post in (7.0, 8.0, 30.0)]
    (_, line) = table(reads).splitlines()
    assert line.split()[-3:] == ["8.00", "9.00", "400.0"]


def test_the_defaults_are_an_8b_model_at_24k_tokens() -> None:
    args = arguments([])
    size = args.layers * args.page_bytes * args.blocks
    assert (args.device, args.blocks * 16, size // 10**6) == ("cpu", 24880, 3668)
