"""What the client of the demo says: an agent that pastes what its tools printed.

The tiny model's tokenizer has one token per byte, so that a length in characters is one in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Message = dict[str, str]

MOST_TURNS = 8
ANSWER_TOKENS = 48

_SYSTEM = (
    "You are the on-call assistant of a storage team. You are given what tools printed, you name "
    "the cause that fits all of it, and you ask for one more tool at most. Answer in short "
    "sentences, quote the lines that you rely on, and never invent a line that was not printed."
)
_TOOL_LINES = 13


def history(answers: Sequence[str]) -> list[Message]:
    """The messages of turn ``len(answers) + 1``, given the model's answers so far.

    Only ever appended to: the history of a turn begins with the history of the turn before.
    """
    if len(answers) >= MOST_TURNS:
        raise ValueError(f"the conversation has {MOST_TURNS} turns, not {len(answers) + 1}")
    messages = [{"role": "system", "content": _SYSTEM}]
    for turn in range(len(answers) + 1):
        messages.append({"role": "user", "content": _user(turn)})
        if turn < len(answers):
            messages.append({"role": "assistant", "content": answers[turn]})
    return messages


def longest_prompt(turns: int) -> int:
    """Tokens of the last turn's messages, without what the chat template adds to them."""
    messages = history(["x" * ANSWER_TOKENS] * (turns - 1))
    return sum(len(message["content"]) for message in messages)


def warm_up(tokens: int) -> tuple[list[Message], list[Message]]:
    """Two turns of another conversation, about ``tokens`` long, that shares nothing with it.

    The second has to be completed by the model's answer to the first, after its first message.
    """
    first = {"role": "user", "content": ("What is new? " * (tokens // 12))[:tokens]}
    return [first], [{"role": "user", "content": "And what else? " * 10}]


def _user(turn: int) -> str:
    question, command, line = _TOOLS[turn % len(_TOOLS)]
    # The second time round the tools print other lines.
    first = _TOOL_LINES * (turn // len(_TOOLS))
    printed = "\n".join(line(first + i) for i in range(_TOOL_LINES))
    return f"{question}\n$ {command}\n{printed}"


def _request_line(i: int) -> str:
    return f"09:{i:02d}:07 PUT /volume/{i * 37 % 100:02d} 200 {i * i * 13 % 900 + 80} ms"


def _disk_line(i: int) -> str:
    wait, busy = i * 29 % 40 + 1, i * 53 % 100
    return f"nvme{i:02d}n1  reads {i * 811 % 5000:>4}/s  writes {i * 577 % 3000:>4}/s  " + (
        f"await {wait:>2} ms  busy {busy:>2} %"
    )


def _test_line(i: int) -> str:
    result = "FAILED" if i % 5 == 3 else "PASSED"
    return f"tests/test_flush.py::test_segment_{i:02d} {result} in {i * 17 % 90 + 3} ms"


def _kernel_line(i: int) -> str:
    return (
        f"[{4100 + i * 7}.{i * 331 % 1000:03d}] blk_update_request: slow write, sector {i * 4096}"
    )


_TOOLS: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("Writes got slow this morning. Here is the gateway's log.", "tail gateway.log", _request_line),
    ("Here are the disks behind it.", "iostat -x", _disk_line),
    ("I ran the tests of the flush path.", "pytest -v tests/test_flush.py", _test_line),
    ("And this is what the kernel says.", "dmesg | tail", _kernel_line),
)
