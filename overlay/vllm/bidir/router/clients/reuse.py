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

    `tokens`: how many of the `prompt_tokens` P had to compute no more, None if P does not say.
    """

    reason: Reason | None = Reason.NO_CONVERSATION
    tokens: int | None = None
    prompt_tokens: int | None = None

    @property
    def outcome(self) -> str:
        """`hit` or `miss`. A hit of no tokens is none: P computed all, and its log says why."""
        return "hit" if self.reason is None and self.tokens != 0 else "miss"

    def __str__(self) -> str:
        """The header's value."""
        parts = [self.outcome]
        if self.reason is not None:
            parts.append(f"reason={self.reason}")
        if self.tokens is not None:
            parts.append(f"tokens={self.tokens}")
        return "; ".join(parts)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_ANSWER = msgspec.json.Decoder(_Answer)


def prompt_tokens(whole: bytes) -> tuple[int | None, int | None]:
    """What an answer of any API says of its prompt: tokens, and how many of them were cached.

    None for what it does not say. Engines say the latter where they run with
    --enable-prompt-tokens-details; of Responses, always.
    """
    try:
        usage = _ANSWER.decode(whole).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None, None
    if usage is None:
        return None, None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    if details is not None or usage.input_tokens is None:
        total = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        return total, usage.cache_read_input_tokens if details is None else details.cached_tokens
    # Anthropic counts what was cached apart.
    cached = usage.cache_read_input_tokens
    return usage.input_tokens + (cached or 0) + (usage.cache_creation_input_tokens or 0), cached
