"""What reading KV costs NIXL, by how many descriptors it is cut into and in which order.

Two processes with a KV cache each, on this machine; one reads blocks of the other's, without an
engine: as the base asks for them, in rising order, and row by row (all layers of a block side by
side). "post" is the time that the caller stands still, "all" until the last byte is there.

example:
  python -m tools.bench.descriptors --device cuda --json descriptors.json
  python -m tools.bench.descriptors --page-bytes 4096 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Two engines on one GPU: without it UCX goes over TCP.
ZERO_COPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"


@dataclass(frozen=True)
class Cache:
    """A KV cache of `pool` blocks; `blocks` of them are read. A page is one layer of a block."""

    layers: int
    page_bytes: int
    pool: int
    blocks: int

    @property
    def row_bytes(self) -> int:
        return self.layers * self.page_bytes


@dataclass(frozen=True)
class Case:
    """Block ids in runs of `run`, shuffled; `falling` within a run, as a pool gives them out."""

    name: str
    rows: bool
    run: int
    falling: bool = False


CASES = (
    Case("layers, scattered", rows=False, run=1),
    Case("layers, falling runs of 64", rows=False, run=64, falling=True),
    Case("layers, rising runs of 64", rows=False, run=64),
    Case("rows, scattered", rows=True, run=1),
    Case("rows, rising runs of 8", rows=True, run=8),
    Case("rows, rising runs of 64", rows=True, run=64),
)


@dataclass(frozen=True)
class Read:
    """One read: ms, and descriptors before and after NIXL has merged them."""

    case: str
    given: int
    merged: int
    post_ms: float
    all_ms: float
    gigabytes_per_s: float


def block_ids(case: Case, cache: Cache, seed: int) -> list[int]:
    """`cache.blocks` ids: those of this seed are always the same."""
    import numpy as np

    starts = np.arange(0, cache.pool - case.run + 1, case.run)
    np.random.default_rng(seed).shuffle(starts)
    step = range(case.run - 1, -1, -1) if case.falling else range(case.run)
    ids = [int(start) + k for start in starts for k in step]
    if len(ids) < cache.blocks:
        raise ValueError(f"--pool {cache.pool} is too small for --blocks {cache.blocks}")
    return ids[: cache.blocks]


def descriptors(base: int, cache: Cache, rows: bool) -> Any:
    """[n, 3] address, bytes, device: of every block, or of every layer's every block."""
    import numpy as np

    blocks = np.arange(cache.pool, dtype=np.uint64)
    if rows:
        length, starts = cache.row_bytes, blocks * np.uint64(cache.row_bytes)
    else:
        length = cache.page_bytes
        starts = np.arange(cache.layers * cache.pool, dtype=np.uint64) * np.uint64(length)
    found = np.zeros((len(starts), 3), dtype=np.uint64)
    found[:, 0], found[:, 1] = np.uint64(base) + starts, length
    return found


def chosen(ids: Sequence[int], cache: Cache, rows: bool) -> Any:
    """Indices into `descriptors`, layer by layer as the base has them."""
    import numpy as np

    blocks = np.asarray(ids, dtype=np.int32)
    if rows:
        return blocks
    layers = np.arange(cache.layers, dtype=np.int32)[:, None]
    return (layers * np.int32(cache.pool) + blocks[None, :]).flatten()


class Side:
    """One process's agent and cache."""

    def __init__(self, name: str, cache: Cache, device: str, threads: int) -> None:
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        self.cache = cache
        self.memory_type = "VRAM" if device == "cuda" else "DRAM"
        size = cache.pool * cache.row_bytes
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.agent = nixl_agent(
            name, nixl_agent_config(num_threads=threads, capture_telemetry=True)
        )
        self.base: int = self.memory.data_ptr()
        region = [(self.base, size, 0, "")]
        self.agent.register_memory(self.agent.get_reg_descs(region, self.memory_type))

    def prepared(self, owner: str, base: int, rows: bool) -> Any:
        described = descriptors(base, self.cache, rows)
        return self.agent.prep_xfer_dlist(
            owner, self.agent.get_xfer_descs(described, self.memory_type)
        )

    def read(self, case: Case, local: Any, remote: Any) -> Read:
        ours = chosen(block_ids(case, self.cache, 1), self.cache, case.rows)
        theirs = chosen(block_ids(case, self.cache, 2), self.cache, case.rows)
        began = time.perf_counter()
        handle = self.agent.make_prepped_xfer("READ", local, ours, remote, theirs)
        state = self.agent.transfer(handle)
        posted = time.perf_counter()
        while state == "PROC":
            time.sleep(0.0002)
            state = self.agent.check_xfer_state(handle)
        done = time.perf_counter()
        if state != "DONE":
            raise RuntimeError(f"{case.name}: NIXL says {state}")
        merged = self.agent.get_xfer_telemetry(handle).descCount
        self.agent.release_xfer_handle(handle)
        size = self.cache.blocks * self.cache.row_bytes
        return Read(
            case.name,
            len(ours),
            merged,
            (posted - began) * 1e3,
            (done - began) * 1e3,
            size / (done - began) / 1e9,
        )


def serve(pipe: Connection, cache: Cache, device: str, threads: int) -> None:
    """The process that is read from, until the pipe says that it is over."""
    side = Side("theirs", cache, device, threads)
    pipe.send((side.agent.get_agent_metadata(), side.base))
    pipe.recv()
    os._exit(0)  # NIXL's own end takes seconds


def measure(cache: Cache, device: str, threads: int, repeats: int) -> list[Read]:
    """Each case `repeats` times after one that does not count: the first opens the way."""
    for case in CASES:
        block_ids(case, cache, 1)  # refuses a pool that is too small before anything starts
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    other = context.Process(target=serve, args=(there, cache, device, threads))
    other.start()
    side = Side("ours", cache, device, threads)
    metadata, base = here.recv()
    name = side.agent.add_remote_agent(metadata)
    reads: list[Read] = []
    for rows in (False, True):
        local = side.prepared("NIXL_INIT_AGENT", side.base, rows)
        remote = side.prepared(name, base, rows)
        for case in CASES:
            if case.rows is rows:
                side.read(case, local, remote)
                reads += [side.read(case, local, remote) for _ in range(repeats)]
                print(f"measured: {case.name}", file=sys.stderr)
    here.send("over")
    other.join(10)
    return reads


def table(reads: Sequence[Read]) -> str:
    """Medians of each case."""
    lines = [f"{'':28}{'descriptors':>12}{'merged':>9}{'post ms':>10}{'all ms':>10}{'GB/s':>8}"]
    for case in CASES:
        some = [read for read in reads if read.case == case.name]
        if not some:
            continue
        post, total, rate = (
            statistics.median(getattr(read, field) for read in some)
            for field in ("post_ms", "all_ms", "gigabytes_per_s")
        )
        lines.append(
            f"{case.name:28}{some[0].given:12,}{some[0].merged:9,}{post:10.2f}{total:10.2f}{rate:8.1f}"
        )
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.descriptors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=36, help="default: those of an 8B model")
    parser.add_argument(
        "--page-bytes", type=int, default=65536, help="of one layer of a block of 16 tokens"
    )
    parser.add_argument("--blocks", type=int, default=1555, help="24,880 tokens in blocks of 16")
    parser.add_argument("--pool", type=int, default=3200, help="blocks of either cache")
    parser.add_argument("--threads", type=int, default=4, help="of UCX, as vLLM has it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every read here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    os.environ.setdefault(ZERO_COPY, "on")
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    cache = Cache(args.layers, args.page_bytes, args.pool, args.blocks)
    try:
        reads = measure(cache, args.device, args.threads, args.repeats)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(reads))
    if args.json:
        content = {"cache": asdict(cache), "device": args.device, "threads": args.threads}
        content["reads"] = [asdict(read) for read in reads]
        args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # NIXL's own end takes seconds
