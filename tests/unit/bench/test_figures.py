"""The figures, and the page around them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from tests.unit.bench.made import computed, pairs, read, run
from tools.bench.collect import Run
from tools.bench.figures import figures
from tools.bench.page import as_json, page
from tools.bench.prove import prove


def test_ttft_by_prompt_has_median_and_spread_of_each_arm() -> None:
    off, on = figures(pairs()).ttft_by_prompt
    assert (off.arm, on.arm) == ("off", "on")
    point = off.points[1]
    assert (point.x, point.median, point.low, point.high, point.count) == (700, 351, 350, 352, 3)
    assert [point.median for point in on.points] == [61, 61]


def test_the_on_bar_is_split_and_its_parts_make_the_whole() -> None:
    off, on = figures(pairs()).prefill_split
    (_, bar) = on.bars
    assert (bar.prefill, bar.transfer, bar.checks, bar.compute) == (40.0, 8.0, 1.5, 30.5)
    (_, plain) = off.bars
    assert (plain.prefill, plain.transfer, plain.compute) == (90.0, 0.0, 90.0)


def test_first_turns_and_changed_histories_are_kept_out_of_the_curves() -> None:
    runs = [
        run(
            "on",
            read(650, turn=1, ttft_ms=9999.0),
            read(650, turn=2, ttft_ms=50.0),
            read(650, phase="turns", turn=3, ttft_ms=70.0),
            read(650, phase="turns", turn=3, ttft_ms=9999.0, mutation="edit"),
        )
    ]
    made = figures(runs)
    assert [p.median for s in made.ttft_by_prompt for p in s.points] == [50.0]
    assert [(p.x, p.median) for s in made.ttft_by_turn for p in s.points] == [(3, 70.0)]


def test_first_turns_are_a_control_of_their_own() -> None:
    ones = [computed(turn=1, input_num_tokens=500, ttft_ms=ms) for ms in (90.0, 110.0, 100.0)]
    (series,) = figures([run("off", *ones)]).first_turns
    assert [(p.x, p.median, p.count) for p in series.points] == [(500, 100.0, 3)]
    assert "First turns, a control" in shown([run("off", *ones)], [], [])


def test_the_engines_of_on_without_reading_back_are_in_the_summary() -> None:
    runs = pairs()
    ones = [
        computed(arm="unlinked", input_num_tokens=tokens, ttft_ms=tokens / 3)
        for tokens in (400, 700)
    ]
    text = shown([*runs, run("unlinked", *ones)], [], [])
    assert "The engines of on, without reading back: from 133 to 233 ms." in text
    assert "without reading back: from" not in shown(runs, [], [])


def test_gaps_are_grouped_by_what_is_held() -> None:
    streams = [
        read(650, phase="decode", held=held, itl_ms=tuple(float(n + held) for n in range(100)))
        for held in (0, 7)
    ]
    idle, holding = figures([run("on", *streams)]).itl_while_held
    assert (idle.held, idle.median, idle.p99, idle.highest) == (0, 49.5, 99.0, 99.0)
    assert (holding.held, holding.median) == (7, 56.5)


def test_the_table_has_ratios_to_off_at_the_same_length() -> None:
    rows = {(row.arm, row.prompt_tokens): row for row in figures(pairs()).table}
    on = rows["on", 700]
    assert on.ttft_ratio == pytest.approx(351 / 61)
    assert on.prefill_ratio == pytest.approx(90 / 40)
    assert (on.tokens_read, on.tokens_computed, on.count) == (650, 50, 3)
    assert rows["off", 700].ttft_ratio == 1.0


def test_the_base_benchmarks_later_turns_count_as_its_length() -> None:
    ones = [
        computed(phase="base", unit="base-2048", turn=turn, ttft_ms=100.0 * turn)
        for turn in (1, 2, 3)
    ]
    (series,) = figures([run("off", *ones)]).ttft_by_prompt
    assert [(point.x, point.median) for point in series.points] == [(2048, 250.0)]


def shown(runs: list[Run], warnings: list[str], unjoined: list[str]) -> str:
    proofs = [prove(one) for one in runs]
    charts = {"ttft_by_prompt": "<svg>drawn</svg>"}
    return page(figures(runs), runs, proofs, warnings, unjoined, charts, "the command")


def test_the_page_needs_nothing_beside_it() -> None:
    text = shown(pairs(), [], [])
    assert not re.search(r"""(src|href)=["']""", text)
    assert "<svg>drawn</svg>" in text


def test_the_page_says_what_a_reader_must_know() -> None:
    """Summary, proof, table, machine, versions, connectors, command, what is not joined."""
    text = shown(pairs(), ["be <careful>"], ["on, repeat 0: x: no line of the router"])
    for wanted in (
        "From 400 to 700 prompt tokens, TTFT went from 201 to 351 ms with read-back off, and from "
        "61 to 61 ms with it on",
        "be &lt;careful&gt;",
        "2 of 2 requests read 1000 tokens",
        "8192 bytes per token and within one block of 128 tokens per request: holds",
        "5.75",
        "0.29.0+cpu.bidir.1",
        "bidirectional_kv_xfer true",
        "the command",
        "A=1 vllm serve &#x27;&lt;m&gt;&#x27;",
        "1 of 12 requests could not be joined",
    ):
        assert wanted in text, wanted


def test_a_failed_run_is_called_failed_not_slow() -> None:
    runs = [run("off", computed()), run("on", computed(arm="on"))]
    assert "FAILED: nothing moved" in shown(runs, [], [])


def test_the_json_has_every_figure() -> None:
    runs = pairs()
    proofs = [prove(one) for one in runs]
    data = json.loads(as_json(figures(runs), runs, proofs, ["w"], ["u"], "c"))
    assert data["figures"]["ttft_by_prompt"][1]["points"][1]["median"] == 61
    assert data["figures"]["prefill_split"][1]["bars"][1]["compute"] == 30.5
    assert data["proofs"][1]["holds"] is True and data["warnings"] == ["w"]
    assert data["runs"][0]["versions"] == {"vllm": "0.29.0+cpu.bidir.1"}


def test_arms_that_could_not_be_compared_make_a_page_all_the_same() -> None:
    one = replace(pairs()[0], about={**pairs()[0].about, "connectors": {}})
    text = shown([one], ["there is no run of the arm 'on'"], [])
    assert "no two arms to compare" in text and "not known" in text
