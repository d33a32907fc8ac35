"""KV memory that remembers what each slot stands for, and notices what does not belong there.

Each slot holds a digest of all tokens up to its position, and of what else enters attention there.
Before a request computes a token, every slot that it would attend to is compared with the digest
of its own content: so a wrong block, a shifted block or a stale block is found where a real engine
would answer wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.request import Request

BLOCK = 16
GARBAGE = -1


class WrongKVError(AssertionError):
    """A request was about to attend to KV that is not its own."""


class Content:
    """A request's tokens as its worker knows them, and what each position stands for."""

    def __init__(self, request: Request) -> None:
        self.prompt_tokens = request.num_prompt_tokens
        self.digests: list[int] = []
        lora, embeds = request.lora_request, request.prompt_embeds
        self._last = hash(
            (
                request.cache_salt,
                None if lora is None else lora.lora_path,
                None if embeds is None else embeds.numpy().tobytes(),
            )
        )
        self._images = {
            position: feature.identifier
            for feature in request.mm_features
            for position in range(
                feature.mm_position.offset, feature.mm_position.offset + feature.mm_position.length
            )
        }
        for token in request.all_token_ids:
            self.append(token)

    def append(self, token: int) -> None:
        image = self._images.get(len(self.digests)) if self._images else None
        self._last = hash((self._last, token, image))
        self.digests.append(self._last)


class Memory:
    """The slots of `blocks` blocks of BLOCK tokens."""

    def __init__(self, blocks: int) -> None:
        self._slots = [GARBAGE] * (blocks * BLOCK)

    def attend(self, block_ids: Sequence[int], digests: Sequence[int], end: int) -> None:
        """Read positions up to `end`; WrongKVError unless all of them are what they should be."""
        for first in range(0, end, BLOCK):
            start = block_ids[first // BLOCK] * BLOCK
            size = min(BLOCK, end - first)
            if self._slots[start : start + size] != digests[first : first + size]:
                raise WrongKVError(f"positions {first} to {first + size - 1} of {end} computed")

    def write(self, block_ids: Sequence[int], digests: Sequence[int], begin: int, end: int) -> None:
        for position in range(begin, end):
            slot = block_ids[position // BLOCK] * BLOCK + position % BLOCK
            self._slots[slot] = digests[position]

    def copy_block(self, source: Memory, theirs: int, ours: int) -> None:
        self._slots[ours * BLOCK : (ours + 1) * BLOCK] = source._slots[
            theirs * BLOCK : (theirs + 1) * BLOCK
        ]
