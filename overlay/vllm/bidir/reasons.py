# SPDX-License-Identifier: Apache-2.0
"""Why a turn was computed instead of read back: one list of words for logs, metrics and JSON."""

from __future__ import annotations

from enum import Enum


class Reason(str, Enum):
    """Why there was no read-back, or why a turn went to a decode node alone."""

    NO_CONVERSATION = "no_conversation"
    FIRST_TURN = "first_turn"
    EXPIRED = "expired"
    EVICTED = "evicted"
    NO_PARAMS = "no_params"
    NO_PROOF = "no_proof"
    DIVERGED = "diverged"
    BELOW_THRESHOLD = "below_threshold"
    BLOCK_SIZE = "block_size"
    HASH = "hash"
    MODEL = "model"
    UNSUPPORTED = "unsupported"
    HOLD_LOST = "hold_lost"
    TIMEOUT = "timeout"
    TRANSFER_FAILED = "transfer_failed"
    NOT_HANDED_OVER = "not_handed_over"
    WINDOW = "window"
    PEER_GONE = "peer_gone"
    MEETING = "meeting"
    SLOW_LINK = "slow_link"
    BUDGET = "budget"
    BYPASS_N = "bypass_n"
    BYPASS_LIST = "bypass_list"
    BYPASS_LOGPROBS = "bypass_logprobs"
    BYPASS_STORED = "bypass_stored"

    def __str__(self) -> str:
        return self.value
