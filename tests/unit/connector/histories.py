"""What clients do to their histories, and what a proof may allow of the result."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm.bidir.connector.proof import PrefixProof

from tests.unit.connector.chain import BLOCK

OPERATIONS = ("append", "edit", "delete", "truncate", "duplicate", "swap", "fork")


def mutate(rng: random.Random, tokens: list[int]) -> list[int]:
    """One operation of a client on its history."""
    made = list(tokens)
    at = rng.randrange(len(made) + 1)
    span = rng.randrange(1, 40)
    piece = [rng.randrange(5) for _ in range(span)]
    operation = rng.choice(OPERATIONS)
    if operation == "append":
        made += piece
    elif operation == "edit":
        made[at : at + span] = piece
    elif operation == "delete":
        del made[at : at + span]
    elif operation == "truncate":
        del made[at:]
    elif operation == "duplicate":
        made[at:at] = made[max(0, at - span) : at]
    elif operation == "swap":
        other = rng.randrange(len(made) + 1)
        low, high = sorted((at, other))
        made = made[high:] + made[low:high] + made[:low]
    else:
        made = made[:at] + piece
    return made


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def longest_allowed(proof: PrefixProof, common: int) -> int:
    """What the checkpoints allow of a common prefix, reckoned from their indexes alone."""
    reached = [c for c in proof.checkpoints if (c.index + 1) * BLOCK <= common]
    if not reached:
        return 0
    if reached[-1] == proof.checkpoints[-1]:
        return min(common, proof.valid_tokens)
    return (reached[-1].index + 1) * BLOCK
