# SPDX-License-Identifier: Apache-2.0
"""What a turn reused, as its answer's `x-kv-reuse` header says it: `hit; tokens=1203`."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from vllm.bidir.reasons import Reason

HEADER = "x-kv-reuse"


@dataclass
class Reuse:
    """Known bit by bit while a turn runs. `reason`: why nothing was reused, None while it may be.

    `tokens`: how many of the prompt's P had to compute no more, None if P does not say.
    """

    reason: Reason | None = Reason.NO_CONVERSATION
    tokens: int | None = None

    def __str__(self) -> str:
        """The header's value. A hit of no tokens is none: P computed all, and its log says why."""
        hit = self.reason is None and self.tokens != 0
        parts = ["hit" if hit else "miss"]
        if self.reason is not None:
            parts.append(f"reason={self.reason}")
        if self.tokens is not None:
            parts.append(f"tokens={self.tokens}")
        return "; ".join(parts)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


def cached_tokens(whole: bytes) -> int | None:
    """What an answer of any API says of its prompt's cached tokens; None if it does not.

    Engines say it where they run with --enable-prompt-tokens-details; of Responses, always.
    """
    try:
        usage = _ANSWER.decode(whole).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if usage is None:
        return None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return usage.cache_read_input_tokens if details is None else details.cached_tokens
