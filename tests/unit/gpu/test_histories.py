"""What may be read back of a history, against a reckoning that is spelt out token by token."""

from __future__ import annotations

import random

import pytest

from tests.gpu.histories import (
    KINDS,
    ROWS,
    change,
    counted_wrong,
    expected_read,
    random_conversations,
    row_conversations,
    source,
    with_another_block,
)


@pytest.mark.parametrize(
    ("name", "by_16", "by_64", "by_128"),
    [
        ("append", 739, 739, 739),
        ("edited_front", 0, 0, 0),
        ("edited_middle", 400, 384, 384),
        ("truncated", 288, 256, 256),
        ("reasoning_stripped", 688, 640, 700),
        ("other_conversation", 0, 0, 0),
        ("regenerated", 688, 640, 699),
    ],
)
def test_named_histories_may_read_so_much(name: str, by_16: int, by_64: int, by_128: int) -> None:
    """Of 700 prompt and 40 generated tokens, for blocks of 16, 64 and 128 tokens."""
    rng = random.Random(1)
    new = source(rng)
    (one,) = [c for c in row_conversations(rng) if c.name == name]
    answer = new(one.generate)
    prompt = one.second(one.prompt, answer, new)
    told = one.prompt + answer
    assert [expected_read(told, prompt, block, 64) for block in (16, 64, 128)] == [
        by_16,
        by_64,
        by_128,
    ]


def test_the_last_generated_token_and_the_last_of_the_prompt_are_never_read() -> None:
    told = list(range(100, 133))
    assert expected_read(told, [*told, 1, 2], 16, 1) == 32
    assert expected_read(told, told[:32], 16, 1) == 31


def test_tokens_behind_the_last_whole_block_need_all_blocks_before_them() -> None:
    told = list(range(100, 141))
    assert expected_read(told, [*told[:35], 1], 16, 1) == 35
    assert expected_read(told, [*told[:31], 1, *told[32:]], 16, 1) == 16


def test_below_the_threshold_or_without_a_whole_block_nothing_is_read() -> None:
    told = list(range(100, 180))
    assert expected_read(told, told, 16, 79) == 79
    assert expected_read(told, told, 16, 80) == 0
    assert expected_read(told[:16], told, 16, 1) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_change_is_what_its_name_says(kind: str) -> None:
    """By its length against the history's; `strip` is made elsewhere and leaves it here."""
    for seed in range(30):
        rng = random.Random(seed)
        told = source(rng)(50)
        changed = change(kind, rng, told, source(rng))
        if kind in ("same", "strip"):
            assert changed == told
        elif kind == "append":
            assert changed[:50] == told and len(changed) > 50
        elif kind == "insert":
            assert changed != told and len(changed) > 50
        elif kind == "truncate":
            assert changed == told[: len(changed)]
        elif kind == "delete":
            assert set(changed) <= set(told) and len(changed) <= 50
        elif kind == "duplicate":
            assert set(changed) == set(told) and len(changed) >= 50
        else:
            assert len(set(changed) - set(told)) > 0


def test_random_conversations_are_those_of_the_seed_and_use_every_change() -> None:
    one, again = (random_conversations(random.Random(7), 50) for _ in range(2))
    assert [c.prompt for c in one] == [c.prompt for c in again]
    new = source(random.Random(3))
    answer = new(20)
    seconds = [[c.second(c.prompt, answer, lambda n: [5] * n) for c in cs] for cs in (one, again)]
    assert seconds[0] == seconds[1]
    assert all(seconds[0])
    assert {kind for c in one for kind in c.name.split(":")[1].split("+")} == set(KINDS)


def test_another_block_differs_in_one_whole_block_and_not_in_the_last_token() -> None:
    prompt = source(random.Random(1))(100)
    for seed in range(30):
        changed = with_another_block(prompt, 16, random.Random(seed))
        assert changed is not None
        places = [k for k in range(100) if changed[k] != prompt[k]]
        assert len(changed) == 100
        assert places[0] // 16 == places[-1] // 16 < 6
    assert with_another_block(prompt[:16], 16, random.Random(1)) is None


def test_reading_by_count_is_wrong_where_positions_or_content_differ() -> None:
    """With small blocks a regenerated answer is paired from the end; with large ones it fits."""
    assert not counted_wrong("append", 16)
    assert counted_wrong("regenerated", 16)
    assert not counted_wrong("regenerated", 128)
    assert all(counted_wrong(name, 128) for name in set(ROWS) - {"append", "regenerated"})
