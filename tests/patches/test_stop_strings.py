"""A request that ends on a stop string is finished in the engine, and tells what is kept of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

KEPT = {"lease_id": "d0-1"}
TRANSFER = {"do_remote_prefill": True}


def engine_config(**extra: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return SimpleNamespace(kv_transfer_config=transfer)


@dataclass
class FakeEngine:
    """Records what the frontend tells the engine."""

    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    fails: bool = False

    async def call_utility_async(self, method: str, request_ids: list[str]) -> None:
        assert method == "finish_stopped"
        if self.fails:
            raise RuntimeError("shutting down")
        self.finished += request_ids

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


@dataclass
class Frontend:
    """The output processor as AsyncLLM's loop drives it."""

    tokenizer: Any
    engine: FakeEngine = field(default_factory=FakeEngine)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.processor = OutputProcessor(self.tokenizer, log_stats=False)
        if hasattr(self.processor, "held_outputs"):
            self.processor.held_outputs.set_up(engine_config(bidirectional_kv_xfer=True))

    def admit(self, name: str, transfer: Any = TRANSFER, stop: str = "world") -> Any:
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        params = SamplingParams(
            stop=[stop], max_tokens=50, extra_args=extra, output_kind=RequestOutputKind.DELTA
        )
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = RequestOutputCollector(RequestOutputKind.DELTA, name)
        self.processor.add_request(request, None, queue=queue)
        return queue

    async def hear(self, *outputs: EngineCoreOutput) -> None:
        """One turn of AsyncLLM's loop."""
        processed = self.processor.process_outputs(list(outputs))
        if processed.reqs_to_abort:
            held = getattr(self.processor, "held_outputs", None)
            aborted = processed.reqs_to_abort
            self.aborted += held.finish(self.engine, aborted) if held else aborted
        await asyncio.sleep(0)

    def said(self, name: str, text: str, **more: Any) -> EngineCoreOutput:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return EngineCoreOutput(name, ids, **more)


@pytest.fixture
def frontend(tokenizer: Any) -> Frontend:
    return Frontend(tokenizer)


def answer(name: str, **more: Any) -> EngineCoreOutput:
    return EngineCoreOutput(
        name, [], finish_reason=FinishReason.STOP, kv_transfer_params=KEPT, **more
    )


async def test_the_last_output_waits_for_what_the_engine_keeps(frontend: Frontend) -> None:
    queue = frontend.admit("r")
    await frontend.hear(frontend.said("r", "Hello big world hm"))
    assert frontend.aborted == []
    assert frontend.engine.finished == ["r"]
    assert queue.get_nowait() is None, "not before the engine has answered"
    await frontend.hear(answer("r"))
    output = queue.get_nowait()
    assert isinstance(output, RequestOutput)
    assert output.finished
    assert output.kv_transfer_params == KEPT
    assert output.outputs[0].text.strip() == "Hello big"
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == "world"


async def test_only_this_requests_output_waits(frontend: Frontend) -> None:
    frontend.admit("r")
    other = frontend.admit("other")
    await frontend.hear(frontend.said("r", "world"), frontend.said("other", "Hello big hm"))
    assert other.get_nowait() is not None


async def test_a_request_without_transfer_is_aborted_as_before(frontend: Frontend) -> None:
    queue = frontend.admit("r", transfer=None)
    await frontend.hear(frontend.said("r", "Hello big world"))
    assert frontend.aborted == ["r"]
    assert frontend.engine.finished == []
    output = queue.get_nowait()
    assert output.finished and output.kv_transfer_params is None


async def test_what_the_engine_says_in_between_is_not_told(frontend: Frontend) -> None:
    """It may be a step ahead when it hears of the end."""
    queue = frontend.admit("r")
    await frontend.hear(frontend.said("r", "Hello big world"))
    await frontend.hear(frontend.said("r", "hm"))
    assert queue.get_nowait() is None
    await frontend.hear(answer("r"))
    assert queue.get_nowait().outputs[0].text.strip() == "Hello big"


async def test_an_engine_that_ends_the_request_by_itself_has_answered(frontend: Frontend) -> None:
    queue = frontend.admit("r")
    await frontend.hear(frontend.said("r", "Hello big world"))
    ended = frontend.said("r", "hm", finish_reason=FinishReason.LENGTH, kv_transfer_params=KEPT)
    await frontend.hear(ended)
    output = queue.get_nowait()
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.strip() == "Hello big"
    assert output.kv_transfer_params == KEPT


async def test_a_stop_string_in_the_last_token_needs_no_word(frontend: Frontend) -> None:
    queue = frontend.admit("r")
    last = frontend.said(
        "r", "Hello big world", finish_reason=FinishReason.LENGTH, kv_transfer_params=KEPT
    )
    await frontend.hear(last)
    assert frontend.engine.finished == [] and frontend.aborted == []
    assert queue.get_nowait().kv_transfer_params == KEPT


async def test_an_engine_that_refuses_still_gives_the_client_its_text(frontend: Frontend) -> None:
    frontend.engine.fails = True
    queue = frontend.admit("r")
    await frontend.hear(frontend.said("r", "Hello big world"))
    await asyncio.sleep(0)
    output = queue.get_nowait()
    assert output.finished and output.outputs[0].text.strip() == "Hello big"
    assert output.kv_transfer_params is None
    assert frontend.engine.aborted == ["r"], "else it goes on for nobody"


@pytest.mark.parametrize("config", [engine_config(), SimpleNamespace(kv_transfer_config=None)])
async def test_without_read_back_nothing_waits(frontend: Frontend, config: Any) -> None:
    frontend.processor.held_outputs.set_up(config)
    queue = frontend.admit("r")
    await frontend.hear(frontend.said("r", "Hello big world"))
    assert frontend.aborted == ["r"]
    assert queue.get_nowait().finished


async def test_whoever_waits_hears_that_the_engine_is_dead(frontend: Frontend) -> None:
    queue = frontend.admit("r")
    await frontend.hear(frontend.said("r", "Hello big world"))
    frontend.processor.propagate_error(RuntimeError("dead"))
    with pytest.raises(RuntimeError, match="dead"):
        queue.get_nowait()
