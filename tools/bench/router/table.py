"""The report: tables that read the same in a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.bench.router.arms import DIRECT
from tools.bench.router.figures import Memory, Rows, Span, Verdict, added, verdicts

# Of the yardstick; above this, figures of the same run are not of the same machine.
_MOST_SPREAD = 1.25
_LOADS = {
    "steps": "steps: all streams' events come at the same times, as an engine's steps have it.",
    "paced": "paced: each stream by a clock of its own, as if it were alone on its D.",
}


def report(data: Mapping[str, Any]) -> str:
    """Everything that a run's JSON says; see `run.as_json`."""
    settings, samples = data["settings"], data["samples"]
    saturated = samples.get("saturated")
    memory = Memory(**data["memory"]) if data["memory"] else None
    parts = [_title(data)]
    parts.append(
        f"{settings['concurrency']} streams at a time, {settings['chunks']} events each, "
        f"{settings['interval_ms']:g} ms apart; prompts of {settings['prompt_bytes']:,} bytes, "
        f"histories of {settings['turn_tokens']:,} tokens."
    )
    parts += [f"{_LOADS[kind]}\n\n" + _paced(samples[kind]) for kind in _LOADS if kind in samples]
    if saturated:
        parts.append("saturated: without pauses between events.\n\n" + _saturated(saturated))
    if memory is not None:
        parts.append(_memory(memory))
    parts.append(_required(verdicts(samples, memory, settings["concurrency"])))
    speed = _speed(samples)
    if speed is not None:
        parts.append(speed)
    parts.extend(data["warnings"])
    return "\n\n".join(parts) + "\n"


def _speed(samples: Mapping[str, Mapping[str, Rows]]) -> str | None:
    """How fast the machine was; None where a run has no such figures."""
    rows = [row for arms in samples.values() for found in arms.values() for row in found]
    found = [row["yardstick_ms"] for row in rows if row.get("yardstick_ms") is not None]
    if not found:
        return None
    low, high = min(found), max(found)
    said = f"Yardstick: a fixed piece of Python took {low:.2f}-{high:.2f} ms on the router's core."
    if high > _MOST_SPREAD * low:
        said += " The machine was not the same all the time: run it again when it is calm."
    return said


def _title(data: Mapping[str, Any]) -> str:
    about, hardware = data["versions"], data["hardware"]
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores; Python {about['python']}, "
        f"vllm {about['vllm']}; medians (lowest-highest) of {data['settings']['repeats']} "
        "repeat(s) in turns."
    )


def _paced(paced: Mapping[str, Rows]) -> str:
    head = [
        "",
        "first byte p50",
        "p99",
        "request p50",
        "p99",
        "CPU per stream",
        "core",
        "streams/s",
    ]
    keys = ("first_p50_ms", "first_p99_ms", "whole_p50_ms", "whole_p99_ms")
    rows = []
    for arm, found in paced.items():
        row = [arm]
        for key in keys:
            row.append(_span(_of(found, key), "ms"))
        row += [
            "-" if arm == DIRECT else _span(_of(found, "cpu_ms_per_stream"), "ms"),
            "-" if arm == DIRECT else _percent(_of(found, "router_core_share")),
            _span(_of(found, "streams_per_s"), "", 0),
        ]
        rows.append(row)
    if DIRECT in paced:
        for arm, found in paced.items():
            if arm != DIRECT:
                spans = [_span(added(found, paced[DIRECT], key), "ms") for key in keys]
                rows.append([f"{arm} adds", *spans, "", "", ""])
    return _table(head, rows)


def _saturated(saturated: Mapping[str, Rows]) -> str:
    head = ["", "streams/s", "CPU per stream", "router's core", "engines' and clients' core"]
    rows = []
    for arm, found in saturated.items():
        rows.append(
            [
                arm,
                _span(_of(found, "streams_per_s"), "", 0),
                "-" if arm == DIRECT else _span(_of(found, "cpu_ms_per_stream"), "ms"),
                "-" if arm == DIRECT else _percent(_of(found, "router_core_share")),
                _percent(_of(found, "load_core_share")),
            ]
        )
    return _table(head, rows)


def _memory(memory: Memory) -> str:
    return (
        f"Memory of ours: {memory.before_mb:.0f} MB at the start, {memory.after_mb:.0f} MB with "
        f"{memory.conversations:,} conversations of {memory.turn_tokens:,} tokens: "
        f"{memory.bytes_each:.0f} bytes each."
    )


def _required(found: Sequence[Verdict]) -> str:
    rows = [[one.what, one.required, one.found, "met" if one.met else "NOT MET"] for one in found]
    return _table(["", "required", "found", ""], rows)


def _of(rows: Rows, key: str) -> Span:
    return Span.of(row[key] for row in rows)


def _span(span: Span, unit: str, digits: int = 2) -> str:
    text = f"{span.median:.{digits}f}"
    if span.low != span.high:
        text += f" ({span.low:.{digits}f}-{span.high:.{digits}f})"
    return f"{text} {unit}".rstrip()


def _percent(span: Span) -> str:
    return f"{span.median:.0%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], rule, *lines[1:]])
