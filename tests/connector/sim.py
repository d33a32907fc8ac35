"""A prefill and a decode engine without models: real schedulers, simulated KV memory.

Each slot of the memory holds a digest of all tokens up to its position, and of what else enters
attention there. Before a request computes a token, every slot that it would attend to is compared
with the digest of its own prompt: so a wrong block, a shifted block or a stale block is found
where a real engine would answer wrong.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.bidir.connector.connector import BidirConnector
from vllm.bidir.connector.messages import (
    SideChannel,
    ask_confirm,
    ask_hold,
    read_confirm,
    read_hold,
)
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.scheduler import BidirScheduler
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16
FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
GARBAGE = -1

Fault = Callable[["Engine", ReadBack], None]


class WrongKVError(AssertionError):
    """A request was about to attend to KV that is not its own."""


def vllm_config(model: Path, engine_id: str, **options: Any) -> VllmConfig:
    """A configuration as the engine core would have it; no device is touched."""
    cache = CacheConfig(
        block_size=BLOCK,
        enable_prefix_caching=options.get("prefix_caching", True),
        prefix_caching_hash_algo=options.get("hash_algo", "sha256"),
    )
    cache.kv_cache_layout = "LBNHC"
    return VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=options.get("batched_tokens", 512),
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role=options.get("kv_role", "kv_both"),
            engine_id=engine_id,
            kv_load_failure_policy=options.get("policy", "fail"),
            kv_connector_extra_config={
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": options.get("threshold", 0),
                **({"kv_peers": options["kv_peers"]} if "kv_peers" in options else {}),
            },
        ),
        device_config=DeviceConfig("cpu"),
    )


def kv_cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


class Engine:
    """One engine: a real scheduler, and memory that remembers what each slot stands for."""

    def __init__(self, model: Path, engine_id: str, blocks: int = 400, **options: Any) -> None:
        config = vllm_config(model, engine_id, **options)
        config.cache_config.num_gpu_blocks = blocks
        self.config = config
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config(blocks),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        connector = self.scheduler.connector
        assert isinstance(connector, BidirConnector), "the factory's hook is missing"
        assert isinstance(connector.connector_scheduler, BidirScheduler)
        self.connector = connector
        self.bidir = connector.connector_scheduler
        self.side_channel = SideChannel(self.bidir.kept, engine_id, 1, {}, b"get_meta", lambda: 0.0)
        self.memory: dict[tuple[int, int], int] = {}
        self.orders: list[ReadBack] = []
        self._numbers = itertools.count()
        self._expired: set[str] = set()

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def expire(self, request_id: str) -> None:
        """All workers report that a kept turn's time is over; the scheduler frees its blocks."""
        self._expired.add(request_id)
        self.step(None)

    def run(
        self,
        tokens: Sequence[int],
        params: dict[str, Any] | None,
        source: Engine | None = None,
        fault: Fault | None = None,
        max_tokens: int = 1,
        answer: Sequence[int] = (),
        salt: str | None = None,
    ) -> tuple[dict[str, Any] | None, str]:
        """Serve one request to its end; its kv_transfer_params and its id.

        `source` is the engine that read-backs go to, `fault` happens there between HOLD and
        CONFIRM, `answer` are the tokens that the model says.
        """
        request = self.add(tokens, params, max_tokens, salt)
        said = iter(answer)
        for _ in range(4000):
            done = self.step(request, source, fault, said, salt)
            if done is not None:
                if params is not None and params.get("do_remote_decode"):
                    self._handed_over(request.request_id)
                return (done[0], request.request_id)
        raise AssertionError(f"{request.request_id} never finished: {request.status}")

    def add(
        self,
        tokens: Sequence[int],
        params: dict[str, Any] | None,
        max_tokens: int = 1,
        salt: str | None = None,
        **content: Any,
    ) -> Request:
        """Put a request into the waiting queue; `content` goes to Request as it is."""
        request = Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self.hasher,
            cache_salt=salt,
            **content,
        )
        if params is not None:
            # They cross a process boundary and a router.
            request.kv_transfer_params = json.loads(json.dumps(params))
        self.scheduler.add_request(request)
        return request

    def _handed_over(self, request_id: str) -> None:
        """A prefill's blocks are kept until a decode engine has read them, which it does now."""
        if request_id in self.scheduler.requests:
            self.expire(request_id)

    def step(
        self,
        request: Request | None,
        source: Engine | None = None,
        fault: Fault | None = None,
        said: Iterator[int] | None = None,
        salt: str | None = None,
    ) -> tuple[dict[str, Any] | None] | None:
        """One engine step; the finished request's params, in a tuple, once it has finished."""
        output = self.scheduler.schedule()
        received, invalid = self._read(output.kv_connector_metadata, source, fault)
        expired, self._expired = self._expired, set()
        transfers = None
        if received or invalid or expired:
            transfers = KVConnectorOutput(
                finished_sending=expired or None,
                finished_recving=received or None,
                invalid_block_ids=invalid,
            )
        ids = list(output.num_scheduled_tokens)
        said = iter(()) if said is None else said
        scheduled = output.num_scheduled_tokens
        sampled = [self._compute(name, scheduled[name], said, salt) for name in ids]
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: k for k, name in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=transfers,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                if request is not None and one.request_id == request.request_id and one.finished:
                    assert str(one.finish_reason) == "length", one.finish_reason
                    return (one.kv_transfer_params,)
        return None

    def _read(
        self, metadata: Any, source: Engine | None, fault: Fault | None
    ) -> tuple[set[str], set[int]]:
        """The workers' part: HOLD, copy by position, CONFIRM."""
        received: set[str] = set()
        invalid: set[int] = set()
        for name, order in getattr(metadata, "read_backs", {}).items():
            assert source is not None, "a read-back without a source"
            self.orders.append(order)
            received.add(name)
            if not self._read_one(order, source, fault):
                invalid |= set(order.local_block_ids)
        return received, invalid

    def _read_one(self, order: ReadBack, source: Engine, fault: Fault | None) -> bool:
        lease = order.source.lease_id
        held = read_hold(source.side_channel.answer(ask_hold(lease))[0])
        if held is None or held.digest != order.digest or held.valid_tokens < order.total:
            return False
        blocks = held.block_ids[order.remote_positions]
        if len(blocks) != len(order.local_block_ids):
            return False
        if fault is not None:
            fault(source, order)
        for theirs, ours in zip(blocks, order.local_block_ids, strict=True):
            for slot in range(BLOCK):
                self.memory[ours, slot] = source.memory.get((theirs, slot), GARBAGE)
        return read_confirm(source.side_channel.answer(ask_confirm(lease, held.epoch))[0])

    def _compute(
        self, name: str, scheduled: int, said: Iterator[int], salt: str | None
    ) -> list[int]:
        request = self.scheduler.requests[name]
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        # schedule() has advanced the count by what it scheduled.
        end = request.num_computed_tokens
        begin = end - scheduled
        digests = prefix_digests(request.all_token_ids, salt)
        for position in range(begin):
            found = self.memory.get((blocks[position // BLOCK], position % BLOCK), GARBAGE)
            if found != digests[position]:
                raise WrongKVError(f"{name}: position {position} of {begin} computed ones")
        for position in range(begin, end):
            self.memory[blocks[position // BLOCK], position % BLOCK] = digests[position]
        if end < request.num_tokens:
            return []
        return [next(said, 7)]


def prefix_digests(tokens: Sequence[int], salt: str | None) -> list[int]:
    """For each position, a number that stands for everything attention sees up to there."""
    digests: list[int] = []
    value = hash(salt)
    for token in tokens:
        value = hash((value, token))
        digests.append(value)
    return digests
