"""One summary of several runs: a table to read and a JSON to compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.topology.placement import TOPOLOGIES

Result = dict[str, Any]
_NONE = "-"


def report(folders: Sequence[Path], to: Path) -> str:
    """Write `summary.json` and `tables.md` to `to`, beside the runs' own files; the tables.

    Of several runs of one topology the last folder's counts. Raises ValueError without any run.
    """
    found = _found(folders)
    if not found:
        raise ValueError(
            f"no result in {', '.join(map(str, folders))}; expected files such as tp2.json, "
            "which `python -m tests.gpu.topology run` writes"
        )
    to.mkdir(parents=True, exist_ok=True)
    for name, result in found.items():
        target = to / f"{name}.json"
        target.write_text(result["text"], encoding="utf-8")
    results = [result["content"] for result in found.values()]
    text = "\n".join(tables(results)) + "\n"
    (to / "tables.md").write_text(text, encoding="utf-8")
    summary = json.dumps([_summary(one) for one in results], indent=1)
    (to / "summary.json").write_text(summary + "\n", encoding="utf-8")
    return text


def tables(results: Sequence[Result]) -> list[str]:
    """Markdown: environment, one row for each topology, load, and all checks that are wrong."""
    ran = [one for one in results if "counts" in one]
    lines = [*_environment(ran), ""]
    lines += _table(
        ("topology", "nodes", "verdict", "read = expected", "noise → limit", "checks above")
        + ("control found", "decisions", "ready, all s"),
        (_row(one) for one in results),
    )
    loads = [one for one in ran if "load" in one["figures"]]
    if loads:
        lines += ["", *_table(("load", "whole", "hits", "broken", "failed"), _load_rows(loads))]
    wrong = [f"- {one['topology']}: {problem}" for one in ran for problem in one["problems"]]
    return [*lines, *(["", "Wrong:", "", *wrong] if wrong else [])]


def _found(folders: Iterable[Path]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in TOPOLOGIES:
        for folder in folders:
            path = folder / f"{name}.json"
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                found[name] = {"text": text, "content": json.loads(text)}
    return found


def _summary(result: Result) -> Result:
    return {name: value for name, value in result.items() if name != "cases"}


def _environment(results: Sequence[Result]) -> list[str]:
    if not results:
        return ["Nothing was run."]
    about = results[0]["environment"]
    versions = ", ".join(f"{name} {value}" for name, value in about.items() if _plain(value))
    lines = [versions]
    for one in about.get("gpus", ()):
        lines.append(f"- {one}")
    if about.get("links"):
        lines += ["", "```", *about["links"], "```"]
    return lines


def _plain(value: object) -> bool:
    return isinstance(value, str)


def _row(result: Result) -> tuple[str, ...]:
    if "counts" not in result:
        return (result["topology"], _NONE, f"skipped: {result['skipped']}", *[_NONE] * 6)
    counts = result["counts"]
    decisions = result["figures"].get("decisions", {})
    total: dict[str, int] = {}
    for found in decisions.values():
        for name, count in found.items():
            total[name] = total.get(name, 0) + count
    return (
        result["topology"],
        "; ".join(_node(one) for one in result["nodes"]),
        "**wrong**" if result["problems"] else "right",
        f"{counts['as_expected']} of {counts['wanted']}, {counts['read']:,} tokens",
        f"{_figure(counts['largest_noise'])} → {_figure(counts['limit'])}",
        f"{counts['checks_above']} of {counts['checks']}, "
        f"largest {_figure(counts['largest_check'])}",
        f"{counts['controls_found']} of {counts['controls']}, "
        f"smallest {_figure(counts['smallest_control'])}",
        ", ".join(f"{name} {count}" for name, count in sorted(total.items())) or _NONE,
        f"{result.get('ready_s', _NONE)}, {result['seconds']}",
    )


def _node(node: dict[str, Any]) -> str:
    name = ("P" if node["role"] == "prefill" else "D") + str(node["index"])
    sizes = [
        f"{short}={node[key]}"
        for short, key in (("TP", "tensor_parallel"), ("DP", "data_parallel"))
        if node[key] > 1
    ]
    where = "+".join(map(str, node["gpus"]))
    return " ".join([name, *sizes, *([f"on {where}"] if where else [])])


def _load_rows(results: Iterable[Result]) -> Iterable[tuple[str, ...]]:
    for result in results:
        for phase, found in result["figures"]["load"].items():
            yield (
                f"{result['topology']}, {phase}",
                *(str(found.get(key, 0)) for key in ("whole", "hits", "broken", "failed")),
            )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _figure(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"
