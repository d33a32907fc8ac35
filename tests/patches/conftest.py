"""vLLM's own routes, serving classes and output processor, fed by a scripted engine core.

Only the engine core is a stand-in: it plays back what the scheduler would report, so a test
sees the bytes that a client of the installed wheel would see, without a model.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.anthropic.api_router import attach_router as attach_messages
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completions
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.api_router import attach_router as attach_responses
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

MODEL = "scripted"
PROMPT_TOKENS = 3

Report: TypeAlias = dict[str, Any]
"""What the engine core reports of one sequence: `text` (space-separated words, one token each),
and, when it ends there, `finish` ("stop", "length" or "error") and `params`. `choice` is the
sequence's index when n > 1. With "stop" the last token is taken for EOS and has no text."""

Step: TypeAlias = list[Report]
"""Reports that the API server finds in its queue at once: it merges them into one output."""

Script: TypeAlias = list[Step]
"""The steps of one engine request."""

Event: TypeAlias = dict[str, Any]
"""One `data:` line of a stream, parsed."""


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    words = ["<unk>", "<eos>", "Hello", "big", "world", "hm"]
    words += ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name":"add","arguments":{}}']
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, unk_token="<unk>")


@dataclass
class ScriptedEngine:
    """Answers the n-th `generate` call with the n-th script."""

    tokenizer: Any
    scripts: list[Script]
    calls: int = 0
    errored: bool = False
    input_processor: None = None

    def __post_init__(self) -> None:
        self.vllm_config = SimpleNamespace(kv_transfer_config=object())
        self.model_config = SimpleNamespace(
            model=MODEL,
            max_model_len=4096,
            hf_config=SimpleNamespace(model_type="scripted"),
            generation_config="auto",
            is_encoder_decoder=False,
            get_diff_sampling_param=dict,
        )
        self.renderer = SimpleNamespace(
            tokenizer=self.tokenizer, get_tokenizer=lambda: self.tokenizer
        )

    def check_admission(self, n: int) -> None:
        """Every request is admitted."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        script = self.scripts[self.calls]
        self.calls += 1
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        queue = RequestOutputCollector(params.output_kind, request_id)
        ids = self._admit(processor, queue, prompt["prompt_token_ids"], params, request_id)
        for step in script:
            processor.process_outputs([self._report(ids, report) for report in step])
            output = queue.get_nowait()
            assert isinstance(output, RequestOutput)
            yield output
            await asyncio.sleep(0)

    @staticmethod
    def _admit(
        processor: OutputProcessor,
        queue: RequestOutputCollector,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
    ) -> list[str]:
        def request(internal_id: str, own_params: SamplingParams) -> EngineCoreRequest:
            return EngineCoreRequest(
                request_id=internal_id,
                prompt_token_ids=prompt_token_ids,
                mm_features=None,
                sampling_params=own_params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                external_req_id=request_id,
            )

        whole = request(f"{request_id}-internal", params)
        if params.n == 1:
            processor.add_request(whole, None, queue=queue)
            return [whole.request_id]
        parent = ParentRequest(whole)
        ids = []
        for index in range(params.n):
            child_id, child_params = parent.get_child_info(index)
            processor.add_request(request(child_id, child_params), None, parent, index, queue)
            ids.append(child_id)
        return ids

    def _report(self, ids: list[str], report: Report) -> EngineCoreOutput:
        finish = report.get("finish")
        return EngineCoreOutput(
            request_id=ids[report.get("choice", 0)],
            new_token_ids=self.tokenizer.convert_tokens_to_ids(report["text"].split()),
            finish_reason=None if finish is None else FinishReason[finish.upper()],
            kv_transfer_params=report.get("params"),
        )


class Renderer:
    """Stands in for chat templates and tokenisation: every prompt is three tokens."""

    exclude_tools_when_tool_choice_none = False

    async def render_chat(self, request: Any) -> tuple[list[Any], list[Any]]:
        return await self.preprocess_chat(request, request.messages)

    async def preprocess_chat(
        self, request: Any, messages: list[Any], **_: Any
    ) -> tuple[list[Any], list[Any]]:
        return messages, [tokens_input([1] * PROMPT_TOKENS)]

    async def render_completion(self, request: Any) -> list[Any]:
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        return [tokens_input([1] * PROMPT_TOKENS, prompt=prompt) for prompt in prompts]


@dataclass(frozen=True)
class Server:
    """The HTTP application."""

    app: FastAPI

    @asynccontextmanager
    async def listen(self) -> AsyncIterator[str]:
        """Serves on a free loopback port while open, for the SDKs; gives the base URL."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(self.app, log_level="warning", lifespan="off", ws="none")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving

    def stream(self, path: str, **body: Any) -> list[Event]:
        """POSTs `body` with `stream` on and returns the parsed `data:` lines without [DONE]."""
        return [json.loads(line) for line in self.lines(path, **body) if line != "[DONE]"]

    def lines(self, path: str, **body: Any) -> list[str]:
        """Like `stream`, but the `data:` lines as they are on the wire."""
        return asyncio.run(self._lines(path, {"model": MODEL, "stream": True, **body}))

    async def _lines(self, path: str, body: dict[str, Any]) -> list[str]:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        prefix = "data: "
        return [
            line.removeprefix(prefix)
            for line in answer.text.splitlines()
            if line.startswith(prefix)
        ]


@pytest.fixture
def serve(tokenizer: Any) -> Callable[..., Server]:
    """`serve(script, ..., reasoning_parser=, tool_parser=)` starts the application."""

    def start(*scripts: Script, reasoning_parser: str = "", tool_parser: str = "") -> Server:
        engine: Any = ScriptedEngine(tokenizer, list(scripts))
        app = FastAPI()
        models_ = OpenAIServingModels(engine, [BaseModelPath(MODEL, MODEL)])
        renderer: Any = Renderer()
        shared: dict[str, Any] = {"online_renderer": renderer, "request_logger": None}
        chat: dict[str, Any] = shared | {
            "chat_template": None,
            "chat_template_content_format": "auto",
            "reasoning_parser": reasoning_parser,
            "enable_auto_tools": bool(tool_parser),
            "tool_parser": tool_parser or None,
        }
        app.state.openai_serving_chat = OpenAIServingChat(engine, models_, "assistant", **chat)
        app.state.anthropic_serving_messages = AnthropicServingMessages(
            engine, models_, "assistant", **chat
        )
        app.state.openai_serving_completion = OpenAIServingCompletion(engine, models_, **shared)
        app.state.openai_serving_responses = OpenAIServingResponses(engine, models_, **chat)
        for attach in (attach_chat, attach_completions, attach_messages, attach_responses):
            attach(app)
        return Server(app)

    return start
