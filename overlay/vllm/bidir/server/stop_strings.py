# SPDX-License-Identifier: Apache-2.0
"""A request that ends on a stop string ends its turn like any other, and D keeps it.

Stop strings are found here, in the API server's process, when the engine does not know of an end.
The base sends the last output to the client and aborts the engine's request, which then tells
nothing of what it holds. Here the engine is told that the request has finished, and the last
output of this request, of no other, waits for the engine's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.hooks import nixl_configs
from vllm.bidir.connector.options import SWITCH
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

logger = init_logger(__name__)

_MARK = "tells_kv_params"


class _Held:
    """Stands in for a request's queue from its stop string on: keeps the last output back."""

    def __init__(self, queue: RequestOutputCollector) -> None:
        self.queue = queue
        self._output: RequestOutput | None = None

    def put(self, output: RequestOutput) -> None:
        self._output = output

    def release(self, kv_transfer_params: dict[str, Any] | None) -> None:
        assert self._output is not None  # put in the same turn of the loop as held
        self._output.kv_transfer_params = kv_transfer_params
        self.queue.put(self._output)


class HeldOutputs:
    """The last outputs of one API server's requests that wait for their engine's answer."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._is_on = False
        self._tasks: set[asyncio.Task[None]] = set()

    def set_up(self, vllm_config: VllmConfig) -> None:
        """Hold nothing unless the engine reads back: no other has anything to tell."""
        self._is_on = any(
            extra.get(SWITCH) for extra in nixl_configs(vllm_config.kv_transfer_config)
        )

    def note(self, request: EngineCoreRequest, state: RequestState) -> None:
        """A request has been admitted; whether its end tells of KV is looked at once."""
        params = request.sampling_params
        if (
            self._is_on
            and params is not None
            and (params.extra_args or {}).get("kv_transfer_params")
        ):
            setattr(state, _MARK, True)

    def hold(self, state: RequestState) -> None:
        """The request's text has come to a stop string, and its engine does not know yet."""
        if (
            not getattr(state, _MARK, False)
            or state.queue is None
            # One of several answers: there is no single turn to keep. A streamed input goes on.
            or state.parent_req is not None
            or state.streaming_input
        ):
            return
        self._held[state.request_id] = state.queue = _Held(state.queue)

    def finish(self, engine: AsyncMPClient, request_ids: list[str]) -> list[str]:
        """Tell the engine which requests have finished; the rest, which are to be aborted."""
        stopped = [request_id for request_id in request_ids if request_id in self._held]
        if not stopped:
            return request_ids
        # Not awaited here: the outputs of all other requests come through the same loop.
        task = asyncio.create_task(self._tell(engine, stopped))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return [request_id for request_id in request_ids if request_id not in self._held]

    async def _tell(self, engine: AsyncMPClient, request_ids: list[str]) -> None:
        try:
            await engine.call_utility_async("finish_stopped", request_ids)
        except Exception as error:
            # The text is complete; only what D keeps of it is not known.
            logger.warning("requests that ended on a stop string keep no turn: %s", error)
            with contextlib.suppress(Exception):  # the engine that cannot be told may be gone
                await engine.abort_requests_async(request_ids)
            for request_id in request_ids:
                held = self._held.pop(request_id, None)
                if held is not None:
                    held.release(None)

    def release(self, output: EngineCoreOutput) -> None:
        """An output of a request that is over here: the answer that its last output waits for."""
        if output.finished:
            held = self._held.pop(output.request_id, None)
            if held is not None:
                held.release(output.kv_transfer_params)

    def fail(self, error: Exception) -> None:
        """The engine is dead; whoever waits for its answer hears of it."""
        for held in self._held.values():
            held.queue.put(error)
        self._held.clear()
