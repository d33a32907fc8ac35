"""Size of a proof, and what making and checking one costs beside what it saves.

The hash chain itself is vLLM's and is made for every request anyway; it is not counted.

example:
  python -m tests.connector.bench_proof
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable

from vllm.bidir.connector.proof import make_proof, parse_proof, verify

from tests.unit.connector.chain import chain

BLOCK = 16
MARK = "sha256:0123456789abcdef"
LENGTHS = (1024, 8192, 32768, 131072)
RUNS = 50


def milliseconds(call: Callable[[], object]) -> float:
    """Median of RUNS calls."""
    times = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        call()
        times.append((time.perf_counter() - begun) * 1000)
    return statistics.median(times)


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m tests.connector.bench_proof",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    rng = random.Random(0)
    print(f"{'tokens':>8}{'bytes':>8}{'make ms':>10}{'check ms':>10}{'diverged ms':>13}")
    for length in LENGTHS:
        tokens = [rng.randrange(150_000) for _ in range(length + 15)]
        hashes = chain(tokens, BLOCK)

        def make(tokens: list[int] = tokens, hashes: list[bytes] = hashes) -> dict[str, object]:
            proof = make_proof(MARK, BLOCK, hashes, tokens, len(tokens), len(tokens) - 500)
            assert proof is not None
            return proof.to_params()

        params = make()
        other = [b"x" * 32] * len(hashes)

        def check(
            hashes: list[bytes],
            tokens: list[int] = tokens,
            params: dict[str, object] = params,
        ) -> int:
            proof = parse_proof(params)
            assert proof is not None
            return verify(proof, MARK, BLOCK, hashes, tokens).tokens

        assert check(hashes) == len(tokens) and check(other) == 0
        size = len(json.dumps(params, separators=(",", ":")))
        print(
            f"{length:>8}{size:>8}{milliseconds(make):>10.3f}"
            f"{milliseconds(lambda: check(hashes)):>10.3f}"  # noqa: B023 - called at once
            f"{milliseconds(lambda: check(other)):>13.3f}"  # noqa: B023
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
