# SPDX-License-Identifier: Apache-2.0
"""What policies are told of a turn: estimates, since the router has no tokenizer."""

from __future__ import annotations

from vllm.bidir.router.clients.request import TurnRequest
from vllm.bidir.router.conversations.conversations import Key
from vllm.bidir.router.conversations.record import KeptTurn
from vllm.bidir.router.nodes.policies import Ask

# Of English text; what matters is that all turns are measured alike.
_BYTES_PER_TOKEN = 4
_PROMPTS = ("messages", "prompt", "input")
_BEGINNING = 1024


def ask_of(request: TurnRequest, key: Key | None, kept: KeptTurn | None) -> Ask:
    """Tokens by the size of the body, less what D kept.

    Turns of one conversation begin alike, and without one those whose prompts have the same first
    kilobyte.
    """
    size = sum([memoryview(field).nbytes for field in request.fields.values()])
    tokens = size // _BYTES_PER_TOKEN
    if kept is not None:
        tokens = max(tokens - kept.tokens, 0)
    return Ask(tokens, None if kept is None else kept.node, key or _beginning(request))


def _beginning(request: TurnRequest) -> bytes:
    for name in _PROMPTS:
        if name in request.fields:
            return memoryview(request.fields[name])[:_BEGINNING].tobytes()
    return b""
