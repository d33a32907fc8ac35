"""From what was found to problems, a file, and one table for several runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.compare import Difference
from tests.gpu.measure import Measured
from tests.gpu.topology import __main__ as command
from tests.gpu.topology.findings import Findings
from tests.gpu.topology.report import report, tables
from tests.gpu.topology.result import as_json, judged, told

SMALL, LARGE = Difference(20, 0.2, 0.1), Difference(3, 4.0, 2.0)
RIGHT = Measured(
    name="append",
    prompt=840,
    block=16,
    read=739,
    expected=739,
    checks={"read_back": SMALL, "decode": SMALL},
    noise={"two_pieces": Difference(20, 0.24, 0.12)},
    controls={"another_block": LARGE},
)


def found(*cases: Measured) -> Findings:
    return Findings(len(cases), list(cases), figures={"decisions": {"prefill-0": {"read": 1}}})


def result(findings: Findings) -> dict[str, Any]:
    node = {"role": "prefill", "index": 0, "tensor_parallel": 2, "data_parallel": 1, "gpus": [0, 1]}
    about = {"vllm": "0.29.0", "gpus": ["NVIDIA H200"], "links": ["GPU0 GPU1", "X NV18"]}
    return {
        "topology": "tp2",
        "nodes": [node],
        "environment": about,
        "seconds": 90.5,
        **judged(findings, []),
    }


def test_a_right_run_has_no_problems_and_its_counts() -> None:
    good = judged(found(RIGHT), [])
    assert good["problems"] == []
    assert good["counts"]["as_expected"] == good["counts"]["controls_found"] == 1
    assert (good["counts"]["checks"], good["counts"]["checks_above"]) == (2, 0)
    assert good["counts"]["limit"] == pytest.approx(0.18)


def test_whatever_is_wrong_is_a_problem() -> None:
    wrong = found(RIGHT, replace(RIGHT, read=0), replace(RIGHT, checks={"decode": LARGE}))
    wrong.wanted = 4
    wrong.equal("leases renewed", 2, 3)
    wrong.equal("leases given back", 3, 3)
    problems = judged(wrong, ["an engine died"])["problems"]
    assert len(problems) == 5
    assert problems[0] == "leases renewed: 2, expected 3" and problems[1] == "an engine died"
    assert any("read 0 tokens" in one for one in problems)
    assert any("decode differs" in one for one in problems)
    assert "3 of 4 conversations were run" in problems


def test_a_turn_that_d_has_lost_is_a_problem() -> None:
    (problem,) = judged(found(replace(RIGHT, stranded=1)), [])["problems"]
    assert "lost 1 turns" in problem


def test_without_a_conversation_nothing_is_right() -> None:
    empty = judged(Findings(), [])
    assert empty["problems"] == ["no conversation was measured"]
    assert json.loads(as_json(result(Findings()), []))["cases"] == []


def test_the_file_holds_every_case_and_the_terminal_every_check() -> None:
    findings = found(RIGHT)
    findings.check("every rank serves", True, "leases by rank: {0: 4, 1: 4}")
    whole = result(findings)
    assert json.loads(as_json(whole, findings.cases))["cases"][0]["name"] == "append"
    lines = told(whole)
    assert lines[0] == "right  every rank serves: leases by rank: {0: 4, 1: 4}"
    assert lines[-1] == "nothing is wrong"


def test_several_runs_make_one_table(tmp_path: Path) -> None:
    findings = found(RIGHT)
    whole = result(findings)
    whole["figures"]["load"] = {"one P killed": {"whole": 30, "hits": 20}}
    (tmp_path / "tp2.json").write_text(as_json(whole, findings.cases))
    skip = {"topology": "dp2", "skipped": "dp2 needs 2 GPUs, found 1"}
    (tmp_path / "dp2.json").write_text(json.dumps(skip))
    text = report([tmp_path], tmp_path / "to")
    assert "- NVIDIA H200" in text and "X NV18" in text
    assert "| tp2 | P0 TP=2 on 0+1 | right | 1 of 1, 739 tokens | 0.12 → 0.18 |" in text
    assert "| dp2 | - | skipped: dp2 needs 2 GPUs, found 1 |" in text
    assert "| tp2, one P killed | 30 | 20 | 0 | 0 |" in text
    assert "Wrong:" not in text
    summary = json.loads((tmp_path / "to" / "summary.json").read_text())
    assert [one["topology"] for one in summary] == ["tp2", "dp2"]
    assert not any("cases" in one for one in summary)
    assert (tmp_path / "to" / "tp2.json").read_text() == (tmp_path / "tp2.json").read_text()


def test_what_is_wrong_stands_below_the_table() -> None:
    lines = tables([result(found(replace(RIGHT, read=0)))])
    assert lines[-1] == "- tp2: append: read 0 tokens, expected 739"
    assert "**wrong**" in "\n".join(lines)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected files such as tp2\.json"):
        report([tmp_path], tmp_path)


def test_too_few_gpus_are_a_reason_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", "tp2", "--gpus", "0", "--out", str(tmp_path)]) == 0
    assert "skipped: tp2 needs 2 GPUs, found 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "tp2.json").read_text())["skipped"]


def test_a_plan_says_where_each_node_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["plan", "--gpus", "0,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tp2: prefill-0 on 0+1, decode-0 on 0+1 (shared)" in lines
    assert "nvlink: prefill-0 on 0, decode-0 on 1" in lines


def test_arguments_of_engines_come_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["run", "tp2", "--out", "x", "--model", "dense"]
    options = command._arguments([*given, "--", "--block-size", "128"])
    assert (options.model, options.engine_args) == ("dense", ["--block-size", "128"])
    assert command._arguments(given).engine_args == []
    with pytest.raises(SystemExit):
        command._arguments(["plan", "--", "--block-size", "128"])
    assert "only run takes arguments of vllm serve" in capsys.readouterr().err


def test_what_a_command_says_is_kept_without_its_colours() -> None:
    from tests.gpu.topology.result import _said

    assert _said("printf", "\\033[4mGPU0\\033[0m  \\n\\nNV18\\n") == ["GPU0", "NV18"]
