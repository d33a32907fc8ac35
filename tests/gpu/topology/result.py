"""What one run leaves behind: a JSON file with every figure, and a few lines to read."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.gpu.compare import limit
from tests.gpu.measure import Measured
from tests.gpu.topology.findings import Findings
from tests.gpu.verdict import case_problems, rounded
from tools.cluster.options import Device

_PACKAGES = ("vllm", "torch", "nixl", "nixl-cu13", "triton", "transformers")


def environment(device: Device) -> dict[str, Any]:
    """Versions, and on GPUs their names, the driver and how they are linked."""
    found: dict[str, Any] = {name: _version(name) for name in _PACKAGES}
    if device == "cuda":
        query = "--query-gpu=name,driver_version,memory.total"
        found["gpus"] = _said("nvidia-smi", query, "--format=csv,noheader")
        found["links"] = _said("nvidia-smi", "topo", "-m")
    return found


def judged(findings: Findings, errors: Sequence[str]) -> dict[str, Any]:
    """Counts, verdicts and problems of all that was found; `problems` is empty if all is right."""
    problems = [f"{one.name}: {one.found}" for one in findings.checks if not one.right]
    problems += errors
    noise = [one for case in findings.cases for one in case.noise.values()]
    allowed = limit(noise) if noise else None
    if allowed is None:
        problems.append("no conversation was measured")
    else:
        problems += [one for case in findings.cases for one in case_problems(case, allowed)]
    if len(findings.cases) < findings.wanted:
        problems.append(f"{len(findings.cases)} of {findings.wanted} conversations were run")
    return {
        "counts": _counts(findings.cases, findings.wanted, allowed),
        "checks": [asdict(one) for one in findings.checks],
        "figures": findings.figures,
        "problems": problems,
    }


def as_json(result: dict[str, Any], cases: Sequence[Measured]) -> str:
    """`result` with the cases, one a line."""
    allowed = result["counts"]["limit"]
    rows = [
        {**asdict(one), "problems": case_problems(one, allowed) if allowed is not None else []}
        for one in cases
    ]
    lines = ",\n".join(json.dumps(rounded(row)) for row in rows)
    head = json.dumps(rounded(result), indent=1)[:-2]
    return head + f',\n "cases": [\n{lines}\n]\n}}\n'


def told(result: dict[str, Any]) -> list[str]:
    """For the terminal: every check, the counts, and what is wrong."""
    lines = [
        f"{'right' if one['right'] else 'WRONG'}  {one['name']}: {one['found']}"
        for one in result["checks"]
    ]
    lines.append(", ".join(f"{name} {value}" for name, value in result["counts"].items()))
    return [*lines, *(result["problems"] or ["nothing is wrong"])]


def _counts(cases: Sequence[Measured], wanted: int, allowed: float | None) -> dict[str, Any]:
    checks = [one.rms for case in cases for one in case.checks.values()]
    controls = [one.rms for case in cases for one in case.controls.values()]
    noise = [one.rms for case in cases for one in case.noise.values()]
    bound = 0.0 if allowed is None else allowed
    return {
        "conversations": len(cases),
        "wanted": wanted,
        "as_expected": sum(case.read == case.expected for case in cases),
        "read": sum(case.read for case in cases),
        "expected": sum(case.expected for case in cases),
        "largest_noise": max(noise, default=None),
        "limit": allowed,
        "checks": len(checks),
        "largest_check": max(checks, default=None),
        "checks_above": sum(not one <= bound for one in checks),
        "controls": len(controls),
        "smallest_control": min(controls, default=None),
        "controls_found": sum(one > bound for one in controls),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _said(*command: str) -> list[str]:
    text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    # nvidia-smi underlines its head for a terminal, also where there is none.
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return [line.rstrip() for line in plain.splitlines() if line.strip()]
