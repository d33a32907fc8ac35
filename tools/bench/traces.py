"""Public trace formats as conversations: Mooncake's JSONL, and JSON like ShareGPT's.

Mooncake: one request per line, `timestamp` (ms), `input_length`, `output_length` and `hash_ids`,
one id per 512 tokens. Contents are not published: an id stands for 512 random tokens that are the
same whenever it comes again. Which requests belong to one conversation is not said either: a
request continues the last one whose whole blocks, two at least, its own blocks begin with.

ShareGPT: a list of `{"id", "conversations": [{"from", "value"}]}` or, as the base release's
converter writes it, `{"id", "messages": [{"role", "content"}]}`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.errors import BenchError
from tools.bench.plan import Talk, Turn
from tools.bench.prompts import BLOCK_TOKENS

Encode = Callable[[str], list[int]]

_LEAST_BLOCKS = 2
_ASSISTANT = ("gpt", "chatgpt", "bard", "bing", "assistant")
_TOOL = ("tool", "function", "observation")
_OTHER = ("human", "user", "system")


@dataclass(frozen=True)
class Replay:
    """How a trace is replayed.

    limit: at most so many requests (Mooncake) or conversations (ShareGPT); 0 for all.
    longest: tokens of a prompt with its answer that engines take; what is longer is left out.
    time_scale: 2 is twice as fast, 0 without any waiting.
    think_s, tool_s: mean seconds before a user's and before a tool's message, where the trace has
    no times; drawn from an exponential distribution.
    """

    limit: int = 0
    longest: int = 4096
    time_scale: float = 1.0
    think_s: float = 0.0
    tool_s: float = 0.0
    seed: int = 1

    def scaled(self, seconds: float) -> float:
        return seconds / self.time_scale if self.time_scale else 0.0


def read_trace(path: Path, replay: Replay, encode: Encode) -> list[Talk]:
    """The conversations of a trace, whichever of the formats it has; BenchError if neither."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError("a trace cannot be read", file=path, found=error) from error
    if text.lstrip().startswith("["):
        talks = list(_share_gpt(path, text, replay, encode))
    else:
        talks = _mooncake(path, text, replay)
    if not talks:
        raise BenchError(
            "a trace has nothing to replay",
            file=path,
            expected=f"a request of at most {replay.longest} tokens, its answer included",
            found="none",
            next_step="serve a longer context (--max-model-len)",
        )
    return talks


@dataclass(frozen=True)
class _Request:
    """A line of Mooncake's."""

    timestamp_s: float
    prompt: int
    output: int
    blocks: tuple[int, ...]

    @property
    def whole_blocks(self) -> int:
        return self.prompt // BLOCK_TOKENS


def _mooncake(path: Path, text: str, replay: Replay) -> list[Talk]:
    requests = [r for r in _lines(path, text) if r.prompt + r.output <= replay.longest]
    requests = sorted(requests, key=lambda request: request.timestamp_s)
    if replay.limit:
        requests = requests[: replay.limit]
    chains: list[list[_Request]] = []
    last_with: dict[int, int] = {}
    for request in requests:
        prefixes = _prefixes(request.blocks)
        found = [last_with[prefix] for prefix in prefixes if prefix in last_with]
        if found:
            number = found[-1]
            chains[number].append(request)
        else:
            number = len(chains)
            chains.append([request])
        if request.whole_blocks >= _LEAST_BLOCKS:
            last_with[prefixes[request.whole_blocks - 1]] = number
    begin = requests[0].timestamp_s if requests else 0.0
    return [_talk(chain, begin, replay) for chain in chains]


def _talk(chain: Sequence[_Request], begin: float, replay: Replay) -> Talk:
    turns: list[Turn] = []
    before: _Request | None = None
    for request in chain:
        gap, threads = 0.0, True
        if before is not None:
            gap = replay.scaled(request.timestamp_s - before.timestamp_s)
            threads = request.prompt > before.prompt + before.output
        turns.append(
            Turn(
                "trace",
                request.prompt,
                request.output,
                gap_s=gap,
                blocks=request.blocks,
                threads=threads,
            )
        )
        before = request
    return Talk(tuple(turns), replay.scaled(chain[0].timestamp_s - begin))


def _prefixes(blocks: Sequence[int]) -> list[int]:
    """One number per prefix of the list: equal for equal prefixes."""
    chain, found = 0, []
    for block in blocks:
        chain = hash((chain, block))
        found.append(chain)
    return found


def _lines(path: Path, text: str) -> Iterator[_Request]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            request = _Request(
                float(fields["timestamp"]) / 1000,
                int(fields["input_length"]),
                int(fields["output_length"]),
                tuple(int(block) for block in fields["hash_ids"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise _bad_line(path, number, f"{type(error).__name__}: {error}") from error
        wanted = -(-request.prompt // BLOCK_TOKENS)
        if request.prompt < 1 or request.output < 1 or len(request.blocks) != wanted:
            raise _bad_line(
                path,
                number,
                f"{request.prompt} and {request.output} tokens, {len(request.blocks)} hash_ids",
            )
        yield request


def _bad_line(path: Path, number: int, found: str) -> BenchError:
    return BenchError(
        "a line of a trace cannot be used",
        file=f"{path}:{number}",
        expected='{"timestamp": ms, "input_length": ≥ 1, "output_length": ≥ 1, "hash_ids": [one '
        f"per {BLOCK_TOKENS} tokens of input_length]}}",
        found=found,
    )


def _share_gpt(path: Path, text: str, replay: Replay, encode: Encode) -> Iterator[Talk]:
    rng = random.Random(replay.seed)
    try:
        entries = json.loads(text)
        read = [_messages(entry) for entry in entries[: replay.limit or None]]
    except (ValueError, TypeError, KeyError) as error:
        raise BenchError(
            "a trace cannot be used",
            file=path,
            expected='a list of {"conversations": [{"from", "value"}]} or '
            '{"messages": [{"role", "content"}]}',
            found=f"{type(error).__name__}: {error}",
        ) from error
    for messages in read:
        turns = tuple(_turns(messages, replay, encode, rng))
        if turns:
            yield Talk(turns)


def _messages(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """(role, text) of each message; ValueError for a role that is not known."""
    if "messages" in entry:
        found = [(str(m["role"]), str(m["content"] or "")) for m in entry["messages"]]
    else:
        found = [(str(m["from"]), str(m["value"] or "")) for m in entry["conversations"]]
    for role, _ in found:
        if role not in (*_ASSISTANT, *_TOOL, *_OTHER):
            raise ValueError(f"a message from {role!r}")
    return found


def _turns(
    messages: Sequence[tuple[str, str]], replay: Replay, encode: Encode, rng: random.Random
) -> Iterator[Turn]:
    """A turn per reply, up to the first that is too long for the engines."""
    asked: list[int] = []
    length, mean = 0, 0.0
    for role, text in messages:
        tokens = encode(text)
        if role not in _ASSISTANT:
            asked += tokens
            mean = replay.tool_s if role in _TOOL else replay.think_s
            continue
        output = max(1, len(tokens))
        prompt = length + len(asked)
        if not asked or prompt + output > replay.longest:
            return
        gap = rng.expovariate(1 / mean) if mean and length else 0.0
        yield Turn("trace", prompt, output, gap_s=replay.scaled(gap), text=tuple(asked))
        length, asked = prompt + output, []
