# SPDX-License-Identifier: Apache-2.0
"""The prefix proof: how P finds, asking nobody, what of a new prompt D's blocks really hold.

vLLM hashes each full block of a request together with the hash of the block before it, so that
equal hashes at one index mean equal content up to there: tokens, LoRA name, cache salt and
multimodal inputs. D puts digests of some of these hashes into its kv_transfer_params; P looks for
the last one that its own chain for the new prompt repeats.

Pure functions over bytes and integers. A proof comes through a router and is checked like any
other untrusted input; what it claims about content cannot be forged without a hash collision.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.bidir.reasons import Reason

VERSION = 1
MAX_CHECKPOINTS = 128
# 128 bits of a cryptographic hash: two prompts that meet in one are out of reach.
DIGEST_BYTES = 16
_MAX_BLOCK_SIZE = 1 << 16
_MAX_BLOCKS = 1 << 24
_MAX_TOKEN = 1 << 31


@dataclass(frozen=True)
class Checkpoint:
    """The digest of the chained hash of block `index` (0-based)."""

    index: int
    digest: bytes


@dataclass(frozen=True)
class PrefixProof:
    """What D holds of a finished turn.

    `fingerprint` names hash, model and KV format; `checkpoints` are in rising order, the last is
    the last full block; `tail` are the token ids behind it, fewer than `block_size`.
    """

    fingerprint: str
    block_size: int
    checkpoints: tuple[Checkpoint, ...]
    tail: tuple[int, ...]

    @property
    def valid_tokens(self) -> int:
        """Number of tokens whose KV D holds."""
        return (self.checkpoints[-1].index + 1) * self.block_size + len(self.tail)

    def digest(self) -> bytes:
        """Names this very proof: a lease whose proof has another digest is another turn's."""
        rows = repr((self.fingerprint, self.block_size, self.checkpoints, self.tail))
        return hashlib.blake2b(rows.encode("utf-8"), digest_size=DIGEST_BYTES).digest()

    def to_params(self) -> dict[str, Any]:
        """As it travels inside kv_transfer_params."""
        return {
            "v": VERSION,
            "hash": self.fingerprint,
            "block_size": self.block_size,
            "checkpoints": [[c.index, _encode(c.digest)] for c in self.checkpoints],
            "tail": list(self.tail),
        }


@dataclass(frozen=True)
class Verified:
    """How many leading tokens of a prompt are held, and what stopped it (None: all of them)."""

    tokens: int
    reason: Reason | None


def make_proof(
    fingerprint: str,
    block_size: int,
    block_hashes: Sequence[bytes],
    token_ids: Sequence[int],
    valid_tokens: int,
    prompt_tokens: int,
    tail_tokens: int | None = None,
) -> PrefixProof | None:
    """The proof for a finished turn, or None when not even one block is full.

    `block_hashes` is the request's chain, `token_ids` all its tokens, `valid_tokens` those whose
    KV is there. Without a full block nothing binds the tail to LoRA, salt or images, so there is
    no proof. `tail_tokens` limits the tail to tokens that their ids alone identify.
    """
    blocks = min(valid_tokens // block_size, len(block_hashes))
    if blocks == 0:
        return None
    indexes = choose_checkpoints(blocks - 1, prompt_tokens // block_size - 1)
    checkpoints = tuple(Checkpoint(k, bytes(block_hashes[k])[:DIGEST_BYTES]) for k in indexes)
    # The chain may lag behind by the block that the last token has just filled.
    end = min(valid_tokens, (blocks + 1) * block_size - 1)
    if tail_tokens is not None:
        end = min(end, blocks * block_size + tail_tokens)
    tail = tuple(token_ids[blocks * block_size : end])
    return PrefixProof(fingerprint, block_size, checkpoints, tail)


def choose_checkpoints(last: int, prompt_last: int, limit: int = MAX_CHECKPOINTS) -> list[int]:
    """At most `limit` block indexes up to `last`, always with `last` itself.

    Histories are mostly appended to, or change in their latest turn: so the end, and the end of
    the prompt that was answered (`prompt_last`), are covered in distances that double, and what
    is left is spread evenly.
    """
    if last < limit:
        return list(range(last + 1))
    chosen = {last}
    for anchor in (last, min(prompt_last, last)):
        distance = 0
        while anchor - distance >= 0 and len(chosen) < limit // 2:
            chosen.add(anchor - distance)
            distance = distance * 2 + 1
    spread = limit - len(chosen)
    chosen.update(last * k // spread for k in range(spread))
    return sorted(chosen)


def verify(
    proof: PrefixProof,
    fingerprint: str,
    block_size: int,
    block_hashes: Sequence[bytes],
    token_ids: Sequence[int],
    tail_limit: int | None = None,
) -> Verified:
    """The longest prefix of a prompt that `proof` vouches for.

    `block_hashes` and `token_ids` are the prompt's. `tail_limit` is the position up to which
    token ids alone identify the prompt's content (None: all of it).
    """
    if proof.block_size != block_size:
        return Verified(0, Reason.BLOCK_SIZE)
    if proof.fingerprint != fingerprint:
        same_hash = proof.fingerprint.split(":")[0] == fingerprint.split(":")[0]
        return Verified(0, Reason.MODEL if same_hash else Reason.HASH)
    matched = None
    for checkpoint in reversed(proof.checkpoints):
        if (
            checkpoint.index < len(block_hashes)
            and bytes(block_hashes[checkpoint.index])[:DIGEST_BYTES] == checkpoint.digest
        ):
            matched = checkpoint
            break
    if matched is None:
        return Verified(0, Reason.DIVERGED)
    tokens = (matched.index + 1) * block_size
    if matched is not proof.checkpoints[-1]:
        return Verified(tokens, Reason.DIVERGED)
    end = len(token_ids) if tail_limit is None else min(len(token_ids), tail_limit)
    for token in proof.tail:
        if tokens >= end or token_ids[tokens] != token:
            return Verified(tokens, Reason.DIVERGED)
        tokens += 1
    return Verified(tokens, None)


def parse_proof(params: object) -> PrefixProof | None:
    """A proof from untrusted params; None if it is not one that this version understands."""
    if not isinstance(params, dict) or params.get("v") != VERSION:
        return None
    fingerprint, block_size = params.get("hash"), params.get("block_size")
    checkpoints, tail = params.get("checkpoints"), params.get("tail")
    if (
        not isinstance(fingerprint, str)
        or len(fingerprint) > 200
        or not isinstance(block_size, int)
        or not _integer(block_size, 1, _MAX_BLOCK_SIZE)
        or not isinstance(checkpoints, list)
        or not 0 < len(checkpoints) <= MAX_CHECKPOINTS
        or not isinstance(tail, list)
        or len(tail) >= block_size
        or not all(_integer(token, 0, _MAX_TOKEN) for token in tail)
    ):
        return None
    parsed: list[Checkpoint] = []
    for row in checkpoints:
        checkpoint = _checkpoint(row)
        if checkpoint is None or (parsed and checkpoint.index <= parsed[-1].index):
            return None
        parsed.append(checkpoint)
    return PrefixProof(fingerprint, block_size, tuple(parsed), tuple(tail))


def _checkpoint(row: object) -> Checkpoint | None:
    if not isinstance(row, list) or len(row) != 2:
        return None
    index, text = row
    if not _integer(index, 0, _MAX_BLOCKS) or not isinstance(text, str) or len(text) > 64:
        return None
    try:
        digest = base64.b64decode(text + "==", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return Checkpoint(index, digest) if len(digest) == DIGEST_BYTES else None


def _encode(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def _integer(value: object, low: int, high: int) -> bool:
    # bool is an int in Python, and no count here is a truth value.
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high
