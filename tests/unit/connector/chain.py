"""A stand-in for vLLM's chained block hashes: same structure, no engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

BLOCK = 16


def chain(tokens: Sequence[int], block_size: int, salt: str = "") -> list[bytes]:
    """Chained sha256 over full blocks; `salt` enters the first, as cache_salt and LoRA do."""
    hashes: list[bytes] = []
    parent = salt.encode()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = repr(tuple(tokens[start : start + block_size])).encode()
        parent = hashlib.sha256(parent + block).digest()
        hashes.append(parent)
    return hashes
