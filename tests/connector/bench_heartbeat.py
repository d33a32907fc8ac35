"""What one heartbeat for thousands of kept conversations takes of a decode node's engine core.

A scheduler without engine keeps the conversations by lease. Per interval it gets one call that
renews them all, as the server sends it, and answers it as the engine core does: decoded, renewed
with the totals, encoded. And it looks for leases that are over, as it does at its steps: right
after the heartbeat, and at each tick until the next one. Leases go by a clock of their own, a third
of a lease per interval.

example:
  python -m tests.connector.bench_heartbeat --leases 5000 --blocks 100 --json heartbeat.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.bidir.connector.hooks import free_ended_leases, kv_leases
from vllm.bidir.connector.kept import KeptTurn, KeptTurns, new_lease_id
from vllm.bidir.connector.leases import TICKS, LeaseOptions, Leases
from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from tests.connector.sim import Engine
from tools.cluster import make_model

LEASE_S, HOLD_S = 15.0, 30.0
HEARTBEATS_PER_LEASE = 3
LOOKS = -(-TICKS // HEARTBEATS_PER_LEASE)
PARTS = ("decode", "renew", "encode", "looks")
WARM_UP = 5


class Node:
    """A scheduler that keeps so many turns of so many blocks each; `now` is its leases' time."""

    def __init__(self, model: Path, leases: int, blocks: int) -> None:
        self.now = 1000.0
        self.lease_ids = [new_lease_id(0) for _ in range(leases)]
        engine = Engine(model, "d", extra={"decoder_kv_lease_duration": LEASE_S})
        self.scheduler = engine.scheduler
        # The turns are of no request: only what leases know of them matters here.
        options = LeaseOptions(LEASE_S, 1e6, HOLD_S, leases * blocks)
        engine.bidir.kept = KeptTurns(Leases(options, lambda: self.now))
        for number, lease_id in enumerate(self.lease_ids):
            block_ids = range(1 + number * blocks, 1 + (number + 1) * blocks)
            turn = KeptTurn(lease_id, f"r{number}", tuple(block_ids), 0, b"")
            assert engine.bidir.kept.keep(turn, block_ids)

    def kv_leases(self, word: str, lease_ids: list[str]) -> dict[str, Any]:
        return kv_leases(self.scheduler, word, lease_ids)


class Calls:
    """Encoders and decoders as the engine core's two threads have them, and the server's."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._decoder, self._encoder = MsgpackDecoder(), MsgpackEncoder()
        self._request = MsgpackEncoder().encode((0, 1, "kv_leases", ("renew", node.lease_ids)))

    def interval(self) -> dict[str, float]:
        """One heartbeat and the looks until the next one: milliseconds by part."""
        node = self._node
        stamps = [time.perf_counter()]

        def done() -> None:
            stamps.append(time.perf_counter())

        _, call_id, name, args = self._decoder.decode(self._request)
        done()
        answer = getattr(node, name)(*args)
        done()
        output = UtilityOutput(call_id, result=UtilityResult(answer))
        self._encoder.encode_into(EngineCoreOutputs(utility_output=output), bytearray())
        done()
        for _ in range(LOOKS):
            free_ended_leases(node.scheduler)
            node.now += LEASE_S / HEARTBEATS_PER_LEASE / LOOKS
        done()
        assert len(answer["renewed"]) == answer["totals"]["leases"] == len(node.lease_ids)
        passed = itertools.pairwise(stamps)
        return {part: (b - a) * 1e3 for part, (a, b) in zip(PARTS, passed, strict=True)}


def summary(intervals: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median and maximum, ms: of each part, of the call (all but the looks), and of all."""

    def of(value: Callable[[dict[str, float]], float]) -> dict[str, float]:
        found = [value(one) for one in intervals]
        return {"p50_ms": statistics.median(found), "max_ms": max(found)}

    sums = {part: of(lambda one, part=part: one[part]) for part in PARTS}  # type: ignore[misc]
    sums["call"] = of(lambda one: sum(one.values()) - one["looks"])
    sums["interval"] = of(lambda one: sum(one.values()))
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.connector.bench_heartbeat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--leases", type=int, default=5000, help="default 5000")
    parser.add_argument("--blocks", type=int, default=100, help="of each lease; default 100")
    parser.add_argument("--intervals", type=int, default=200, help="measured ones; default 200")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-heartbeat-") as scratch:
        calls = Calls(Node(make_model(Path(scratch)), args.leases, args.blocks))
    for _ in range(WARM_UP):
        calls.interval()
    sums = summary([calls.interval() for _ in range(args.intervals)])
    print(f"a heartbeat for {args.leases} leases of {args.blocks} blocks, {args.intervals} times")
    print(f"{'ms':10}{'p50':>8}{'max':>8}")
    for name, found in sums.items():
        print(f"{name:10}{found['p50_ms']:8.2f}{found['max_ms']:8.2f}")
    if args.json:
        about = {
            "leases": args.leases,
            "blocks": args.blocks,
            "intervals": args.intervals,
            "python": sys.version.split()[0],
            "cores": len(os.sched_getaffinity(0)),
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**about, "parts": sums}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
