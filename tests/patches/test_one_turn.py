"""Params name the blocks of one prompt: they are used for one prompt with one answer, or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.server.one_turn import drop_params
from vllm.config import KVTransferConfig
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams

PREFILLED = {"do_remote_prefill": True, "remote_host": "p"}
PREFILL = {"do_remote_decode": True}


def completion(prompt: Any, params: Any, **more: Any) -> CompletionRequest:
    return CompletionRequest(model="m", prompt=prompt, kv_transfer_params=params, **more)


def chat(params: Any, **more: Any) -> ChatCompletionRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatCompletionRequest(model="m", messages=messages, kv_transfer_params=params, **more)


async def serve(request: Any) -> tuple[Any, list[Any]]:
    """The params that the engine's requests are made of, and those that P is told to let go of."""
    let_go: list[Any] = []

    async def notify(request_id: str, params: Any, **more: Any) -> None:
        let_go.append(params)

    async def create() -> Any:
        return request.kv_transfer_params

    serving: Any = SimpleNamespace(
        has_kv_connector=True,
        engine_client=SimpleNamespace(notify_kv_transfer_request_rejected=notify),
        _get_data_parallel_rank=lambda raw: None,
    )
    used = await GenerateBaseServing._with_kv_transfer_rejection_cleanup(
        serving, create(), request, None
    )
    return used, let_go


SEVERAL = [
    lambda params: completion([[1, 2], [3, 4]], params),
    lambda params: completion(["a", "b"], params),
    lambda params: completion("a", params, n=2),
    lambda params: completion([1, 2], params, use_beam_search=True),
    lambda params: chat(params, n=3),
]
ONE = [
    lambda params: completion("a", params),
    lambda params: completion([1, 2, 3], params),
    lambda params: completion([[1, 2, 3]], params),
    lambda params: completion(["a"], params, n=1),
    lambda params: chat(params),
]


@pytest.mark.parametrize("make", SEVERAL)
async def test_several_prompts_or_answers_share_no_blocks(make: Any) -> None:
    used, let_go = await serve(make(PREFILLED))
    assert used is None
    assert let_go == [PREFILLED], "P must not keep what nobody will read"


@pytest.mark.parametrize("make", SEVERAL)
async def test_a_prefill_for_several_keeps_nothing(make: Any) -> None:
    assert await serve(make(PREFILL)) == (None, [])


@pytest.mark.parametrize("make", ONE)
@pytest.mark.parametrize("params", [PREFILLED, PREFILL])
async def test_one_prompt_with_one_answer_is_a_turn(make: Any, params: Any) -> None:
    assert await serve(make(params)) == (params, [])


@pytest.mark.parametrize(("connector", "kept"), [("NixlConnector", False), ("Other", True)])
def test_params_of_a_request_that_fans_out_are_dropped_on_any_way(
    connector: str, kept: bool
) -> None:
    """APIs that name `n` elsewhere come to the same point; other connectors keep their ways."""
    config: Any = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    )
    given = {"kv_transfer_params": PREFILLED, "other": 1}
    params = SamplingParams(n=2, extra_args=given)
    drop_params(config, params)
    assert params.extra_args == (given if kept else {"other": 1})
    assert given == {"kv_transfer_params": PREFILLED, "other": 1}
