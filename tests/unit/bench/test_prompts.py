"""Prompts, mutations and the plan that they make."""

from __future__ import annotations

import random

import pytest

from tests.unit.bench.made import WORKLOAD
from tools.bench.errors import BenchError
from tools.bench.mutate import choose, mutate
from tools.bench.plan import Workload, units
from tools.bench.prompts import Words, exact

WORDS = Words(tuple(range(100, 1000)))
HISTORY = random.Random(1).choices(WORDS.token_ids, k=400)


def test_the_same_seed_is_the_same_prompt_and_another_is_another() -> None:
    assert WORDS.random("a", 50) == WORDS.random("a", 90)[:50]
    assert WORDS.random("a", 50) != WORDS.random("b", 50)


def test_any_part_of_a_prompt_of_blocks_is_that_part_of_the_whole() -> None:
    whole = WORDS.of_blocks([3, 4, 5], 0, 1500)
    assert len(whole) == 1500
    for start, end in ((0, 10), (500, 530), (512, 1024), (1400, 1500)):
        assert WORDS.of_blocks([3, 4, 5], start, end) == whole[start:end]


def test_a_prompt_has_exactly_the_length_or_is_refused() -> None:
    assert len(exact(HISTORY, WORDS.random("x", 50), 430)) == 430
    for length in (400, 399, 451):
        with pytest.raises(BenchError, match="found     400 tokens"):
            exact(HISTORY, WORDS.random("x", 50), length)


def test_mutations_change_what_they_name() -> None:
    changed = {
        kind: mutate(kind, HISTORY, 40, "s", WORDS.token_ids)
        for kind in ("edit", "truncate", "strip", "swap")
    }
    differ = [a != b for a, b in zip(changed["edit"], HISTORY, strict=True)]
    assert sum(differ) == 1
    assert changed["truncate"] == HISTORY[100:]
    assert changed["strip"] == HISTORY[:360] + HISTORY[380:]
    assert len(changed["swap"]) == 400 and changed["swap"][:5] != HISTORY[:5]
    assert mutate("", HISTORY, 40, "s", WORDS.token_ids) == HISTORY


def test_the_share_of_mutated_turns_is_the_one_asked_for() -> None:
    chosen = [choose(0.25, f"seed-{n}") for n in range(2000)]
    assert 0.22 < sum(bool(kind) for kind in chosen) / 2000 < 0.28
    assert set(chosen) == {"", "edit", "truncate", "strip", "swap"}
    assert not any(choose(0.0, f"seed-{n}") for n in range(100))


def test_repeats_take_the_lengths_in_different_orders_but_the_same_units() -> None:
    many = Workload(lengths=tuple(range(500, 4000, 100)))
    first, second = ([unit.name for unit in units(many, repeat)] for repeat in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert first == [unit.name for unit in units(many, 0)]


def test_the_stream_is_measured_before_and_while_conversations_are_kept() -> None:
    unit = units(WORKLOAD, 0)[0]
    phases = [talk.turns[0].phase for talk in unit.talks]
    assert phases == ["decode", "hold", "hold", "decode"]
    assert [talk.turns[0].held for talk in unit.talks] == [0, 0, 0, 3]


@pytest.mark.parametrize(
    "wrong", [{"lengths": (100,)}, {"mutate_share": 1.5}, {"output_tokens": 0}]
)
def test_a_workload_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BenchError, match="contradicts itself"):
        Workload(**{"lengths": (2000,), **wrong}).check()  # type: ignore[arg-type]
