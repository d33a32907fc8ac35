"""Hold what the upstream tests did against what they do on the stock wheel."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.upstream.selection import Difference


@dataclass(frozen=True)
class Outcome:
    """What became of one upstream test: passed, failed, skipped or unfinished."""

    word: str
    seconds: float = 0.0
    text: str = ""


@dataclass(frozen=True)
class Ran:
    """All that one process did. `vllm` is the package's file; `ended` says how the process did."""

    outcomes: dict[str, Outcome]
    uncollected: dict[str, str]
    vllm: str
    version: str
    ended: str


def read_events(lines: Iterable[str], ended: str) -> Ran:
    """Fold the JSON lines of inside/upstream_report.py."""
    outcomes: dict[str, Outcome] = {}
    uncollected: dict[str, str] = {}
    vllm = version = ""
    for line in lines:
        event = json.loads(line)
        match event["event"]:
            case "vllm":
                vllm, version = event["file"], event["version"]
            case "uncollected":
                uncollected[event["id"]] = event["text"]
            case "start":
                outcomes[event["id"]] = Outcome("unfinished", text=ended)
            case phase:
                outcomes[event["id"]] = _fold(outcomes[event["id"]], phase, event)
    return Ran(outcomes, uncollected, vllm, version, ended)


def _fold(before: Outcome, phase: str, event: dict[str, str | float]) -> Outcome:
    seconds = before.seconds + float(event["seconds"])
    if before.word == "failed" or event["outcome"] == "failed":
        texts = (before.text if before.word == "failed" else "", str(event["text"]))
        return Outcome("failed", seconds, "\n".join(text for text in texts if text))
    if before.word == "skipped" or event["outcome"] == "skipped":
        return Outcome("skipped", seconds)
    if phase == "teardown":
        return Outcome("passed", seconds)
    return Outcome("unfinished", seconds, before.text)


def problems(
    file: str, stock: Sequence[str], ran: Ran, known: Sequence[Difference]
) -> tuple[str, ...]:
    """Each way in which a file's tests do other than on stock, apart from known differences."""
    if file in ran.uncollected:
        return (f"it cannot be imported\n{_indent(ran.uncollected[file])}",)
    excused = {difference.test for difference in known}
    found: list[str] = []
    missing: list[str] = []
    for test in stock:
        outcome = ran.outcomes.get(test)
        if outcome is not None and outcome.word == "passed":
            if test in excused:
                found.append(f"{test}: passes; take it out of expected.toml")
        elif test in excused and outcome is not None and outcome.word == "failed":
            continue
        elif outcome is None:
            missing.append(test)
        else:
            found.append(f"{test}: {outcome.word}\n{_indent(outcome.text)}")
    if missing:
        names = "\n".join(missing)
        found.append(f"not run; the process {ran.ended}\n{_indent(names)}")
    return tuple(found)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def list_problems(
    known: Sequence[Difference], stock: dict[str, list[str]], root: Path
) -> tuple[str, ...]:
    """What is wrong with the list of known differences itself. Twins are paths below `root`."""
    ids = {test for tests in stock.values() for test in tests}
    found = []
    for difference in known:
        if difference.test not in ids:
            found.append(f"{difference.test}: no such test passes on stock")
        if not difference.reason.strip():
            found.append(f"{difference.test}: has no reason")
        if not _exists(difference.twin, root):
            found.append(f"{difference.test}: its twin {difference.twin} does not exist")
    return tuple(found)


def _exists(twin: str, root: Path) -> bool:
    path, _, name = twin.partition("::")
    if not name or not (root / path).is_file():
        return False
    body: Sequence[ast.stmt] = ast.parse((root / path).read_text(encoding="utf-8")).body
    *classes, function = name.partition("[")[0].split("::")
    for wanted in classes:
        body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == wanted), [])
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return any(isinstance(node, kinds) and node.name == function for node in body)
