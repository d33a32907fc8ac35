"""What the last token of a handed-over prompt attends to has been loaded, or is computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector.window import misses_last_tokens
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from tests.connector.sim import BLOCK, Engine
from tests.connector.test_failed_loads import GROUPS, HANDED, SHAPE

WINDOW = 2 * BLOCK


def lost(d: Engine) -> list[str]:
    return list(d.bidir.stats.data["lost_handovers"])


@pytest.mark.parametrize("groups", [GROUPS, GROUPS[1:]], ids=["beside full attention", "alone"])
def test_no_token_attends_to_a_block_that_is_not_there(
    model: Path, groups: tuple[KVCacheGroupSpec, ...]
) -> None:
    d = Engine(model, "d", groups=groups)
    computed = []
    for length in range(BLOCK, 5 * BLOCK):
        blocks = list(range(1, -(-length // BLOCK) + 1))
        params = {**HANDED, "remote_block_ids": [blocks] * len(groups)}
        request = d.add([7 * length + k for k in range(length)], params)
        d.scheduler.schedule()
        table = d.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[-1]
        first = max(0, length - WINDOW) // BLOCK
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            assert not any(block.is_null for block in table[first:]), length
        else:
            computed.append(length)
        d.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert computed == [k for k in range(WINDOW, 5 * BLOCK) if (k - WINDOW) % BLOCK == BLOCK - 1]
    assert lost(d) == ["window"] * len(computed)


def test_p_is_told_that_it_may_free_what_d_computes(model: Path) -> None:
    d = Engine(model, "d", groups=GROUPS)
    length = WINDOW + BLOCK - 1
    params = {**HANDED, "remote_block_ids": [[1, 2, 3], [4, 5, 6]]}
    request = d.add(list(range(length)), params)
    output = d.scheduler.schedule()
    assert output.num_scheduled_tokens == {request.request_id: length}
    meta = output.kv_connector_metadata.reqs_to_recv[request.request_id]
    assert not any(map(len, meta.local_block_ids)), "nothing is read"


@pytest.mark.parametrize(("tokens", "misses"), [(31, False), (32, True), (33, False), (64, True)])
def test_chunks_end_where_the_next_begins(tokens: int, misses: bool) -> None:
    spec = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=2 * BLOCK)
    config: Any = SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec(["near"], spec)])
    assert misses_last_tokens(config, tokens) is misses


def test_a_model_without_windows_misses_nothing() -> None:
    config: Any = SimpleNamespace(kv_cache_groups=[GROUPS[0]])
    assert not any(misses_last_tokens(config, tokens) for tokens in range(200))
    assert isinstance(GROUPS[1].kv_cache_spec, SlidingWindowSpec)
