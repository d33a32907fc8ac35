# SPDX-License-Identifier: Apache-2.0
"""P's decision: what of this prompt to read back from which turn, or why to compute it.

Pure: the scheduler may ask several times for one request, and nothing happens until it has
allocated blocks for the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.bidir.connector.proof import PrefixProof, parse_proof, verify
from vllm.bidir.reasons import Reason

_MAX_TEXT = 256


@dataclass(frozen=True)
class Source:
    """The kept turn that a request's params point to, checked for form only."""

    lease_id: str
    engine_id: str
    host: str
    port: int
    proof: PrefixProof


@dataclass(frozen=True)
class Match:
    """How many leading tokens of a prompt `source` verifiably holds, and why not more.

    `source` is None when there is nothing to read from; then `tokens` is 0.
    """

    source: Source | None
    tokens: int
    reason: Reason | None


def parse_source(params: dict[str, Any]) -> Source | Reason:
    """The source named by untrusted params, or why there is none."""
    if params.get("lease_id") is None and params.get("prefix_proof") is None:
        return Reason.NO_PROOF
    proof = parse_proof(params.get("prefix_proof"))
    texts = [params.get(key) for key in ("lease_id", "remote_engine_id", "remote_host")]
    port = params.get("remote_port")
    sizes = [params.get(key, 1) for key in ("tp_size", "dcp_size", "pp_size")]
    if (
        proof is None
        or not all(_is_text(text) for text in texts)
        or not _is_int(port, 1, 65535)
        or not all(_is_int(size, 1, 1024) for size in sizes)
    ):
        return Reason.NO_PROOF
    lease_id, engine_id, host = texts
    assert isinstance(lease_id, str) and isinstance(engine_id, str) and isinstance(host, str)
    assert isinstance(port, int)
    return Source(lease_id, engine_id, host, port, proof)


def match(
    params: dict[str, Any],
    fingerprint: str,
    block_size: int,
    block_hashes: Sequence[bytes],
    token_ids: Sequence[int],
    tail_limit: int | None,
) -> Match:
    """The longest verified prefix, short of the last prompt token, which P always computes."""
    source = parse_source(params)
    if isinstance(source, Reason):
        return Match(None, 0, source)
    found = verify(source.proof, fingerprint, block_size, block_hashes, token_ids, tail_limit)
    tokens = min(found.tokens, len(token_ids) - 1)
    return Match(source, tokens, found.reason)


def gain(matched: Match, local_tokens: int, threshold: int) -> tuple[int, Reason | None]:
    """Tokens to read beyond the `local_tokens` that P has itself, and why none if none.

    `threshold` applies to what is gained, not to what is held.
    """
    gained = matched.tokens - local_tokens
    if matched.source is None or matched.tokens <= 0:
        return 0, matched.reason
    if gained <= 0 or gained < threshold:
        return 0, Reason.BELOW_THRESHOLD
    return gained, None


def _is_text(value: object) -> bool:
    # Printable, since ids and hosts stand in log lines.
    return isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isprintable()


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
