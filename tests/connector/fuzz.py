"""Random histories over real schedulers for as long as you like; stops at the first wrong block.

example:
  python -m tests.connector.fuzz --minutes 10
  python -m tests.connector.fuzz --seed 1234 --minutes 1      # what a failure told you to run
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.connector.histories import Engines, run
from tests.connector.sim import Engine
from tools.cluster import make_model

ROUND = 60


def draw(seed: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Options of P and of D, and how many requests are served at a time."""
    rng = random.Random(seed)
    blocks, chunk, crowd = rng.choice(((400, 0, 1), (400, 0, 3), (60, 48, 3), (100, 48, 4)))
    both = {"chunk": chunk, "policy": rng.choice(("fail", "recompute"))}
    p, d = (
        {
            **both,
            "blocks": blocks,
            "batched_tokens": 64 if chunk else rng.choice((64, 256, 512)),
            "async_scheduling": rng.random() < 0.5,
        }
        for _ in range(2)
    )
    p |= {
        "prefix_caching": rng.random() < 0.5,
        "threshold": rng.choice((0, 16, 64)),
        "read_steps": rng.choice((0, 0, 1, 5)),
    }
    if not chunk:
        d["blocks"] = 2000
    return p, d, crowd


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.connector.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="default 10")
    parser.add_argument("--seed", type=int, help="of the first round; default: a random one")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    seed = random.randrange(1 << 30) if args.seed is None else args.seed
    end, reads, rounds = time.monotonic() + args.minutes * 60, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        while time.monotonic() < end:
            p, d, crowd = draw(seed)

            def make(
                caching: bool, p: dict[str, Any] = p, d: dict[str, Any] = d
            ) -> tuple[Engine, Engine]:
                return Engine(model, "p", **p), Engine(model, "d", prefix_caching=caching, **d)

            try:
                reads += run(Engines(make), ROUND, seed, crowd)
            except AssertionError as error:
                for note in getattr(error, "__notes__", ()):
                    print(note, file=sys.stderr)
                print(f"failed with --seed {seed}, P {p}, D {d}: {error}", file=sys.stderr)
                return 1
            seed, rounds = seed + 1, rounds + 1
            left = max(0.0, end - time.monotonic())
            print(
                f"{rounds * ROUND} histories, {reads} with a read-back, {left:.0f} s left",
                flush=True,
            )
    print(f"{rounds * ROUND} histories, {reads} with a read-back, none of them wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
