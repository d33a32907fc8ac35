"""A prefill and a decode engine without models: real schedulers, simulated KV memory.

As in the engine core, a step schedules, lets the workers compute and settles the outcome; with
async scheduling the outcome of a step is settled, and its KV written, only after the next one has
been scheduled.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.bidir.connector.connector import BidirConnector
from vllm.bidir.connector.messages import (
    HoldAnswer,
    SideChannel,
    ask_confirm,
    ask_hold,
    read_confirm,
    read_hold,
)
from vllm.bidir.connector.outcome import Outcome, WorkerReport
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.scheduler import BidirScheduler
from vllm.bidir.reasons import Reason
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.connector.memory import BLOCK, Content, Memory

FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False}
STOP = 1999
_FILLER = 7
_STEPS = 4000
# Steps that a kept turn lasts at most while others wait for blocks.
_LIFE = 1000

Fault = Callable[["Engine", ReadBack], None]


def vllm_config(model: Path, engine_id: str, **options: Any) -> VllmConfig:
    """A configuration as the engine core would have it; no device is touched."""
    cache = CacheConfig(
        block_size=BLOCK,
        enable_prefix_caching=options.get("prefix_caching", True),
        prefix_caching_hash_algo=options.get("hash_algo", "sha256"),
    )
    cache.kv_cache_layout = "LBNHC"
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=options.get("batched_tokens", 512),
            long_prefill_token_threshold=options.get("chunk", 0),
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
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
                **options.get("extra", {}),
            },
        ),
        device_config=DeviceConfig("cpu"),
    )
    if options.get("drafts"):
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=options["drafts"],
            prompt_lookup_max=3,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    # VllmConfig refuses it on a CPU, where no engine is started here.
    config.scheduler_config.async_scheduling = options.get("async_scheduling", False)
    config.parallel_config.data_parallel_index = options.get("rank", 0)
    return config


def kv_cache_config(blocks: int, *groups: KVCacheGroupSpec) -> KVCacheConfig:
    """That of a model with these groups, or with one layer of full attention."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=list(groups) or [KVCacheGroupSpec(["layer"], spec)],
    )


def play_step(
    engine: Engine, told: KVConnectorOutput | None
) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    """One step at whose end the workers report `told`; what was scheduled, and what requests said.

    Each that is scheduled says a token. The engine's memory takes no part.
    """
    output = engine.scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: k for k, name in enumerate(names)},
        sampled_token_ids=[[_FILLER] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=told,
    )
    outputs = engine.scheduler.update_from_output(output, result).values()
    return output, [one for group in outputs for one in group.outputs]


@dataclass
class _Work:
    """What one request computes in a step: positions `begin` to `end` of its blocks."""

    request: Request
    block_ids: list[int]
    begin: int
    end: int
    # Set when the worker begins with this request, or begins anew after a preemption.
    content: Content | None


@dataclass
class _Batch:
    """A step that has been scheduled and not yet settled."""

    output: SchedulerOutput
    works: list[_Work]
    transfers: KVConnectorOutput | None


@dataclass
class _Read:
    """A read-back under way, with what D answered to HOLD."""

    request_id: str
    order: ReadBack
    source: Engine
    fault: Fault | None
    held: HoldAnswer | None
    steps_left: int


class Engine:
    """One engine: a real scheduler, and memory that remembers what each slot stands for.

    Options: those of `vllm_config`; `groups` of the KV cache; `images` gives it the encoder cache
    of a multimodal model; a read-back takes `read_steps` steps.
    """

    def __init__(self, model: Path, engine_id: str, blocks: int = 400, **options: Any) -> None:
        config = vllm_config(model, engine_id, **options)
        config.cache_config.num_gpu_blocks = blocks
        self.config = config
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        groups = options.get("groups", ())
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=kv_cache_config(blocks, *groups),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
        )
        if options.get("images"):
            self.scheduler.max_num_encoder_input_tokens = 4096
            self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
        connector = self.scheduler.connector
        assert isinstance(connector, BidirConnector), "the factory's hook is missing"
        assert isinstance(connector.connector_scheduler, BidirScheduler)
        self.connector = connector
        self.bidir = connector.connector_scheduler
        self.side_channel = SideChannel(self.bidir.kept, engine_id, 1, {}, b"get_meta", lambda: 0.0)
        # Only what is kept whole and in place can be checked position by position.
        self._checked = not groups or isinstance(groups[0].kv_cache_spec, FullAttentionSpec)
        self.memory = Memory(blocks)
        # The longest prompt that is sure to fit, with an answer, beside nothing else.
        self.longest = min(3000, (blocks - 5) * BLOCK)
        # Read-backs by request, and the requests whose read-back was confirmed.
        self.ordered: dict[str, ReadBack] = {}
        self.loaded: set[str] = set()
        self.decisions: list[list[Any]] = []
        self.resumed = 0
        self._finished: dict[str, dict[str, Any] | None] = {}
        self._lag = config.max_concurrent_batches - 1
        self._read_steps = options.get("read_steps", 0)
        self._batches: deque[_Batch] = deque()
        self._contents: dict[str, Content] = {}
        self._answers: dict[str, Sequence[int]] = {}
        self._sources: dict[str, tuple[Engine | None, Fault | None]] = {}
        self._reads: list[_Read] = []
        self._numbers = itertools.count()
        self._expired: set[str] = set()
        self._all_blocks = self.free_blocks

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def orders(self) -> list[ReadBack]:
        return list(self.ordered.values())

    @property
    def in_flight(self) -> int:
        """Steps that have been scheduled and not yet settled."""
        return len(self._batches)

    def expire(self, *request_ids: str) -> None:
        """All workers report that kept turns' time is over; the scheduler frees their blocks."""
        self._expired |= set(request_ids)
        self.step()
        while self._batches:
            self._settle(self._batches.popleft())

    def forget(self) -> None:
        """All that was kept is over; AssertionError if a block or a word about it is left."""
        self.expire(*self._kept())
        assert not self.scheduler.requests, "requests are left"
        assert self.scheduler.reset_prefix_cache()
        assert self.free_blocks == self._all_blocks, "blocks have leaked"
        one = self.bidir
        left = (one._matches, one._local, one._attempted, one._orders, one._outcomes, one.kept)
        left += (one._speed,)
        assert not any(map(len, left)), f"the connector remembers what is gone: {left}"
        self.ordered.clear()
        self.loaded.clear()
        self.decisions.clear()
        self._finished.clear()
        self._answers.clear()
        self._sources.clear()

    def run(
        self,
        tokens: Sequence[int],
        params: dict[str, Any] | None,
        source: Engine | None = None,
        fault: Fault | None = None,
        max_tokens: int = 1,
        answer: Sequence[int] = (),
        salt: str | None = None,
        **content: Any,
    ) -> tuple[dict[str, Any] | None, str]:
        """Serve one request to its end; its kv_transfer_params and its id.

        `source` is the engine that read-backs go to, `fault` happens there between HOLD and
        CONFIRM, `answer` are the tokens that the model says.
        """
        request = self.add(tokens, params, max_tokens, salt, source, fault, answer, **content)
        (found,) = self.serve(request)
        return found, request.request_id

    def add(
        self,
        tokens: Sequence[int] | None,
        params: dict[str, Any] | None,
        max_tokens: int = 1,
        salt: str | None = None,
        source: Engine | None = None,
        fault: Fault | None = None,
        answer: Sequence[int] = (),
        sampling: dict[str, Any] | None = None,
        **content: Any,
    ) -> Request:
        """Put a request into the waiting queue; `content` goes to Request as it is."""
        fields: dict[str, Any] = {
            "sampling_params": SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP], **(sampling or {})
            ),
            "pooling_params": None,
            **content,
        }
        request = Request(
            request_id=f"r{next(self._numbers)}",
            prompt_token_ids=None if tokens is None else list(tokens),
            block_hasher=self.hasher,
            cache_salt=salt,
            **fields,
        )
        if params is not None:
            # They cross a process boundary and a router.
            request.kv_transfer_params = json.loads(json.dumps(params))
        self._answers[request.request_id] = answer
        self._sources[request.request_id] = source, fault
        self.scheduler.add_request(request)
        return request

    def serve(self, *requests: Request) -> list[dict[str, Any] | None]:
        """Step until all of these have finished; their kv_transfer_params.

        While it lasts, time passes: what was kept is over when nothing moves, or in the end.
        """
        names = [request.request_id for request in requests]
        idle = 0
        for number in range(1, _STEPS):
            if all(name in self._finished for name in names):
                break
            idle = 0 if self.step() else idle + 1
            if idle > self._read_steps + 2 or number % _LIFE == 0:
                self.expire(*self._kept())
        for request in requests:
            assert request.is_finished(), f"{request.request_id} never finished: {request.status}"
        # A prefill's blocks are kept until a decode engine has read them, which it does now.
        handed_over = [
            one.request_id
            for one in requests
            if (one.kv_transfer_params or {}).get("do_remote_decode")
            and one.request_id in self.scheduler.requests
        ]
        if handed_over:
            self.expire(*handed_over)
        return [self._finished[name] for name in names]

    def abort(self, request: Request) -> None:
        """The client has gone."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    ############################################################
    # One step
    ############################################################

    def step(self) -> bool:
        """Whether anything was scheduled."""
        output = self.scheduler.schedule()
        self._batches.append(self._dispatch(output))
        scheduled = output.total_num_scheduled_tokens > 0
        if not scheduled or len(self._batches) > self._lag:
            self._settle(self._batches.popleft())
        return scheduled

    def _kept(self) -> list[str]:
        return [name for name, one in self.scheduler.requests.items() if one.is_finished()]

    def _dispatch(self, output: SchedulerOutput) -> _Batch:
        """Give a step to the workers. Transfers are not ordered against what they compute."""
        cached = output.scheduled_cached_reqs
        begun = {one.req_id for one in output.scheduled_new_reqs} | set(cached.resumed_req_ids)
        self.resumed += len(cached.resumed_req_ids)
        works = []
        for name, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            # schedule() has advanced the count by what it scheduled.
            end = request.num_computed_tokens
            block_ids = list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])
            content = Content(request) if name in begun else None
            works.append(_Work(request, block_ids, end - scheduled, end, content))
        return _Batch(output, works, self._transfer(output.kv_connector_metadata))

    def _settle(self, batch: _Batch) -> None:
        """The workers compute a step, and the scheduler hears what came of it."""
        pooling = any(work.request.pooling_params is not None for work in batch.works)
        sampled = [self._compute(work) for work in batch.works]
        names = [work.request.request_id for work in batch.works]
        for name in batch.output.finished_req_ids:
            self._contents.pop(name, None)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: k for k, name in enumerate(names)},
            sampled_token_ids=[[] for _ in names] if pooling else sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[torch.zeros(1) if said else None for said in sampled] if pooling else [],
            kv_connector_output=batch.transfers,
        )
        for outputs in self.scheduler.update_from_output(batch.output, result).values():
            stats = outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.decisions += stats.kv_connector_stats["read_backs"]
            for one in outputs.outputs:
                if one.finished:
                    assert str(one.finish_reason) in ("length", "stop"), one.finish_reason
                    self._finished[one.request_id] = one.kv_transfer_params

    def _compute(self, work: _Work) -> list[int]:
        """Attend, write, and say a token if the request is computed to its end."""
        name = work.request.request_id
        if work.content is not None:
            self._contents[name] = work.content
        content = self._contents[name]
        if self._checked:
            self.memory.attend(work.block_ids, content.digests, work.begin)
            self.memory.write(work.block_ids, content.digests, work.begin, work.end)
        if work.end < len(content.digests):
            return []
        said, answer = len(content.digests) - content.prompt_tokens, self._answers[name]
        token = answer[said] if said < len(answer) else _FILLER
        content.append(token)
        return [token]

    ############################################################
    # Transfers: HOLD, copy by position, CONFIRM
    ############################################################

    def _transfer(self, metadata: Any) -> KVConnectorOutput | None:
        for name, order in getattr(metadata, "read_backs", {}).items():
            source, fault = self._sources[name]
            assert source is not None, "a read-back without a source"
            assert name not in self.ordered, "a second attempt"
            self.ordered[name] = order
            answer = source.side_channel.answer(ask_hold(order.source.lease_id))
            held = read_hold(answer[0])
            self._reads.append(_Read(name, order, source, fault, held, self._read_steps))
        report = WorkerReport()
        invalid: set[int] = set()
        for read in list(self._reads):
            if read.steps_left:
                read.steps_left -= 1
                continue
            self._reads.remove(read)
            stood = self._read(read)
            report.outcomes[read.request_id] = Outcome(None if stood else Reason.HOLD_LOST)
            if stood:
                self.loaded.add(read.request_id)
            else:
                invalid |= set(read.order.local_block_ids)
        expired, self._expired = self._expired, set()
        if not (report or expired):
            return None
        return KVConnectorOutput(
            finished_sending=expired or None,
            finished_recving=set(report.outcomes) or None,
            invalid_block_ids=invalid,
            kv_connector_worker_meta=report or None,
        )

    def _read(self, read: _Read) -> bool:
        held, order, source = read.held, read.order, read.source
        if held is None or held.digest != order.digest or held.valid_tokens < order.total:
            return False
        blocks = held.block_ids[order.remote_positions]
        if len(blocks) != len(order.local_block_ids):
            return False
        if read.fault is not None:
            read.fault(source, order)
        for theirs, ours in zip(blocks, order.local_block_ids, strict=True):
            self.memory.copy_block(source.memory, theirs, ours)
        lease = order.source.lease_id
        return read_confirm(source.side_channel.answer(ask_confirm(lease, held.epoch))[0])
