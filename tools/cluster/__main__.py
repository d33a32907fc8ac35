"""Command line: ``python -m tools.cluster up`` and ``python -m tools.cluster model FOLDER``."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from tools.cluster import Cluster, ClusterError, ClusterOptions, cluster, make_model

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The arguments; exit status 1 is a failed start, 2 a usage error, 130 an interrupted one."""
    top = argparse.ArgumentParser(prog="python -m tools.cluster", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start engines and keep them until Ctrl-C")
    up.add_argument("--prefill", type=int, default=1, help="prefill engines (default 1)")
    up.add_argument("--decode", type=int, default=1, help="decode engines (default 1)")
    up.add_argument("--tensor-parallel", type=int, default=1, help="ranks per engine (default 1)")
    up.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    up.add_argument("--model", type=Path, help="model folder (default: a tiny random one)")
    up.add_argument("--dtype", default="float32")
    up.add_argument("--max-model-len", type=int, default=8192, help="tokens (default 8192)")
    up.add_argument("--python", type=Path, default=Path(sys.executable), help="runs its vllm")
    up.add_argument("--no-bidirectional", action="store_true", help="no transfer from D to P")
    up.add_argument("--logs", type=Path, help="folder for the logs (default: a temporary one)")
    up.add_argument("--start-timeout", type=float, default=300.0, help="seconds (default 300)")
    model = commands.add_parser("model", help="write the tiny random model")
    model.add_argument("folder", type=Path)
    return top


def describe(running: Cluster) -> str:
    """Addresses, logs, and a request that can be pasted."""
    lines = ["", f"{'engine':<11} {'address':<24} {'side channel':<13} {'pid':<8} log"]
    for one in running.engines:
        lines.append(
            f"{one.name:<11} {one.url:<24} {one.side_channel_port:<13} {one.pid:<8} {one.log_path}"
        )
    target = (running.decode or running.prefill)[0]
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 16,
        "temperature": 0,
        "stream": True,
    }
    lines += [
        "",
        f"curl -N {target.url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}",
        "",
        "Ctrl-C ends all engines.",
    ]
    return "\n".join(lines)


def up(args: argparse.Namespace) -> None:
    """Keep a cluster until interrupted; raises ClusterError when an engine ends by itself."""
    options = ClusterOptions(
        model=args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        bidirectional=not args.no_bidirectional,
        start_timeout_s=args.start_timeout,
        python=args.python,
    )
    with cluster(
        prefill=args.prefill,
        decode=args.decode,
        tensor_parallel=args.tensor_parallel,
        device=args.device,
        options=options,
        log_folder=args.logs,
    ) as running:
        print(describe(running), flush=True)
        while True:
            for engine in running.engines:
                engine.process.check_alive()
            time.sleep(1)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    args = parser().parse_args(arguments)
    # SIGINT too: a process that a shell has started in the background ignores it by default.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        if args.command == "model":
            print(make_model(args.folder))
        else:
            up(args)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("all engines ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
