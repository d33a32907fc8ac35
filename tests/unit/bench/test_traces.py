"""Public trace formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.bench.drive import prompt_of
from tools.bench.errors import BenchError
from tools.bench.plan import Talk, with_mutations
from tools.bench.prompts import Words
from tools.bench.traces import Replay, read_trace

REPLAY = Replay(longest=10_000)
WORDS = Words(tuple(range(100, 1000)))


def encode(text: str) -> list[int]:
    return list(text.encode())


def mooncake(path: Path, *requests: tuple[int, int, int, Sequence[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [json.dumps(dict(zip(names, request, strict=True))) for request in requests]
    path.write_text("\n".join(lines) + "\n")
    return path


def prompts(talk: Talk) -> list[list[int]]:
    """The prompts of a conversation whose replies are all tokens of 7."""
    history: list[int] = []
    made = []
    reply = 0
    for turn in talk.turns:
        made.append(prompt_of(turn, history, reply, "s", WORDS))
        history, reply = made[-1] + [7] * turn.output_tokens, turn.output_tokens
    return made


def test_a_request_that_begins_with_anothers_blocks_goes_on_with_its_conversation(
    tmp_path: Path,
) -> None:
    """Each has its own length, its place in time, and the live reply where the trace had one."""
    path = mooncake(
        tmp_path / "t.jsonl",
        (1000, 1100, 20, [1, 2, 3]),
        (1500, 600, 5, [1, 9]),
        (4000, 1700, 30, [1, 2, 5, 6]),
    )
    first, other = read_trace(path, REPLAY, encode)
    assert [turn.prompt_tokens for turn in first.turns] == [1100, 1700]
    assert (first.start_s, other.start_s) == (0.0, 0.5)
    assert [turn.gap_s for turn in first.turns] == [0.0, 3.0]
    one, two = prompts(first)
    assert (len(one), len(two)) == (1100, 1700)
    assert two[:1120] == one + [7] * 20


def test_the_longest_conversation_that_fits_is_the_one_that_goes_on(tmp_path: Path) -> None:
    """Both begin with the same two blocks; a block that is shared alone says nothing."""
    path = mooncake(
        tmp_path / "t.jsonl",
        (0, 1024, 5, [1, 2]),
        (1, 2048, 5, [1, 8, 9, 10]),
        (2, 512, 5, [1]),
        (3, 2100, 5, [1, 8, 9, 10, 11]),
        (4, 1100, 5, [1, 2, 3]),
        (5, 600, 5, [1, 12]),
    )
    talks = read_trace(path, REPLAY, encode)
    assert [[turn.prompt_tokens for turn in talk.turns] for talk in talks] == [
        [1024, 1100],
        [2048, 2100],
        [512],
        [600],
    ]


def test_a_fork_goes_on_with_the_longer_of_two_histories(tmp_path: Path) -> None:
    path = mooncake(
        tmp_path / "t.jsonl",
        (0, 2048, 5, [1, 2, 3, 4]),
        (1, 1024, 5, [1, 2]),
        (2, 2100, 5, [1, 2, 3, 4, 5]),
    )
    first, second = read_trace(path, REPLAY, encode)
    assert [turn.prompt_tokens for turn in first.turns] == [2048, 2100]
    assert [turn.prompt_tokens for turn in second.turns] == [1024]


def test_equal_hash_ids_are_equal_tokens_wherever_they_come(tmp_path: Path) -> None:
    """A prefix that two conversations share in the trace is one that they share here."""
    path = mooncake(tmp_path / "t.jsonl", (0, 700, 5, [1, 2]), (0, 900, 5, [1, 3]))
    (one,), (other,) = map(prompts, read_trace(path, REPLAY, encode))
    assert one[:512] == other[:512]
    assert one[512:700] != other[512:700]


def test_a_history_that_the_trace_has_shortened_is_taken_from_the_trace(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", (0, 1100, 90, [1, 2, 3]), (9, 1150, 5, [1, 2, 4]))
    (talk,) = read_trace(path, REPLAY, encode)
    one, two = prompts(talk)
    assert not talk.turns[1].threads
    assert (len(two), two[:1024]) == (1150, one[:1024])


def test_time_can_be_scaled_or_left_out(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", (0, 1100, 20, [1, 2, 3]), (4000, 1700, 9, [1, 2, 5, 6]))
    for scale, gap in ((2.0, 2.0), (0.0, 0.0)):
        (talk,) = read_trace(path, replace(REPLAY, time_scale=scale), encode)
        assert talk.turns[1].gap_s == gap


def test_what_engines_cannot_take_is_left_out_and_nothing_left_is_an_error(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "t.jsonl", (0, 700, 5, [1, 2]), (1, 1500, 5, [4, 5, 6]))
    assert len(read_trace(path, replace(REPLAY, longest=800), encode)) == 1
    with pytest.raises(BenchError, match="--max-model-len"):
        read_trace(path, replace(REPLAY, longest=100), encode)


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        '{"timestamp": 1, "input_length": 600, "output_length": 2}',
        '{"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": 0, "output_length": 2, "hash_ids": []}',
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str) -> None:
    path = mooncake(tmp_path / "t.jsonl", (0, 700, 5, [1, 2]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BenchError) as error:
        read_trace(path, REPLAY, encode)
    assert f"{path}:2" in str(error.value) and "expected" in str(error.value)


OPENAI = {
    "id": "a",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi there"},
        {"role": "tool", "content": "42 files"},
        {"role": "assistant", "content": "ok"},
    ],
}
SHARE_GPT = {
    "id": "a",
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "hello"},
        {"from": "gpt", "value": "hi there"},
        {"from": "tool", "value": "42 files"},
        {"from": "gpt", "value": "ok"},
    ],
}


@pytest.mark.parametrize("entry", [OPENAI, SHARE_GPT], ids=["openai", "sharegpt"])
def test_texts_become_turns_of_their_own_lengths(tmp_path: Path, entry: dict[str, Any]) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([entry]))
    (talk,) = read_trace(path, REPLAY, encode)
    assert [turn.output_tokens for turn in talk.turns] == [len("hi there"), len("ok")]
    one, two = prompts(talk)
    assert bytes(one) == b"be briefhello"
    assert two == [*one, *[7] * len("hi there"), *b"42 files"]


def test_think_time_comes_before_users_and_tool_gaps_before_tools(tmp_path: Path) -> None:
    user = {"role": "user", "content": "more"}
    reply = {"role": "assistant", "content": "yes"}
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"messages": [*OPENAI["messages"], user, reply]}] * 200))
    talks = read_trace(path, replace(REPLAY, think_s=10.0, tool_s=1.0), encode)
    gaps = [[turn.gap_s for turn in talk.turns] for talk in talks]
    assert {first for first, _, _ in gaps} == {0.0}
    assert 0.7 < sum(tool for _, tool, _ in gaps) / 200 < 1.3
    assert 7 < sum(think for _, _, think in gaps) / 200 < 13
    again = read_trace(path, replace(REPLAY, think_s=10.0, tool_s=1.0), encode)
    assert talks == again


def test_an_unknown_speaker_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([{"messages": [{"role": "oracle", "content": "x"}]}]))
    with pytest.raises(BenchError, match="'oracle'"):
        read_trace(path, REPLAY, encode)


def test_a_mutated_turn_keeps_its_length_and_its_new_text(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([SHARE_GPT] * 40))
    lengths = set()
    for number, talk in enumerate(read_trace(path, REPLAY, encode)):
        changed = with_mutations(talk, 1.0, f"s{number}")
        assert changed.turns[1].mutation
        one, two = prompts(changed)
        lengths.add(len(two))
        assert bytes(two[-len("42 files") :]) == b"42 files"
        assert two[: len(one) + len("hi there")] != [*one, *[7] * len("hi there")]
    assert lengths == {len("be briefhello" + "hi there" + "42 files")}
