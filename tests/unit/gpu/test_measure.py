"""One conversation over engines that only take notes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.gpu import measure
from tests.gpu.client import Answer
from tests.gpu.histories import Conversation

PARAMS = {"lease_id": "d0-1", "prefix_proof": {"block_size": 16}}
SERVERS = measure.Servers("p", "d")


@dataclass(frozen=True)
class Asked:
    url: str
    prompt: list[int]
    params: Mapping[str, Any] | None
    salt: str | None
    rank: int | None
    bias: Mapping[str, float]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """Every completion, in order."""
    found: list[Asked] = []

    def complete(
        url: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        params: Mapping[str, Any] | None = None,
        salt: str | None = None,
        rank: int | None = None,
        logit_bias: Mapping[str, float] | None = None,
    ) -> Answer:
        found.append(Asked(url, list(prompt), params, salt, rank, logit_bias or {}))
        # The last token's differ from the first's where there are several.
        odds = [{7: -0.1}, {7: -0.2}][:max_tokens]
        tokens = [int(one) for one in logit_bias or {}] or [7]
        tokens += [7] * (max_tokens - len(tokens))
        told = None if params is None else PARAMS
        return Answer(tokens, odds[0], told, 0, odds[-1])

    monkeypatch.setattr(measure, "complete", complete)
    monkeypatch.setattr(measure, "tokens_read", lambda url: 0)
    monkeypatch.setattr(measure, "reset_prefix_cache", lambda url: None)
    monkeypatch.setattr(measure, "release", lambda url, ids: list(ids))
    return found


def turn_of(second: list[int], servers: measure.Servers = SERVERS) -> measure.Measured:
    conversation = Conversation("append", list(range(1, 41)), 4, lambda h, out, new: second)
    return measure.measure(conversation, servers, random.Random(1))


def test_noise_has_a_pair_for_each_way_in_which_a_transfer_cuts_a_prompt(
    asked: list[Asked],
) -> None:
    found = turn_of(list(range(1, 61)))
    names = {"other_engine", "two_pieces", "own_turns", "last_block", "one_token"}
    assert set(found.noise) == names
    salts = {one.salt for one in asked if one.salt is not None}
    pairs = [[one for one in asked if one.salt == salt] for salt in salts]
    (pair,) = [one for one in pairs if len(one) == 2 and len(one[0].prompt) == 59]
    assert [(one.url, one.params, len(one.prompt)) for one in pair] == [
        ("d", None, 59),
        ("d", None, 60),
    ]
    # The last one again, as if it had been generated: what follows it is compared.
    (alone,) = [one for one in asked if one.bias]
    assert (alone.url, alone.prompt, dict(alone.bias)) == ("d", list(range(1, 60)), {"60": 100.0})
    assert found.noise["one_token"].rms > found.noise["last_block"].rms == 0


def test_nothing_is_transferred_for_noise(asked: list[Asked]) -> None:
    """Nor is any of it served from what a transfer has left in a prefix cache."""
    turn_of(list(range(1, 61)))
    assert not [one for one in asked if one.params is not None and one.salt is not None]
    unsalted = [one for one in asked if one.salt is None]
    assert len([one for one in unsalted if one.params is None]) == 2, "the two later checks"


def test_a_prompt_of_one_token_is_not_cut_to_none(asked: list[Asked]) -> None:
    assert "one_token" not in turn_of([5]).noise
    assert all(one.prompt for one in asked)


def test_turns_are_given_back_and_those_that_d_has_lost_are_counted(
    asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turn_of([5] * 60).stranded == 0
    monkeypatch.setattr(measure, "release", lambda url, ids: [])
    assert turn_of([5] * 60).stranded == 2


def test_a_turn_that_the_base_has_read_by_count_is_not_lost(
    asked: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notice has D free the turn; that of the second turn nobody else has read."""
    monkeypatch.setattr(measure, "release", lambda url, ids: [])
    assert turn_of([5] * 60, measure.Servers("p", "d", "by count")).stranded == 1


def test_ranks_are_asked_where_turns_are_kept_and_where_they_go_on(asked: list[Asked]) -> None:
    second = [5] * 60
    turn_of(second, measure.Servers("p", "d", decode_rank=0, answer_rank=1))
    assert {one.rank for one in asked if one.url == "p"} == {None}
    on_decode = [one for one in asked if one.url == "d"]
    assert [one.rank for one in on_decode if one.params is not None] == [0, 1]
    later = [one for one in on_decode if one.params is None and one.salt is None]
    assert [one.rank for one in later] == [1], "its blocks are in that rank's prefix cache"
