"""What it costs a decode engine to hold finished turns: cycles while it rests, and the next TTFT.

Two arms in one run: the stock base release and ours. Each starts one engine on the CPU, and
measures it first empty, then holding turns. "Engine" is EngineCore and worker, without the API
server.

example:
  python -m tools.bench.idle --seconds 30 --turns 10 --json idle.json
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench.cpu import shares
from tools.bench.stock import stock_tree
from tools.build.errors import BuildError
from tools.cluster import ClusterError, ClusterOptions, Engine, cluster
from tools.cluster.tokenizer import GENERATED_IDS

TURN_TOKENS = 500
HELD_S = 480
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One state of an engine: share of a core that it takes, and ms to a short answer (median)."""

    engine_share: float
    api_share: float
    answer_ms: float


def complete(engine: Engine, prompt: list[int], **more: Any) -> float:
    """One greedy completion; seconds until the whole answer is there."""
    body = {"model": engine.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}
    connection = http.client.HTTPConnection(engine.host, engine.port, timeout=120)
    begun = time.monotonic()
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ClusterError(f"{engine.name} answered {response.status}: {text[:500]!r}")
    return time.monotonic() - begun


def sample(engine: Engine, seconds: float, requests: int) -> Sample:
    """Rest first, then short requests with pauses, so that each finds a resting engine."""
    time.sleep(3)  # what start-up or the last request has left to do
    engine_share, api_share = shares(engine, seconds)
    times = []
    for number in range(requests):
        times.append(complete(engine, [GENERATED_IDS[number % len(GENERATED_IDS)]] * 8))
        time.sleep(0.05)
    return Sample(engine_share, api_share, statistics.median(times) * 1000)


def hold(engine: Engine, turns: int) -> None:
    """Finish turns that the engine keeps: as a decode node does that served a prompt alone."""
    rng = random.Random(1)
    for _ in range(turns):
        prompt = rng.choices(GENERATED_IDS, k=TURN_TOKENS)
        params = {"do_remote_prefill": False, "do_remote_decode": False, "readback": 1}
        complete(engine, prompt, max_tokens=8, kv_transfer_params=params)


def measure(
    env: dict[str, str], folder: Path, turns: int, seconds: float, requests: int, say: Say
) -> dict[str, Sample]:
    """Start an engine, sample it empty and holding."""
    options = ClusterOptions(
        env=env, kv_connector_extra_config={"decoder_kv_blocks_ttl": HELD_S}, max_model_len=2048
    )
    with cluster(prefill=0, decode=1, options=options, log_folder=folder, report=say) as running:
        (engine,) = running.engines
        complete(engine, [GENERATED_IDS[0]] * 8)
        say(f"empty: {seconds:.0f} s at rest, {requests} requests")
        empty = sample(engine, seconds, requests)
        hold(engine, turns)
        say(f"holding {turns} turns: {seconds:.0f} s at rest, {requests} requests")
        return {"empty": empty, "holding": sample(engine, seconds, requests)}


def table(arms: dict[str, dict[str, Sample]]) -> str:
    """One row per arm and state, and what holding adds."""
    lines = [f"{'':8}{'':10}{'engine':>12}{'API server':>12}{'answer':>12}"]
    for arm, states in arms.items():
        for state, found in states.items():
            lines.append(
                f"{arm:8}{state:10}{found.engine_share:11.1%} {found.api_share:11.1%} "
                f"{found.answer_ms:8.1f} ms"
            )
        empty, holding = states["empty"], states["holding"]
        lines.append(
            f"{arm:8}{'adds':10}{holding.engine_share - empty.engine_share:11.1%} "
            f"{holding.api_share - empty.api_share:11.1%} "
            f"{holding.answer_ms - empty.answer_ms:8.1f} ms"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.idle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of rest (default 30)")
    parser.add_argument("--turns", type=int, default=10, help="held turns (default 10)")
    parser.add_argument("--requests", type=int, default=100, help="short ones (default 100)")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    args = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    arms: dict[str, dict[str, Sample]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-idle-") as scratch:
        try:
            stock = stock_tree("cpu", Path(scratch) / "stock", say)
            for arm, env in (("stock", {"PYTHONPATH": str(stock)}), ("ours", {})):
                say(f"{arm}: starting")
                folder = Path(scratch) / arm / "logs"
                arms[arm] = measure(env, folder, args.turns, args.seconds, args.requests, say)
        except (BuildError, ClusterError) as error:
            print(error, file=sys.stderr)
            return 1
    print(table(arms))
    if args.json:
        data = {
            arm: {state: asdict(found) for state, found in states.items()}
            for arm, states in arms.items()
        }
        args.json.write_text(json.dumps({"turns": args.turns, "arms": data}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
