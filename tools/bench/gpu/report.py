"""Tables and charts of runs: `report.md`, and a folder of charts for each model and setting."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.charts import draw, draw_lines
from tools.bench.errors import BenchError
from tools.bench.figures import Bar, Bars, Figures, Gaps, Point, Series
from tools.bench.gpu.holding import Held
from tools.bench.gpu.rows import Row, from_json
from tools.bench.gpu.summary import (
    REQUIRED_AT,
    Summary,
    largest_excess,
    markdown,
    required,
    spread,
    summaries,
)

# How charts show an arm: in the colours of the benchmark's arm of that name, with this title.
_LOOKS = {
    "ours recompute": ("off", "recompute, ours"),
    "ours read_back": ("on", "read-back, ours"),
    "stock recompute": ("unlinked", "recompute, stock"),
    "stock read_back": ("stock", "read-back, stock"),
}
_NAME = re.compile(r"[^a-z0-9.]+")


@dataclass
class Section:
    """Runs of one model with the same settings: their sets may have run one after the other."""

    title: str
    about: dict[str, Any]
    ceilings: dict[str, float | None] | None
    rows: list[Row] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def slug(self) -> str:
        """Its folder of charts."""
        return _NAME.sub("-", self.title.lower()).strip("-")


def report(folders: Sequence[Path], to: Path) -> Path:
    """Write the report of all runs in these folders; returns its page. BenchError without any."""
    sections: dict[str, Section] = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*.json"))]:
        made = json.loads(path.read_text(encoding="utf-8"))
        if "gpu_profile" in made:
            _add(sections, made)
    if not sections:
        raise BenchError(
            "there are no results", file=", ".join(map(str, folders)), expected="MODEL.json of runs"
        )
    to.mkdir(parents=True, exist_ok=True)
    lines = ["# Read-back on GPUs", ""]
    for one in sections.values():
        lines += _page(one, _draw(one, to / one.slug))
    page = to / "report.md"
    page.write_text("\n".join(lines), encoding="utf-8")
    return page


def _add(sections: dict[str, Section], made: dict[str, Any]) -> None:
    about = made["about"]
    gpus = "P and D on two GPUs" if len(set(about["gpus"])) > 1 else "P and D on one GPU"
    words = [about["model"], gpus if about["device"] == "cuda" else "on a CPU"]
    words += ["D with graphs"] if about["decode_graphs"] else []
    words += ["slow transport"] if about["slow_transport"] else []
    # Before its other requests D has then kept turns of other lengths, for longer.
    words += ["conversations held"] if any(about.get("plan", {}).get("hold", ())) else []
    words += [" ".join(about["engine_args"])] if about["engine_args"] else []
    title = ", ".join(words)
    section = sections.setdefault(title, Section(title, about, made["ceilings"]))
    section.rows += map(from_json, made["rows"])
    section.held += [Held(**held) for held in made["holding"]]
    section.runs.append(about)


def _page(one: Section, charts: Iterable[str]) -> list[str]:
    lines = [f"## {one.title}", ""]
    lines += [f"![{name}]({one.slug}/{name}.svg)" for name in charts]
    lines += ["", *_about(one), "", "Medians, ms; range in brackets.", ""]
    lines += markdown(_summaries(one))
    if one.held:
        lines += ["", *_held_table(one.held)]
    found = largest_excess(one.rows) if one.about["slow_transport"] else []
    if any(row.length == REQUIRED_AT and row.counts for row in one.rows) and not found:
        found = required(one.rows)
    if found:
        lines += ["", "| required | | measured |", "|---|---|---|"]
        words = {True: "met", False: "**not met**", None: "not known"}
        lines += [f"| {line.what} | {words[line.met]} | {line.figures} |" for line in found]
    contacts = [row for row in one.rows if row.first_contact]
    if contacts:
        shown = ", ".join(
            f"{row.set_name} {row.prefill_ms:.0f} ms prefill ({row.length} tokens)"
            for row in contacts
        )
        lines += ["", f"The first read-back of all, in no median: {shown}."]
    failed = sum(bool(row.error) for row in one.rows)
    if failed:
        lines += ["", f"{failed} of {len(one.rows)} requests failed."]
    return [*lines, ""]


def _about(one: Section) -> list[str]:
    lines = []
    for about in one.runs:
        hardware = about["hardware"]
        gpus = "; ".join(hardware["gpus"]) or hardware["cpu"]
        versions = "; ".join(
            f"{name}: vllm {found['vllm']}, torch {found['torch']}, nixl {found['nixl']}"
            for name, found in about["versions"].items()
        )
        lines.append(f"- {gpus} — {versions} — `{about['command']}`")
    if one.ceilings:
        lines.append(f"- ceilings: {_ceilings(one.ceilings)}")
    if len(one.runs) > 1:
        lines.append("- Sets of different runs did not take turns.")
    return lines


def _ceilings(found: dict[str, float | None]) -> str:
    names = {
        "copy_gb_per_s": "copy within the GPU {:,.0f} GB/s (read and written)",
        "bfloat16_tflop_per_s": "matrices in bfloat16 {:,.0f} TFLOP/s",
        "fp8_tflop_per_s": "in FP8 {:,.0f} TFLOP/s",
    }
    return ", ".join(
        text.format(value) for name, text in names.items() if (value := found.get(name))
    )


def _held_table(held: Sequence[Held]) -> list[str]:
    lines = [
        "| held | set | ITL mean | p50 | p99 | engine CPU | API server CPU | KV in use |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in sorted(held, key=lambda one: (one.held, one.set_name)):
        note = "" if one.kept_all else " (expired meanwhile)"
        lines.append(
            f"| {one.held}{note} | {one.set_name} | {one.itl_mean_ms:.2f} ms | "
            f"{one.itl_p50_ms:.2f} | {one.itl_p99_ms:.2f} | {one.engine_cpu_percent:.0f} % | "
            f"{one.api_cpu_percent:.0f} % | {one.kv_usage:.0%} |"
        )
    return lines


def _summaries(one: Section) -> list[Summary]:
    return summaries(one.rows, one.about["shape"], one.ceilings, "fp8" in one.about["engine_args"])


def _draw(one: Section, folder: Path) -> list[str]:
    """Charts of a section; their names."""
    figures = Figures(
        ttft_by_prompt=_series(one.rows, lambda row: row.ttft_ms),
        prefill_split=_bars(_summaries(one)),
        ttft_by_turn=(),
        itl_while_held=_gaps(one.held),
        first_turns=(),
        table=(),
    )
    names = draw(figures, folder)
    pulls = _series(one.rows, lambda row: row.pull_ms)
    if pulls:
        draw_lines(folder, "pull", pulls, "Reading a conversation back", "pull (ms)")
        names.append("pull")
    return names


def _series(rows: Sequence[Row], value: Callable[[Row], float | None]) -> tuple[Series, ...]:
    made = []
    for arm, (look, title) in _LOOKS.items():
        points = []
        for length in sorted({row.length for row in rows}):
            found = spread(
                value(row) for row in rows if row.counts and row.arm == arm and row.length == length
            )
            if found is not None:
                points.append(Point(length, found.median, found.low, found.high, found.count))
        if points:
            made.append(Series(look, title, tuple(points)))
    return tuple(made)


def _bars(found: Sequence[Summary]) -> tuple[Bars, ...]:
    """Of recompute the first set's only: the sets compute alike."""
    plain = next((one.arm for one in found if one.arm.endswith("recompute")), "")
    made = []
    for arm in (plain, "stock read_back", "ours read_back"):
        bars = tuple(
            Bar(
                one.length,
                one.prefill.median,
                one.pull.median if one.pull else 0.0,
                one.checks.median if one.checks else 0.0,
                one.count,
            )
            for one in found
            if one.arm == arm
        )
        if bars:
            look = "off" if arm == plain else _LOOKS[arm][0]
            made.append(Bars(look, _LOOKS[arm][1], bars))
    return tuple(made)


def _gaps(held: Sequence[Held]) -> tuple[Gaps, ...]:
    looks = {"ours": _LOOKS["ours read_back"][0], "stock": _LOOKS["stock read_back"][0]}
    return tuple(
        Gaps(
            looks[one.set_name],
            one.set_name,
            one.held,
            one.itl_p50_ms,
            one.itl_p99_ms,
            one.itl_p99_ms,
            one.itl_count,
        )
        for one in sorted(held, key=lambda one: (one.set_name, one.held))
    )
