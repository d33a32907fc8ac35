"""From results folders to the report: join, prove, compare, draw."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.charts import draw
from tools.bench.collect import Run, collect, unjoined
from tools.bench.compare import warnings
from tools.bench.errors import BenchError
from tools.bench.figures import figures
from tools.bench.page import as_json, page, read_chart
from tools.bench.prove import Proof, prove


@dataclass(frozen=True)
class Report:
    """Where a report lies, and what it says in short. `holds`: no run has failed its proof."""

    page: Path
    proofs: tuple[Proof, ...]
    warnings: tuple[str, ...]
    unjoined: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return all(proof.holds for proof in self.proofs)


def report(folders: Sequence[Path], into: Path, command: str) -> Report:
    """Write the report of one or several results folders; BenchError if they cannot be used."""
    runs = _distinct([run for folder in folders for run in collect(folder)])
    proofs = [prove(run) for run in runs]
    told, lacking = warnings(runs, proofs), unjoined(runs)
    made = figures(runs)
    into.mkdir(parents=True, exist_ok=True)
    charts = {name: read_chart(into / f"{name}.svg") for name in draw(made, into)}
    data = made.as_json()
    for name in charts:
        text = json.dumps(data[name], indent=1) + "\n"
        (into / f"{name}.json").write_text(text, encoding="utf-8")
    (into / "report.json").write_text(
        as_json(made, runs, proofs, told, lacking, command), encoding="utf-8"
    )
    path = into / "report.html"
    path.write_text(page(made, runs, proofs, told, lacking, charts, command), encoding="utf-8")
    return Report(path, tuple(proofs), tuple(told), tuple(lacking))


def _distinct(runs: Sequence[Run]) -> list[Run]:
    names = [(run.arm, run.repeat) for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise BenchError(
                "two results folders have the same run",
                expected="each arm and repeat once",
                found=f"{name[0]}, repeat {name[1]}, twice",
                next_step="leave one of the folders out",
            )
    return list(runs)
