"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from tools.bench.arms import ARMS
from tools.bench.collect import Run
from tools.bench.figures import Figures, Row, Series
from tools.bench.prove import Proof

_CAPTIONS = {
    "ttft_by_prompt": "Each prompt is the second turn of a conversation of its own: the first "
    "turn, its live reply, and {new_tokens} new tokens, together exactly the length given.",
    "prefill_split": "Prefill: from sending the request to P until P's answer, as the router "
    "timed it. KV transfer, hold and confirm: as P measured them, for the same request.",
    "ttft_by_turn": "Turns whose history was only appended to. Off computes the whole history "
    "again each time; the first turn has none.",
    "itl_while_held": "The same stream of {stream_tokens} tokens, before and after conversations "
    "of {hold_tokens} tokens have finished on D. With the feature on D keeps them.",
}
_STYLE = """
body { font: 16px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #111; background: #fff; }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem }
th, td { border-bottom: 1px solid #bbb; padding: 0.25rem 0.6rem; text-align: right }
th:first-child, td:first-child, .text th, .text td { text-align: left }
.warning { border: 2px solid #D55E00; padding: 0.5rem 1rem; margin: 1rem 0 }
.proof { border: 2px solid #0072B2; padding: 0.5rem 1rem; margin: 1rem 0 }
figure { margin: 1rem 0 } figure svg { width: 100%; height: auto }
figcaption, .small { font-size: 0.85rem; color: #333 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.8rem; background: #f4f4f4;
  padding: 0.6rem }
.wide { overflow-x: auto }
@media print { body { max-width: none; margin: 0 } figure, table { break-inside: avoid }
  details > * { display: block } }
"""


def page(
    figures: Figures,
    runs: Sequence[Run],
    proofs: Sequence[Proof],
    warnings: Sequence[str],
    unjoined: Sequence[str],
    charts: Mapping[str, str],
    command: str,
) -> str:
    """The HTML text. `charts` are SVG texts by name; `command` made the runs."""
    first = runs[0].about
    parts = [
        f"<h1>Read-back off and on: {escape(str(first['model_name']))}</h1>",
        f"<p>{escape(_summary(figures, first))}</p>",
        _box("warning", "Before you compare", warnings),
        _proofs(proofs),
        *(_figure(name, svg, first["workload"]) for name, svg in charts.items()),
        "<h2>Medians by prompt length</h2>",
        _table(figures.table),
        '<p class="small">Ratios: off ÷ this arm; above 1 is faster than off. “read” and '
        "“computed” are prompt tokens of the prefill node.</p>",
        _first_turns(figures.first_turns),
        "<h2>What ran</h2>",
        _arms(runs),
        "<h2>Machine and versions</h2>",
        _machine(runs),
        "<h2>Configuration</h2>",
        f"<pre>{escape(command)}</pre>",
        f"<pre>{escape(json.dumps(first['workload'], indent=1))}</pre>",
        *(_commands(run) for run in _one_of_each(runs)),
        _unjoined(unjoined, runs),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Read-back off and on</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def read_chart(path: Path) -> str:
    """An SVG file as part of a page: without what stands before its root element."""
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def _summary(figures: Figures, about: Mapping[str, Any]) -> str:
    rows = [row for row in figures.table if row.arm == "on" and row.ttft_ratio]
    if not rows:
        return "There are no two arms to compare at the same prompt length."
    first, last = rows[0], rows[-1]
    off = {row.prompt_tokens: row for row in figures.table if row.arm == "off"}
    return (
        f"From {first.prompt_tokens} to {last.prompt_tokens} prompt tokens, TTFT went from "
        f"{off[first.prompt_tokens].ttft_ms:.0f} to {off[last.prompt_tokens].ttft_ms:.0f} ms with "
        f"read-back off, and from {first.ttft_ms:.0f} to {last.ttft_ms:.0f} ms with it on "
        f"(medians of {last.count}). {_alone(figures)}Device: {about['device']}. Figures of a run "
        "compare arms of that run; they say nothing about other hardware."
    )


def _alone(figures: Figures) -> str:
    """What the engines of "on" do without reading back, if that was measured."""
    rows = [row for row in figures.table if row.arm == "unlinked"]
    if not rows:
        return ""
    return (
        f"The engines of on, without reading back: from {rows[0].ttft_ms:.0f} to "
        f"{rows[-1].ttft_ms:.0f} ms. "
    )


def _box(kind: str, title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="{kind}"><strong>{escape(title)}</strong><ul>{items}</ul></div>'


def _proofs(proofs: Sequence[Proof]) -> str:
    lines = [_proof(proof) for proof in proofs if ARMS[proof.arm].must_move]
    return _box("proof", "Proof that KV was moved", lines)


def _proof(proof: Proof) -> str:
    verdict = "holds" if proof.holds else "FAILED: " + "; ".join(proof.problems[:2])
    return (
        f"{proof.arm}, repeat {proof.repeat}: {proof.reads} of {proof.requests} requests read "
        f"{proof.tokens_read} tokens, {proof.bytes_moved / 1e6:.1f} MB, at "
        f"{proof.bytes_per_token} bytes per token and within one block of {proof.block_tokens} "
        f"tokens per request: {verdict}"
    )


def _figure(name: str, svg: str, workload: Mapping[str, Any]) -> str:
    caption = escape(_CAPTIONS[name].format(**workload))
    return f'<figure id="{name}">{svg}<figcaption>{caption}</figcaption></figure>'


def _table(rows: Iterable[Row]) -> str:
    head = "prompt,arm,TTFT ms,ratio,prefill ms,ratio,KV transfer ms,read,computed,MB moved,n"
    lines = [
        (
            str(row.prompt_tokens),
            row.title,
            _number(row.ttft_ms),
            _number(row.ttft_ratio, 2),
            _number(row.prefill_ms),
            _number(row.prefill_ratio, 2),
            _number(row.transfer_ms),
            _number(row.tokens_read, 0),
            _number(row.tokens_computed, 0),
            _number(row.megabytes),
            str(row.count),
        )
        for row in rows
    ]
    return _html_table(head.split(","), lines)


def _first_turns(series: Sequence[Series]) -> str:
    if not series:
        return ""
    lengths = sorted({point.x for one in series for point in one.points})
    rows = []
    for one in series:
        by_length = {point.x: point.median for point in one.points}
        rows.append((one.title, *(_number(by_length.get(length)) for length in lengths)))
    return (
        "<h2>First turns, a control</h2>"
        + _html_table(("TTFT ms", *(f"{length:.0f}" for length in lengths)), rows)
        + '<p class="small">By prompt length, medians. There is nothing to read back: what differs '
        "here differs for other reasons, such as threads of the transfer library that spin in one "
        "arm and wait in another.</p>"
    )


def _arms(runs: Sequence[Run]) -> str:
    lines = []
    for run in _one_of_each(runs):
        arm = ARMS[run.arm]
        told = "; ".join(
            f"{name}: {_settings(settings)}" for name, settings in run.about["connectors"].items()
        )
        repeats = sum(other.arm == run.arm for other in runs)
        lines.append((arm.title, arm.what, arm.front, told or "not known", str(repeats)))
    head = ("arm", "what it is", "front", "connectors", "repeats")
    return _html_table(head, lines, "text")


def _machine(runs: Sequence[Run]) -> str:
    about = runs[0].about
    hardware = about["hardware"]
    rows = [
        ("device", about["device"]),
        ("processor", f"{hardware['cpu']}, {hardware['cores']} cores"),
        ("memory", f"{hardware['memory_gib']} GiB"),
        ("GPUs", "; ".join(hardware["gpus"]) or "none"),
        ("kernel", hardware["kernel"]),
        *((name, value or "not installed") for name, value in about["versions"].items()),
        ("model", f"{about['model_name']}, {about['dtype']}"),
        ("KV", f"{about['kv_bytes_per_token']} bytes per token, blocks of {about['block_size']}"),
        ("tensor parallelism", about["tensor_parallel"]),
        (
            "taken by others before each run",
            ", ".join(f"{run.about['sessions'][0]['busy_share']:.0%}" for run in runs),
        ),
    ]
    return _html_table(("", ""), [(name, str(value)) for name, value in rows], "text")


def _commands(run: Run) -> str:
    lines = []
    session = run.about["sessions"][-1]
    for name, command in session["commands"].items():
        env = session["environment"].get(name, {})
        settings = [f"{key}={value}" for key, value in sorted(env.items())]
        lines.append(f"# {name}\n" + " ".join([*settings, shlex.join(command)]))
    text = escape("\n\n".join(lines) or "started by hand: see their own logs")
    return f"<details><summary>{escape(run.arm)}: commands</summary><pre>{text}</pre></details>"


def _unjoined(lines: Sequence[str], runs: Sequence[Run]) -> str:
    total = sum(len(run.joined) for run in runs)
    if not lines:
        return f'<p class="small">All {total} requests were joined with the logs.</p>'
    shown = "\n".join(lines)
    return (
        f"<details><summary>{len(lines)} of {total} requests could not be joined</summary>"
        f"<pre>{escape(shown)}</pre></details>"
    )


def _one_of_each(runs: Sequence[Run]) -> list[Run]:
    return list({run.arm: run for run in reversed(runs)}.values())[::-1]


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return "no connector"
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items())


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"  # noqa: RUF001  # as a printed table


def as_json(
    figures: Figures,
    runs: Sequence[Run],
    proofs: Sequence[Proof],
    warnings: Sequence[str],
    unjoined: Sequence[str],
    command: str,
) -> str:
    """Everything that the page says, for programs."""
    return (
        json.dumps(
            {
                "command": command,
                "warnings": list(warnings),
                "proofs": [{**asdict(proof), "holds": proof.holds} for proof in proofs],
                "figures": figures.as_json(),
                "unjoined": list(unjoined),
                "runs": [dict(run.about) for run in runs],
            },
            indent=1,
        )
        + "\n"
    )
