"""A proof finds the longest prefix that its checkpoints allow, and never one token more."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.bidir.connector.proof import (
    MAX_CHECKPOINTS,
    PrefixProof,
    Verified,
    choose_checkpoints,
    make_proof,
    parse_proof,
    verify,
)
from vllm.bidir.reasons import Reason

from tests.unit.connector.chain import BLOCK, chain
from tests.unit.connector.histories import common_prefix, longest_allowed, mutate

MARK = "sha256:model"


def prove(tokens: list[int], prompt: int | None = None, **kwargs: Any) -> PrefixProof:
    valid = kwargs.pop("valid", len(tokens))
    proof = make_proof(
        MARK, BLOCK, chain(tokens, BLOCK, kwargs.pop("salt", "")), tokens, valid,
        len(tokens) if prompt is None else prompt, **kwargs,
    )  # fmt: skip
    assert proof is not None
    return proof


def check(proof: PrefixProof, tokens: list[int], salt: str = "", **kwargs: Any) -> Verified:
    return verify(proof, MARK, BLOCK, chain(tokens, BLOCK, salt), tokens, **kwargs)


def numbers(count: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}-{k}").randrange(1000) for k in range(count)]


def test_an_appended_history_is_verified_to_the_last_valid_token() -> None:
    turn = numbers(739)
    assert check(prove(turn), turn + numbers(100, 1)) == Verified(739, None)


@pytest.mark.parametrize("common", [0, 1, 15, 16, 17, 300, 704, 705, 738])
def test_a_history_that_diverges_is_verified_no_further(common: int) -> None:
    turn = numbers(739)
    other = turn[:common] + [turn[common] + 1] + turn[common + 1 :] + numbers(50, 1)
    found = check(prove(turn), other)
    assert found.reason is Reason.DIVERGED
    # All blocks are checkpoints at this length, and the tail is compared token by token.
    assert found.tokens == (common if common >= 736 else common // BLOCK * BLOCK)


def test_a_truncated_history_is_verified_to_its_last_full_block() -> None:
    turn = numbers(739)
    assert check(prove(turn), turn[:300]) == Verified(288, Reason.DIVERGED)


def test_another_salt_verifies_nothing() -> None:
    turn = numbers(739)
    assert check(prove(turn, salt="a"), turn, salt="b") == Verified(0, Reason.DIVERGED)


def test_the_last_tokens_alone_prove_nothing() -> None:
    """Without a full block nothing binds the tail to salt, LoRA or images."""
    tokens = numbers(15)
    assert make_proof(MARK, BLOCK, chain(tokens, BLOCK), tokens, 15, 15) is None


def test_tokens_without_kv_are_never_claimed() -> None:
    turn = numbers(100)
    assert prove(turn, valid=99).valid_tokens == 99
    assert prove(turn, valid=96).valid_tokens == 96
    assert prove(turn, valid=33).valid_tokens == 33


def test_a_chain_that_lags_behind_is_not_overrun() -> None:
    turn = numbers(64)
    proof = make_proof(MARK, BLOCK, chain(turn, BLOCK)[:3], turn, 64, 64)
    assert proof is not None
    assert proof.valid_tokens == 63
    assert len(proof.tail) < BLOCK


def test_images_in_the_tail_end_what_ids_can_prove() -> None:
    turn = numbers(60)
    assert prove(turn, tail_tokens=5).valid_tokens == 53
    assert check(prove(turn), turn + [1], tail_limit=50) == Verified(50, Reason.DIVERGED)


@pytest.mark.parametrize(
    ("mark", "size", "reason"),
    [
        ("sha256:other", BLOCK, Reason.MODEL),
        ("xxhash:model", BLOCK, Reason.HASH),
        (MARK, 32, Reason.BLOCK_SIZE),
    ],
)
def test_another_model_hash_or_block_size_verifies_nothing(
    mark: str, size: int, reason: Reason
) -> None:
    turn = numbers(739)
    found = verify(prove(turn), mark, size, chain(turn, size), turn)
    assert found == Verified(0, reason)


@given(st.integers(0, 20_000), st.integers(-1, 20_000))
@settings(max_examples=200, deadline=None)
def test_checkpoints_are_bounded_sorted_and_end_with_the_last(last: int, prompt: int) -> None:
    chosen = choose_checkpoints(last, prompt)
    assert chosen == sorted(set(chosen))
    assert chosen[-1] == last and chosen[0] >= 0
    assert len(chosen) <= MAX_CHECKPOINTS
    if 0 <= prompt <= last:
        assert prompt in chosen


def test_a_stripped_last_answer_of_a_long_history_loses_less_than_a_block() -> None:
    """The prompt's end is a checkpoint, whatever the answer's length."""
    turn = numbers(60_000)
    proof = prove(turn, prompt=59_000)
    found = check(proof, turn[:59_000] + numbers(500, 1))
    assert 59_000 - BLOCK < found.tokens <= 59_000


def test_a_proof_survives_its_journey_and_stays_small() -> None:
    turn = numbers(128 * 1024 + 15)
    proof = prove(turn, prompt=100_000)
    text = json.dumps(proof.to_params(), separators=(",", ":"))
    assert parse_proof(json.loads(text)) == proof
    assert len(text) <= 6 * 1024


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": None},
        {"hash": 3},
        {"hash": "x" * 300},
        {"block_size": 0},
        {"block_size": True},
        {"block_size": "16"},
        {"block_size": 1 << 40},
        {"checkpoints": []},
        {"checkpoints": None},
        {"checkpoints": [[0, "!!!"]]},
        {"checkpoints": [[0, "AAAA"]]},
        {"checkpoints": [[-1, "A" * 22]]},
        {"checkpoints": [[1 << 60, "A" * 22]]},
        {"checkpoints": [[0.5, "A" * 22]]},
        {"checkpoints": [[1, "A" * 22], [0, "A" * 22]]},
        {"checkpoints": [[0, "A" * 22], [0, "A" * 22]]},
        {"checkpoints": [[k, "A" * 22] for k in range(129)]},
        {"checkpoints": [[0, "A" * 10_000_000]]},
        {"checkpoints": "AAAA"},
        {"tail": None},
        {"tail": [1] * 16},
        {"tail": [-1]},
        {"tail": ["1"]},
        {"tail": [1 << 40]},
    ],
)
def test_what_is_no_proof_is_none_and_never_an_error(change: dict[str, Any]) -> None:
    params = {**prove(numbers(50)).to_params(), **change}
    assert parse_proof(params) is None


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_garbage_is_none(garbage: Any) -> None:
    assert parse_proof(garbage) is None
    assert parse_proof({"v": 1, "checkpoints": garbage, "tail": garbage}) is None


def run_histories(count: int, seed: int) -> int:
    """Random turns and mutations; returns how many had a proof. Few token values, so that
    blocks repeat."""
    rng = random.Random(seed)
    proven = 0
    for _ in range(count):
        turn = [rng.randrange(5) for _ in range(rng.choice((20, 100, 700, 3000)))]
        valid = len(turn) - rng.randrange(3)
        hashes = chain(turn, BLOCK)
        proof = make_proof(MARK, BLOCK, hashes, turn, valid, rng.randrange(len(turn)))
        if proof is None:
            continue
        proven += 1
        prompt = turn
        for _ in range(rng.randrange(1, 4)):
            prompt = mutate(rng, prompt)
        found = verify(proof, MARK, BLOCK, chain(prompt, BLOCK), prompt)
        common = common_prefix(turn[:valid], prompt)
        assert found.tokens <= common
        assert found.tokens == longest_allowed(proof, common)
    return proven


def test_random_histories_load_the_longest_allowed_prefix_and_never_more() -> None:
    assert run_histories(1500, seed=1) > 1000
