"""Resident memory of a process, as /proc tells."""

from __future__ import annotations

from pathlib import Path


def resident_mb(pid: int) -> float:
    """Resident set of a process in MB (10**6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            # In kB of 1,024 bytes (proc(5)).
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
