"""What a run was made with: versions, hardware, and the exact command lines."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.errors import BenchError

_PACKAGES = ("vllm", "torch", "nixl", "transformers")
_ASK_VERSIONS = (
    "import json, sys; from importlib.metadata import version, PackageNotFoundError\n"
    "def of(name):\n"
    "    try:\n        return version(name)\n"
    "    except PackageNotFoundError:\n        return None\n"
    "print(json.dumps({'python': sys.version.split()[0], **{n: of(n) for n in sys.argv[1:]}}))"
)


def versions(python: Path) -> dict[str, str | None]:
    """Versions of what that interpreter runs; None for what it has not got."""
    command = [str(python), "-c", _ASK_VERSIONS, *_PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        found: dict[str, str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BenchError(
            "versions cannot be asked for", file=python, expected="a Python", found=error
        ) from error
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores that may be used, memory, GPUs, kernel."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpus(),
        "kernel": platform.release(),
    }


def gpus() -> list[str]:
    """Name, memory in MiB and driver of each GPU; none where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores' time that is taken, over so many seconds: 0 is a machine at rest."""

    def read() -> tuple[int, int]:
        line = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
        user, nice, system, idle, waiting, *rest = map(int, line.split()[1:9])
        return user + nice + system + sum(rest), idle + waiting

    busy, idle = read()
    time.sleep(seconds)
    more_busy, more_idle = read()
    passed = (more_busy - busy) + (more_idle - idle)
    return round((more_busy - busy) / passed, 3) if passed else 0.0


def connectors(command: tuple[str, ...]) -> dict[str, Any]:
    """What an engine's command line says about KV transfer; empty when it has no connector."""
    if "--kv-transfer-config" not in command:
        return {}
    config: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    extra: Mapping[str, Any] = config.get("kv_connector_extra_config", {})
    return {
        "kv_connector": config.get("kv_connector"),
        "kv_role": config.get("kv_role"),
        **extra,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()
