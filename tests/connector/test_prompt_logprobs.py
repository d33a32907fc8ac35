"""D computes a prompt by itself when the client asks for something about each of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.v1.request import RequestStatus

from tests.connector.sim import FIRST_TURN, Engine, kv_cache_config, vllm_config

PROMPT = list(range(100))
PROMPT_LOGPROBS = {"prompt_logprobs": 1}


@pytest.fixture
def d(model: Path) -> Engine:
    return Engine(model, "d")


@pytest.fixture
def handover(model: Path) -> Any:
    params, _ = Engine(model, "p").run(PROMPT, FIRST_TURN)
    return params


@pytest.mark.parametrize("cached", [False, True])
def test_prompt_logprobs_are_computed_from_the_whole_prompt(
    d: Engine, handover: Any, cached: bool
) -> None:
    """Loaded KV has no logits: the runner would hand out memory that nobody has written."""
    if cached:
        d.run(PROMPT, None)
    request = d.add(PROMPT, handover, sampling=PROMPT_LOGPROBS)
    output = d.scheduler.schedule()
    assert request.status is RequestStatus.RUNNING
    assert output.num_scheduled_tokens == {request.request_id: len(PROMPT)}


def test_prompt_logprobs_give_the_prefill_nodes_blocks_back(d: Engine, handover: Any) -> None:
    """P is told at once; else it keeps them until its lease ends."""
    request = d.add(PROMPT, handover, sampling=PROMPT_LOGPROBS)
    (order,) = d.scheduler.schedule().kv_connector_metadata.reqs_to_recv.items()
    name, meta = order
    assert name == request.request_id
    assert meta.remote.request_id == handover["remote_request_id"]
    assert not any(meta.local_block_ids), "nothing is read"


def test_a_request_without_prompt_logprobs_still_loads(d: Engine, handover: Any) -> None:
    request = d.add(PROMPT, handover)
    d.scheduler.schedule()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def test_a_turn_with_prompt_logprobs_ends_and_leaves_no_block(d: Engine, handover: Any) -> None:
    d.run(PROMPT, handover, max_tokens=3, sampling=PROMPT_LOGPROBS)
    d.forget()


def test_prompt_logprobs_are_computed_where_they_are_asked_for(
    model: Path, d: Engine, handover: Any
) -> None:
    """Also with `bidirectional_kv_xfer` off, where the base's own scheduler decides."""
    base = NixlPullConnectorScheduler(vllm_config(model, "d"), "d", kv_cache_config(10))
    assert base.get_num_new_matched_tokens(d.add(PROMPT, handover), 0) == (len(PROMPT), True)
    asking = d.add(PROMPT, handover, sampling=PROMPT_LOGPROBS)
    assert base.get_num_new_matched_tokens(asking, 0) == (0, False)
