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

from tests.connector.sim import Engine
from tests.connector.test_simulated import histories
from tools.cluster import make_model

ROUND = 60


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.connector.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="default 10")
    parser.add_argument("--seed", type=int, help="of the first round; default: a random one")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    seed = random.randrange(1 << 30) if args.seed is None else args.seed
    end, done, read, rounds = time.monotonic() + args.minutes * 60, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        while time.monotonic() < end:
            rng = random.Random(seed)
            options = {
                "prefix_caching": rng.random() < 0.5,
                "batched_tokens": rng.choice((64, 256, 512)),
                "threshold": rng.choice((0, 16, 64)),
                "policy": rng.choice(("fail", "recompute")),
            }
            p, d = Engine(model, "p", **options), Engine(model, "d", blocks=2000)
            try:
                for tokens, _ in histories(p, d, ROUND, seed):
                    done, read = done + 1, read + tokens
            except AssertionError as error:
                print(f"\nfailed with --seed {seed} {options}: {error}", file=sys.stderr)
                return 1
            seed, rounds = seed + 1, rounds + 1
            left = max(0.0, end - time.monotonic())
            print(f"{done} histories, {read} tokens read, {left:.0f} s left", flush=True)
    print(f"{done} histories in {rounds} rounds, {read} tokens read, none of them wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
