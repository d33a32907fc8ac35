# SPDX-License-Identifier: Apache-2.0
"""Whether a request is one prompt with one answer: only such a one can be a turn that is kept."""

from __future__ import annotations

from typing import Any


def is_one_turn(request: Any) -> bool:
    """For requests of every API; `prompt` is a string, token ids, or a list of either."""
    if (getattr(request, "n", None) or 1) > 1 or getattr(request, "use_beam_search", False):
        return False
    return (
        _prompts(getattr(request, "prompt", None))
        + _prompts(getattr(request, "prompt_embeds", None))
        <= 1
    )


def _prompts(prompt: Any) -> int:
    if prompt is None:
        return 0
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1
