from __future__ import annotations

import itertools

import pytest

from tools.demo.conversation import ANSWER_TOKENS, MOST_TURNS, history, longest_prompt, warm_up


def characters(messages: list[dict[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages)


def test_a_history_begins_with_the_one_before() -> None:
    """Each turn appends the answer and a new question, and changes nothing else."""
    answers = [f"answer {number}" for number in range(MOST_TURNS - 1)]
    histories = [history(answers[:count]) for count in range(MOST_TURNS)]
    for number, (earlier, later) in enumerate(itertools.pairwise(histories)):
        assert later[: len(earlier)] == earlier
        added = later[len(earlier) :]
        assert [message["role"] for message in added] == ["assistant", "user"]
        assert added[0]["content"] == answers[number]


def test_four_turns_grow_as_promised() -> None:
    """Prompts grow from about 800 to between 3,000 and 4,000 tokens, one character each."""
    sizes = [longest_prompt(turns) for turns in range(1, 5)]
    assert sizes == [characters(history(["x" * ANSWER_TOKENS] * turn)) for turn in range(4)]
    assert 700 <= sizes[0] <= 900
    assert 3000 <= sizes[3] <= 4000
    assert all(later - earlier >= 500 for earlier, later in itertools.pairwise(sizes))


def test_text_is_one_token_per_character() -> None:
    """All of it is ASCII, which the tiny model's tokenizer takes byte by byte."""
    assert all(m["content"].isascii() for m in history(["x"] * (MOST_TURNS - 1)))


def test_tools_print_something_new_each_time() -> None:
    """No two user messages are alike, though there are fewer tools than turns."""
    asked = [m["content"] for m in history(["x"] * (MOST_TURNS - 1)) if m["role"] == "user"]
    assert len(set(asked)) == MOST_TURNS


def test_too_many_turns_are_refused() -> None:
    """The conversation ends; asking for more says where."""
    with pytest.raises(ValueError, match=f"has {MOST_TURNS} turns"):
        history(["x"] * MOST_TURNS)


def test_warm_up_shares_no_beginning_with_the_conversation() -> None:
    """What the warm-up leaves in caches is of no use to the conversation."""
    first, more = warm_up(3500)
    assert characters(first) == pytest.approx(3500, rel=0.05)
    assert first[0] != history([])[0]
    assert [message["role"] for message in more] == ["user"]
