# SPDX-License-Identifier: Apache-2.0
"""The engine's side of stop strings: finish the requests, and answer with what is kept of them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from vllm.bidir.connector.hooks import our_scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc


def finish_stopped(core: EngineCoreProc, request_ids: list[str]) -> None:
    """End requests whose text has come to a stop string. Those already over have answered."""
    ours = our_scheduler(core.scheduler.connector)
    if ours is None:
        # Nobody would learn of blocks that are kept: end them as the base does.
        finished = core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        told = {}
    else:
        with ours.telling() as told:
            finished = core.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_STOPPED)
    outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
    for request in finished:
        outputs[request.client_index].append(
            EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.STOP,
                kv_transfer_params=told.get(request.request_id),
            )
        )
    for client, answers in outputs.items():
        ids = {answer.request_id for answer in answers}
        core.output_queue.put_nowait(
            (client, EngineCoreOutputs(finished_requests=ids, outputs=answers))
        )
