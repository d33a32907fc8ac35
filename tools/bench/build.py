"""How long a build takes, and how much memory, against unpacking and repacking with `wheel`.

Both start from the same cached base release. A build also patches, relabels and proves; the
repack only unpacks and packs.

example:
  python -m tools.bench.build --device cuda --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.build.errors import BuildError
from tools.build.fetch import fetch
from tools.build.pins import DEVICES
from tools.build.pipeline import Checkout, Options, select

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Run:
    """One command: wall seconds, and peak resident memory of its largest process in MB."""

    seconds: float
    peak_mb: float


def timed(command: Sequence[str], env: dict[str, str]) -> Run:
    """Run a command to its end; RuntimeError if it fails."""
    begun = time.monotonic()
    pid = os.posix_spawn(
        command[0],
        list(command),
        env,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # stderr stays: a command that fails says why
    _, status, usage = os.wait4(pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{' '.join(command)} ended with {code}")
    # ru_maxrss is in kilobytes on Linux (getrusage(2)).
    return Run(time.monotonic() - begun, usage.ru_maxrss / 1024)


def measure(base: Path, options: Options, scratch: Path) -> dict[str, Run]:
    """Build and repack once each."""
    # make exports variables that are not set as empty ones, which `wheel` takes for values.
    set_ones = {name: value for name, value in os.environ.items() if value}
    env = {**set_ones, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    out = scratch / "dist"
    build = timed(
        [
            *(sys.executable, "-m", "tools.build", "wheel", "--device", options.device),
            *("--arch", options.arch, "--upstream-wheel", str(base), "--out", str(out)),
        ],
        env,
    )
    unpacked = scratch / "unpacked"
    unpack = timed([sys.executable, "-m", "wheel", "unpack", "-d", str(unpacked), str(base)], env)
    (tree,) = unpacked.iterdir()
    pack = timed([sys.executable, "-m", "wheel", "pack", "-d", str(scratch), str(tree)], env)
    repack = Run(unpack.seconds + pack.seconds, max(unpack.peak_mb, pack.peak_mb))
    return {"build": build, "repack": repack}


def table(rows: dict[str, list[Run]]) -> str:
    """Medians per command, and the ratio of the two."""
    lines = [f"{'':14}{'wall s':>10}{'peak MB':>10}"]
    medians = {}
    for name, runs in rows.items():
        seconds = statistics.median(run.seconds for run in runs)
        peak = max(run.peak_mb for run in runs)
        medians[name] = seconds
        lines.append(f"{name:14}{seconds:10.1f}{peak:10.0f}")
    lines.append(f"{'build/repack':14}{medians['build'] / medians['repack']:10.2f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=DEVICES, default=os.environ.get("DEVICE", "cuda"))
    parser.add_argument("--runs", type=int, default=1, help="repetitions, alternating (default 1)")
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    args = parser.parse_args()
    checkout = Checkout(ROOT)
    options = replace(Options.from_environment(os.environ, Path("dist")), device=args.device)
    try:
        pins, base, _ = select(checkout, options)
        path = fetch(pins, base, options.cache, options.upstream_wheel, print)
    except BuildError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows: dict[str, list[Run]] = {"build": [], "repack": []}
    for number in range(args.runs):
        print(f"run {number + 1} of {args.runs}: {base.file}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            for name, run in measure(path, options, Path(scratch)).items():
                rows[name].append(run)
    print(table(rows))
    if args.json:
        data = {name: [asdict(run) for run in runs] for name, runs in rows.items()}
        args.json.write_text(json.dumps({"base": base.file, "runs": data}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
