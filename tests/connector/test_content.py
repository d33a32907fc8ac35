"""Requests whose content is more than token ids: read back by what they are, or computed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams

from tests.connector.histories import D_TURN
from tests.connector.sim import Engine
from tests.connector.test_simulated import finished_turn, numbers

H, OUT = numbers(random.Random(1), 200), numbers(random.Random(2), 20)
PLACEHOLDER = 1500


@pytest.fixture
def p(model: Path) -> Engine:
    return Engine(model, "p", images=True)


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d", images=True)


############################################################
# Refused per request
############################################################

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "lora": {"lora_request": LoRARequest("adapter", 1, "/nowhere")},
    "prompt_embeds": {"prompt_embeds": torch.zeros(len(H) + len(OUT), 4)},
    "pooling": {"sampling_params": None, "pooling_params": PoolingParams(task="embed")},
    "prompt_logprobs": {"sampling": {"prompt_logprobs": 1}},
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_hashes_do_not_identify_is_computed_and_counted(
    p: Engine, d: Engine, kind: str
) -> None:
    params, _ = finished_turn(d, H, OUT)
    tokens = None if kind == "prompt_embeds" else H + OUT
    p.run(tokens, params, source=d, **UNSUPPORTED[kind])
    assert p.orders == []
    ((outcome, reason, verified, read, _),) = p.decisions
    assert (outcome, reason, verified, read) == ("recompute", "unsupported", 0, 0)
    p.forget()


@pytest.mark.parametrize("kind", [kind for kind in UNSUPPORTED if kind != "pooling"])
def test_a_turn_that_hashes_do_not_identify_keeps_nothing(d: Engine, kind: str) -> None:
    free = d.free_blocks
    tokens = None if kind == "prompt_embeds" else H + OUT
    params, _ = d.run(tokens, D_TURN, max_tokens=5, **UNSUPPORTED[kind])
    assert params is None
    assert d.free_blocks == free and len(d.bidir.kept) == 0


############################################################
# Images
############################################################


def image(name: str, offset: int, length: int = 24) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=name,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def prompt(offset: int, after: int) -> list[int]:
    """Text, the placeholders of an image, and text."""
    return H[:offset] + [PLACEHOLDER] * 24 + H[offset : offset + after]


def shown(
    p: Engine, d: Engine, offset: int, after: int, then: list[MultiModalFeatureSpec]
) -> list[int]:
    """D answers a prompt with the image "cat"; P is asked the same with the images `then`. What P
    read."""
    tokens = prompt(offset, after)
    seen = [image("cat", offset)]
    params, _ = d.run(tokens, D_TURN, max_tokens=4, answer=[1, 2, 3, 4], mm_features=seen)
    p.run([*tokens, 1, 2, 3, 4, 5], params, source=d, mm_features=then)
    assert len(p.loaded) == len(p.orders)
    return [order.total for order in p.orders]


# An image within blocks, across a block's edge, at the end of the last block, and in the tail.
PLACES = [(40, 100), (56, 9), (40, 0), (129, 0), (130, 3)]


@pytest.mark.parametrize(("offset", "after"), PLACES)
@pytest.mark.parametrize("other", [["dog"], []])
def test_another_image_or_none_under_the_same_ids_is_never_mixed_up(
    p: Engine, d: Engine, offset: int, after: int, other: list[str]
) -> None:
    read = shown(p, d, offset, after, [image(name, offset) for name in other])
    assert all(total <= offset for total in read)
    assert sum(read) == offset // 16 * 16


@pytest.mark.parametrize(("offset", "after"), PLACES)
def test_the_same_image_is_read_back_to_the_last_full_block(
    p: Engine, d: Engine, offset: int, after: int
) -> None:
    tokens = offset + 24 + after + 3
    assert shown(p, d, offset, after, [image("cat", offset)]) == [tokens // 16 * 16]


def test_an_image_that_p_sees_where_d_saw_text_is_not_read(p: Engine, d: Engine) -> None:
    """Placeholder ids may also be typed."""
    tokens = prompt(130, 0)
    params, _ = d.run(tokens, D_TURN, max_tokens=2)
    p.run([*tokens, 7, 7], params, source=d, mm_features=[image("cat", 130)])
    assert [order.total for order in p.orders] == [128]


def test_a_second_image_in_the_tail_is_not_taken_for_another(p: Engine, d: Engine) -> None:
    """The first lies in hashed blocks; the second's placeholders are all that the ids show."""
    tokens = [*prompt(20, 84), *[PLACEHOLDER] * 12]
    first, length = image("cat", 20), len(tokens) - 12
    assert length == 128
    cats = [first, image("dog", length, 12)]
    params, _ = d.run(tokens, D_TURN, max_tokens=2, mm_features=cats)
    p.run([*tokens, 7, 7], params, source=d, mm_features=[first, image("bird", length, 12)])
    assert [order.total for order in p.orders] == [128]
