"""The two legs of a turn, sent without a router: so that a test chooses what happens between."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from tests.e2e.oracle import IDS, Compared, ask, compare
from tests.e2e.turns import by_outcome, metric, wait_until
from tests.faults.conftest import TIMEOUT_S, TTL_S
from tools.cluster import Cluster, Engine
from tools.cluster.tokenizer import GENERATED_IDS

_READ_BACKS = "vllm:bidir_read_back_total"
FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False}


def tokens(seed: object, count: int) -> list[int]:
    return random.Random(str(seed)).choices(GENERATED_IDS, k=count)


def prefill(engine: Engine, prompt: list[int], params: Any) -> Any:
    """P's leg; its kv_transfer_params."""
    answer = ask(engine, IDS, prompt, max_tokens=1, kv_transfer_params=params)
    return answer["kv_transfer_params"]


def decode(engine: Engine, prompt: list[int], params: Any, **extra: Any) -> tuple[list[int], Any]:
    """D's leg; what it said, and its kv_transfer_params."""
    answer = ask(engine, IDS, prompt, kv_transfer_params=params, **extra)
    return IDS.pieces(answer), answer["kv_transfer_params"]


def turn(pair: Cluster, prompt: list[int], params: Any = None) -> tuple[list[int], Any]:
    """Both legs; the history with the answer, and D's params for the next turn."""
    handed = prefill(pair.prefill[0], prompt, params or FIRST_TURN)
    said, kept = decode(pair.decode[0], prompt, handed)
    return prompt + said, kept


@contextmanager
def in_background(work: Any, *args: Any) -> Iterator[Future[Any]]:
    """Run it in a thread; whatever happens, it has ended when the block is left."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work, *args)


def check_right(engine: Engine, prompt: list[int], compared: Compared) -> None:
    """A plain request for the prompt, which may use the prefix cache, equals a recompute."""
    compare(IDS, engine, prompt, ask(engine, IDS, prompt), True, compared)


def lost(engine: Engine, reason: str) -> float:
    """How many read-backs the engine has recomputed for this reason."""
    return metric(engine, _READ_BACKS, outcome="recompute", reason=reason)


def read(engine: Engine) -> float:
    """How many read-backs the engine has made."""
    return metric(engine, _READ_BACKS, outcome="read")


@contextmanager
def reads_back(engine: Engine) -> Iterator[None]:
    """One read-back is made inside the block, and none is lost."""
    before = by_outcome(engine, _READ_BACKS)
    began = time.monotonic()
    yield
    now = by_outcome(engine, _READ_BACKS)
    found = {name: count - before.get(name, 0) for name, count in now.items()}
    found = {name: count for name, count in found.items() if count}
    took = time.monotonic() - began
    assert found == {"read": 1}, f"{engine.name}: not one read-back but {found} in {took:.1f} s"


def used(engine: Engine) -> float:
    """Share of the engine's blocks that somebody holds."""
    return metric(engine, "vllm:kv_cache_usage_perc")


def rests(engine: Engine) -> None:
    """All that the engine held for others comes back by itself."""
    wait_until(lambda: used(engine) == 0, TTL_S + TIMEOUT_S, f"{engine.name} holds blocks")
    assert metric(engine, "vllm:num_requests_running") == 0
    assert metric(engine, "vllm:num_requests_waiting") == 0


def clear_cache_now(engine: Engine) -> bool:
    """Whether the engine has forgotten its prefix cache, which it does while no block is held."""
    answer = httpx.post(f"{engine.url}/reset_prefix_cache", timeout=60).raise_for_status()
    return bool(answer.json()["success"])


def clear_cache(engine: Engine) -> None:
    """So that a read-back has something to gain.

    P's blocks are held until it has heard that D has read them, some time after D's answer.
    """
    wait_until(lambda: clear_cache_now(engine), TTL_S, f"{engine.name} keeps its prefix cache")
