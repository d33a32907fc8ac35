"""The command line: arguments of each command, and the workload that they make."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.bench.arms import ARMS, DEFAULT, DEFAULT_CPU
from tools.bench.command import EXIT_STATUS
from tools.bench.model import SHAPES, TINY
from tools.bench.plan import Workload

DESCRIPTION = f"""Read-back off and on, on whatever hardware is at hand: run, measure, prove, draw.

`python -m tools.bench COMMAND --help` shows an example of each command.
{EXIT_STATUS}
"""
CPU = Workload(lengths=(512, 1024, 2048, 3072, 4096))
CUDA = Workload(
    lengths=(2048, 4096, 8192, 16384, 24576),
    new_tokens=256,
    output_tokens=48,
    first_tokens=2048,
    hold_tokens=4096,
    stream_tokens=256,
)


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, what: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=what,
            description=what,
            epilog=f"example:\n  python -m tools.bench {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    one = add(
        "run",
        "Start engines on this machine, run all arms in turns, and write the report.",
        "--arms off,on,single --lengths 512,1024,2048 --repeats 3",
    )
    _what_to_ask(one)
    one.add_argument(
        "--arms",
        help=f"some of {', '.join(ARMS)}, with commas (default {','.join(DEFAULT)}; on a CPU "
        f"{','.join(DEFAULT_CPU)})",
    )
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    one.add_argument("--tensor-parallel", type=int, default=1, help="ranks per engine (default 1)")
    one.add_argument("--backend", default="UCX", help="NIXL's: UCX or LIBFABRIC (default UCX)")
    one.add_argument("--python", type=Path, default=Path(sys.executable), help="runs its vllm")
    one.add_argument(
        "--engine-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument of each vllm serve, such as --engine-arg=--block-size=64",
    )

    two = add(
        "drive",
        "Measure one arm on servers that run already; the report is made of all arms' folders.",
        "--arm on --url http://router:8000 --prefill-url http://10.0.0.1:8100 \\\n"
        "      --model Qwen/Qwen3-32B --served-name qwen --tensor-parallel 8 --out results/on",
    )
    _what_to_ask(two)
    _where(two)
    two.add_argument(
        "--first-repeat", type=int, default=0, help="its number, when arms take turns (default 0)"
    )

    three = add(
        "report",
        "Join the logs with the records of results folders, prove, compare and draw.",
        "results/off results/on --to results/report",
    )
    three.add_argument("folders", type=Path, nargs="+", help="results folders")
    three.add_argument("--to", type=Path, help="default: report/ in the first folder")

    four = add("model", "Write a model of a released shape, without weights.", "qwen3-32b models")
    four.add_argument("name", choices=(TINY, *SHAPES))
    four.add_argument("folder", type=Path, help="its folder is made in this one")

    five = add(
        "base-prepare",
        "Write the input of the base release's multi-turn benchmark; print script and input.",
        "--length 2048 --out build/base",
    )
    five.add_argument("--length", type=int, required=True, help="tokens of the first prompt")
    five.add_argument("--turns", type=int, default=4, help="questions (default 4)")
    five.add_argument("--conversations", type=int, default=4, help="default 4")
    five.add_argument("--output-tokens", type=int, default=64, help="per answer (default 64)")
    five.add_argument("--out", type=Path, required=True)

    six = add(
        "base-records",
        "Take what the base release's multi-turn benchmark has measured into a results folder.",
        "stats.json --arm on --length 2048 --model Qwen/Qwen3-32B --out results/on",
    )
    six.add_argument("stats", type=Path, help="what it wrote with --stats-json-output")
    six.add_argument("--length", type=int, required=True, help="as in base-prepare")
    six.add_argument("--repeat", type=int, default=0, help="number of the repeat, from 0")
    six.add_argument("--out", type=Path, required=True, help="results folder")
    six.add_argument("--model", required=True, help="as in run")
    six.add_argument("--kv-bytes-per-token", type=int, help="as in run")
    _where(six)
    return top


def _what_to_ask(to: argparse.ArgumentParser) -> None:
    """Arguments of `run` and `drive` that make the workload."""
    to.add_argument("--out", type=Path, default=Path("build/bench"), help="results folder")
    to.add_argument("--fresh", action="store_true", help="forget results that are there")
    to.add_argument("--repeats", type=int, default=5, help="default 5; at least 3 show the spread")
    to.add_argument("--lengths", type=_numbers, help="prompt lengths in tokens, with commas")
    to.add_argument("--new-tokens", type=int, help="of each turn after the first")
    to.add_argument("--output-tokens", type=int, help="generated per turn, exactly")
    to.add_argument("--turns", type=int, help="of the growing conversation; 0 for none")
    to.add_argument("--first-tokens", type=int, help="of its first prompt")
    to.add_argument("--hold", type=int, help="conversations that D keeps beside a stream; 0: none")
    to.add_argument("--hold-tokens", type=int, help="of each of them")
    to.add_argument("--stream-tokens", type=int, help="of that stream")
    to.add_argument("--mutate", type=float, help="share of later turns whose history is changed")
    to.add_argument("--seed", type=int, help="of all prompts")
    to.add_argument("--model", help=f"{TINY}, {', '.join(SHAPES)}, a folder, or a name in HF_HOME")
    to.add_argument("--max-model-len", type=int, help="tokens (default: what is needed)")
    to.add_argument("--kv-bytes-per-token", type=int, help="default: of the model's configuration")
    to.add_argument("--trace", type=Path, help="Mooncake JSONL, or JSON like ShareGPT's")
    to.add_argument("--trace-limit", type=int, default=0, help="requests or conversations of it")
    to.add_argument("--time-scale", type=float, default=1.0, help="2: twice as fast; 0: no waiting")
    to.add_argument("--think", type=float, default=0.0, help="mean seconds before a user's message")
    to.add_argument("--tool-gap", type=float, default=0.0, help="and before a tool's")
    to.add_argument("--clients", type=int, default=1, help="conversations of a trace at a time")


def _where(to: argparse.ArgumentParser) -> None:
    """Arguments of the commands for servers that run already."""
    to.add_argument("--arm", choices=tuple(ARMS), required=True)
    to.add_argument("--url", default="http://localhost:8000", help="of the router")
    to.add_argument("--served-name", default="bench", help="model name in requests")
    to.add_argument("--prefill-url", default="", help="of P, to ask for its block size")
    to.add_argument("--block-size", type=int, help="tokens, where P cannot be asked")
    to.add_argument("--tensor-parallel", type=int, default=1, help="ranks of P (default 1)")
    to.add_argument("--note", default="", help="what the engines run on, in words")


def workload_of(args: argparse.Namespace, default: Workload) -> Workload:
    """The device's own sizes, with what is given in their place; a trace alone if one is given."""
    given = {
        "lengths": args.lengths,
        "new_tokens": args.new_tokens,
        "output_tokens": args.output_tokens,
        "turns": args.turns,
        "first_tokens": args.first_tokens,
        "hold_conversations": args.hold,
        "hold_tokens": args.hold_tokens,
        "stream_tokens": args.stream_tokens,
        "mutate_share": args.mutate,
        "seed": args.seed,
    }
    alone = {"lengths": (), "turns": 0, "hold_conversations": 0} if args.trace else {}
    chosen = {name: value for name, value in given.items() if value is not None}
    workload = Workload(**{**vars(default), **alone, **chosen})
    workload.check()
    return workload


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part]
    if not all(part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers with commas, found {text!r}")
    return tuple(int(part) for part in parts)
