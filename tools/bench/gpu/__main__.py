"""Entry point of `python -m tools.bench.gpu`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.bench.command import EXIT_STATUS, ended
from tools.bench.errors import BenchError
from tools.bench.gpu.engines import Settings
from tools.bench.gpu.plan import Plan, SetName
from tools.bench.gpu.run import Run, device_of, profile
from tools.bench.model import find_model

_ABOUT = f"""What read-back costs and saves on this machine's GPUs, with stock beside it.

A set is a P and a D of one release: `ours` by --python, `stock` by --stock-python, which both run
vLLM 0.29.0 with bidirectional_kv_xfer. On a GPU all sets are up at the same time, and one request
is under way at a time: arms alternate request by request (--apart: set by set). Needs no network.
{EXIT_STATUS}
"""
_RUN = """examples:
  python -m tools.bench.gpu run --model qwen3-8b --stock-python STOCK/bin/python --out results/8b
  python -m tools.bench.gpu run --model qwen3-32b --stock-python STOCK/bin/python --apart \\
      --prefill-kv-gib 10 --decode-kv-gib 24 --out results/32b -- --quantization fp8
  python -m tools.bench.gpu run --model qwen3-8b --sets ours --slow-transport --out results/slow
  python -m tools.bench.gpu run --device cpu --model tiny --sets ours --lengths 512,1024 \\
      --repeats 1 --prefill-kv-gib 1 --decode-kv-gib 1 --hold '' --fragment 0 --out results/cpu
A Python may be a wrapper script; it must exec, so that the engine has the script's process id.
"""
_REPORT = """example:
  python -m tools.bench.gpu report results/8b results/32b --to report
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(given)

    def work() -> int:
        if args.command == "report":
            return _report(args)
        return profile(_run(args, "python -m tools.bench.gpu " + shlex.join(given)))

    return ended(work, "what was measured is in the JSON")


def _run(args: argparse.Namespace, command: str) -> Run:
    out = args.out.absolute()
    device = device_of(args.device)
    pythons = _pythons(args)
    hold = _numbers(args.hold)
    plan = Plan(
        lengths=_numbers(args.lengths),
        new_tokens=args.new_tokens,
        output_tokens=args.output_tokens,
        hold=hold,
        hold_tokens=args.hold_tokens,
        fragment=args.fragment,
        # What is read back is read at once; what is held has to stay while it is measured.
        ttl_s=args.ttl or (60.0 if any(hold) else 30.0),
    )
    if not plan.lengths and not hold:
        raise BenchError("nothing is to be measured", expected="--lengths or --hold")
    settings = Settings(
        model=find_model(args.model, out / "models"),
        pythons=pythons,
        device=device,
        max_model_len=-(-(plan.longest + 64) // 64) * 64,
        prefill_kv_gib=args.prefill_kv_gib,
        decode_kv_gib=args.decode_kv_gib,
        ttl_s=plan.ttl_s,
        gpus=tuple(args.gpus.split(",")),
        decode_graphs=args.decode_graphs,
        slow_transport=args.slow_transport,
        apart=args.apart,
        engine_args=tuple(args.engine_args),
        seed=args.seed,
    )
    return Run(settings, plan, args.repeats, out, command, args.deadline, _say)


def _report(args: argparse.Namespace) -> int:
    from tools.bench.gpu.report import report

    print(report(args.folders, args.to))
    return 0


def _pythons(args: argparse.Namespace) -> dict[SetName, Path]:
    """The sets that are wanted, in this order, with their interpreters."""
    found: dict[SetName, Path] = {}
    for name in filter(None, args.sets.split(",")):
        if name == "ours":
            found["ours"] = args.python
        elif name == "stock" and args.stock_python is not None:
            found["stock"] = args.stock_python
        else:
            raise BenchError(
                f"the set {name!r} cannot be run",
                expected="ours, and stock with --stock-python",
                found=args.sets,
            )
    if not found:
        raise BenchError("no set is to be run", expected="--sets ours,stock or one of them")
    return found


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(word) for word in text.split(",") if word.strip()}))
    except ValueError as error:
        raise BenchError("not numbers", expected="such as 2048,8192", found=text) from error


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tools.bench.gpu",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="measure, and write one JSON",
        description=_ABOUT,
        epilog=_RUN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--model", required=True, help="a shape such as qwen3-8b, tiny, or a folder")
    run.add_argument("--out", type=Path, required=True, help="folder for JSON and logs")
    run.add_argument("--python", type=Path, default=Path(sys.executable), help="runs our vllm")
    run.add_argument("--stock-python", type=Path, help="runs the base release's vllm")
    run.add_argument("--sets", default="ours,stock", help="default ours,stock")
    run.add_argument(
        "--apart",
        action="store_true",
        help="one set after the other: each has the GPU and the cores for itself, arms do not "
        "alternate between sets, and larger models fit",
    )
    run.add_argument(
        "--lengths", default="2048,8192,24576,30720", help="of the second prompt, tokens"
    )
    run.add_argument("--repeats", type=int, default=5)
    run.add_argument("--new-tokens", type=int, default=256, help="after the history (default 256)")
    run.add_argument("--output-tokens", type=int, default=48, help="of the first answer")
    run.add_argument("--prefill-kv-gib", type=int, default=7, help="KV cache of each P (default 7)")
    run.add_argument("--decode-kv-gib", type=int, default=16, help="KV cache of each D")
    run.add_argument("--decode-graphs", action="store_true", help="D decodes with CUDA graphs")
    run.add_argument("--hold", default="0,10,50", help="conversations that D keeps; '' for none")
    run.add_argument("--hold-tokens", type=int, default=1500, help="of each of them")
    run.add_argument(
        "--fragment", type=int, default=30, help="conversations that fragment the caches first"
    )
    run.add_argument(
        "--slow-transport",
        action="store_true",
        help="UCX has TCP only (UCX_TLS), so that reads are slow on any host",
    )
    run.add_argument("--ttl", type=float, help="seconds that D keeps a turn (default 30 or 60)")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument(
        "--deadline", type=float, default=540.0, help="s after which nothing new is begun"
    )
    run.add_argument("--gpus", default="0", help="0: P and D on one; 0,1: P on 0, D on 1")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("engine_args", nargs="*", help="after --: more arguments of vllm serve")
    report = commands.add_parser(
        "report",
        help="tables and charts of runs",
        description="Tables (report.md) and charts of what `run` has measured.",
        epilog=_REPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("folders", type=Path, nargs="+", help="--out of runs")
    report.add_argument("--to", type=Path, required=True, help="folder for the report")
    return top


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
