"""What the GPU itself can do: copying within its memory, and multiplying matrices.

Run as a script by the interpreter that has torch; it imports nothing of this repository. Prints one
JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COPY_BYTES = 4 * 10**9
_SIDE = 8192
_REPEATS = 10


def measured(torch: Any, work: Callable[[], object]) -> float:
    """Seconds on the GPU, median, after two that do not count."""
    times: list[float] = []
    for number in range(_REPEATS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _copying(torch: Any) -> float:
    """Seconds of a copy; its memory is free again afterwards."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return measured(torch, lambda: target.copy_(source))


def measure() -> dict[str, float | None]:
    """Copy in GB/s (bytes read and written, 4 GB), products of 8,192² matrices in TFLOP/s."""
    import torch

    copy_s = _copying(torch)
    one = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda")
    flops = 2.0 * _SIDE**3
    found: dict[str, float | None] = {
        "copy_gb_per_s": round(2 * _COPY_BYTES / copy_s / 1e9, 1),
        "bfloat16_tflop_per_s": round(flops / measured(torch, lambda: one @ one) / 1e12, 1),
        "fp8_tflop_per_s": None,
    }
    try:
        scale = torch.ones((), device="cuda")
        left = one.to(torch.float8_e4m3fn)
        right = left.t().contiguous().t()
        eight = measured(
            torch,
            lambda: torch._scaled_mm(
                left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
            ),
        )
        found["fp8_tflop_per_s"] = round(flops / eight / 1e12, 1)
    except (AttributeError, RuntimeError, TypeError) as error:
        # Cards before Ada have no such product; then there is only the other rate.
        print(f"no FP8 rate: {error}", file=sys.stderr)
    return found


def ask(python: Path, gpu: str) -> dict[str, float | None] | None:
    """The ceilings by that interpreter, on that GPU; None if it cannot say."""
    # Else the modules beside this one would hide others of their names.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "PYTHONSAFEPATH": "1"}
    command = [str(python), __file__]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True, timeout=120
        )
        found: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        told = getattr(error, "stderr", "") or ""
        print(f"ceilings were not measured: {error} {told[-500:]}", file=sys.stderr, flush=True)
        return None
    return found


if __name__ == "__main__":
    print(json.dumps(measure()))
