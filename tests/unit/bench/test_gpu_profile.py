"""The pure parts of the GPU profile: order, room, figures, tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.bench.errors import BenchError
from tools.bench.gpu import work
from tools.bench.gpu.__main__ import main
from tools.bench.gpu.client import body, encode
from tools.bench.gpu.counters import PrefillLog, Transfer, transfer
from tools.bench.gpu.engines import SLOW_TRANSPORT, ZERO_COPY, Settings, options
from tools.bench.gpu.holding import Held, percentile
from tools.bench.gpu.plan import (
    Arm,
    Kept,
    Plan,
    arms,
    check_kv,
    check_plan,
    fragment_lengths,
    kv_needs,
    order,
)
from tools.bench.gpu.rows import Row, from_json, numbers
from tools.bench.gpu.run import Run, batches_of, published
from tools.bench.gpu.summary import (
    REQUIRED_AT,
    largest_excess,
    markdown,
    required,
    spread,
    summaries,
    table,
)
from tools.bench.model import SHAPES, Model, kv_bytes_per_token
from tools.demo.metrics import Reading

PLAN = Plan((2048, 30720), 256, 48, (0, 10, 50), 1500, 30, 60.0)
CONFIG = SHAPES["qwen3-8b"].config


def row(arm: str, ttft: float, pull: float = 0.0, engine: float = 0.0, **more: Any) -> Row:
    """A request of REQUIRED_AT tokens, D's part of 10 ms."""
    set_name, _, kind = arm.partition(" ")
    moved = Transfer(1, pull, engine, 10**9, 55000, 0) if pull else None
    log = {"transfer_ms": pull, "engine_ms": engine, "hold_ms": 1.0, "confirm_ms": 0.5}
    fields: dict[str, Any] = {
        "length": REQUIRED_AT,
        "repeat": 0,
        "prefill_ms": ttft - 10,
        "decode_ms": 10.0,
        "pull": moved,
        "log": log if set_name == "ours" and pull else {},
    }
    return Row(set_name, kind, **{**fields, **more})  # type: ignore[arg-type]


def good_rows() -> list[Row]:
    rows = []
    for repeat in range(3):
        rows += [
            row("ours recompute", 1000 + repeat, repeat=repeat),
            row("stock recompute", 1000, repeat=repeat),
            row("ours read_back", 150 + repeat, 30, 2.0 + repeat / 10, repeat=repeat),
            row("stock read_back", 390, 200, 150, repeat=repeat),
        ]
    return rows


def test_every_repeat_has_all_arms_and_each_comes_first_and_last() -> None:
    all_arms = arms(["ours", "stock"])
    assert len(set(all_arms)) == 4
    orders = [order(all_arms, repeat) for repeat in range(8)]
    assert all(set(one) == set(all_arms) for one in orders)
    assert {one[0] for one in orders} == {one[-1] for one in orders} == set(all_arms)
    assert orders[1] == orders[0][::-1]


def test_one_set_alternates_too() -> None:
    all_arms = arms(["stock"])
    assert all_arms == (Arm("stock", "recompute"), Arm("stock", "read_back"))
    assert {order(all_arms, repeat)[0] for repeat in range(4)} == set(all_arms)


def test_a_first_turn_leaves_room_for_answer_and_new_tokens() -> None:
    assert PLAN.first_prompt(2048) + 48 + 256 == 2048
    check_plan(PLAN, 40960)
    with pytest.raises(BenchError, match="has no first one"):
        check_plan(replace(PLAN, lengths=(304,)), 40960)
    with pytest.raises(BenchError, match="of that length"):
        check_plan(PLAN, 30720)


def test_caches_that_are_too_small_are_refused_with_what_to_change() -> None:
    size = kv_bytes_per_token(CONFIG, "bfloat16")
    assert size == 147456
    prefill, decode = kv_needs(PLAN)
    assert prefill > 30720
    assert decode > 50 * 1500 + 512
    room = check_kv(PLAN, size, 7, 16)
    assert room[0] >= prefill
    assert room[1] >= decode
    with pytest.raises(BenchError, match="--decode-kv-gib 11"):
        check_kv(PLAN, size, 7, 10)
    with pytest.raises(BenchError, match="--prefill-kv-gib 5"):
        check_kv(PLAN, size, 4, 16)


def test_kept_turns_are_waited_for_only_where_there_is_no_room() -> None:
    now = [100.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    kept = Kept(1000, 30.0, lambda: now[0], sleep)
    first = kept.keep(400)
    now[0] += 10
    kept.keep(400)
    assert kept.wait_for(200) == 0
    assert kept.wait_for(300) == pytest.approx(21)
    assert kept.tokens() == 400
    kept.release(first)
    kept.wait_until_empty()
    assert (kept.tokens(), len(slept)) == (0, 2)
    assert kept.wait_for(5000) == 0, "nothing is kept: waiting would not help"


def test_fragmenting_conversations_differ_and_are_the_same_each_time() -> None:
    lengths = fragment_lengths(30, 1)
    assert lengths == fragment_lengths(30, 1) != fragment_lengths(30, 2)
    assert len(set(lengths)) > 20
    assert min(lengths) >= 300
    assert max(lengths) <= 4000


def test_the_work_of_a_prefill() -> None:
    parameters = work.layer_parameters(CONFIG)
    assert parameters is not None
    assert 6.9e9 < parameters < 7.0e9, "8.2 thousand millions without both vocabularies"
    tokens = 1000
    attention = 2 * 2 * 36 * 32 * 128 * tokens**2 / 2
    assert work.prefill_flops(CONFIG, tokens) == 2 * parameters * tokens + attention
    assert work.prefill_flops(SHAPES["glm-5"].config, tokens) is None


def test_medians_leave_out_warm_up_and_failures() -> None:
    rows = [
        row("ours read_back", 100, 10),
        row("ours read_back", 300, 30, repeat=1),
        row("ours read_back", 9000, 900, repeat=-1, first_contact=True),
        row("ours read_back", 9000, 900, error="gone"),
    ]
    (found,) = summaries(rows, CONFIG, None)
    assert (found.count, found.ttft.median, found.ttft.high) == (2, 200, 300)
    assert found.pull == spread([10, 30])
    assert found.checks is not None
    assert found.checks.median == 1.5
    assert found.compute.median == pytest.approx(200 - 10 - 20 - 1.5)
    assert found.tflop_per_s is None, "what was read was not computed"


def test_rates_stand_beside_what_the_gpu_can_do() -> None:
    ceilings = {"copy_gb_per_s": 4000.0, "bfloat16_tflop_per_s": 800.0, "fp8_tflop_per_s": 1600.0}
    plain, read = summaries(
        [row("stock recompute", 1010), row("stock read_back", 200, 10, 5)], CONFIG, ceilings
    )
    flops = work.prefill_flops(CONFIG, REQUIRED_AT)
    assert flops is not None
    assert plain.tflop_per_s == pytest.approx(flops / 1e12)
    assert plain.matrix_share == pytest.approx(flops / 1e12 / 800)
    assert read.gb_per_s == pytest.approx(100)
    assert read.copy_share == pytest.approx(200 / 4000)
    (eight,) = summaries([row("stock recompute", 1010)], CONFIG, ceilings, fp8=True)
    assert eight.matrix_share == pytest.approx(flops / 1e12 / 1600)


def test_the_engine_thread_is_what_the_log_says_or_stocks_posting() -> None:
    assert row("ours read_back", 100, 30, 2.5).engine_ms == 2.5
    assert row("stock read_back", 100, 30, 25).engine_ms == 25
    assert row("ours read_back", 100, 30, log={"transfer_ms": 29.0}).engine_ms is None
    assert row("ours recompute", 100).engine_ms is None


def test_requirements_are_met_by_good_figures_only() -> None:
    assert [one.met for one in required(good_rows())] == [True] * 4
    slow = [
        replace(one, prefill_ms=600.0) if one.arm == "ours read_back" else one
        for one in good_rows()
    ]
    assert [one.met for one in required(slow)] == [True, True, False, False]
    busy = [*good_rows(), row("ours read_back", 150, 30, 3.1)]
    assert [one.met for one in required(busy)] == [True, False, True, True]
    alone = [one for one in good_rows() if one.set_name == "ours"]
    assert [one.met for one in required(alone)] == [None, True, None, True]
    assert "150" not in str(required([])[0])


def offered_rows() -> list[Row]:
    """Computed prompts of 950 to 1,070 ms, turns that were offered a read-back of 980 to 1,060."""
    rows = [
        row("ours recompute", 1300, repeat=-1),
        row("ours read_back", 1170, repeat=-1, first_contact=True),
    ]
    for repeat, (plain, offered) in enumerate([(950, 980), (1000, 1040), (1070, 1060)]):
        rows.append(row("ours recompute", plain, repeat=repeat))
        rows.append(row("ours read_back", offered, repeat=repeat))
    return rows


def test_the_largest_excess_is_of_medians_at_the_worst_length() -> None:
    shorter = [replace(one, length=2048) for one in good_rows() if one.set_name == "ours"]
    medians, single = largest_excess([*offered_rows(), *shorter])
    assert (medians.met, single.met) == (True, True)
    assert "+4.0% (24576 tokens: 1040 ms, recompute 1000 ms)" in medians.figures
    assert "+6.0% (24576 tokens, repeat 2: 1060 ms, recompute 1000 ms)" in single.figures
    assert "recompute's own +7.0%" in single.figures
    assert "first contact -10.0% (24576 tokens, warming up: 1170 ms, recompute 1300 ms)" in (
        single.figures
    )
    slow = [
        replace(one, prefill_ms=one.prefill_ms + 11) if one.kind == "read_back" else one
        for one in offered_rows()
    ]
    assert [one.met for one in largest_excess(slow)] == [False, True]


@pytest.mark.parametrize("repeat", [-1, 3])
def test_one_slow_turn_is_not_hidden_by_a_median(repeat: int) -> None:
    """Nor by warming up, where recompute took 1,300 ms."""
    rows = [*offered_rows(), row("ours read_back", 1500, repeat=repeat)]
    assert [one.met for one in largest_excess(rows)][1] is False


def test_an_excess_needs_a_recompute_of_its_set_and_length() -> None:
    rows = [row("ours read_back", 9000), row("stock recompute", 100)]
    assert [one.met for one in largest_excess(rows)] == [None] * 4
    failed = row("ours read_back", 9000, error="gone")
    assert largest_excess([*offered_rows(), failed]) == largest_excess(offered_rows())


def test_tables_have_a_line_for_each_arm_and_length() -> None:
    found = summaries(good_rows(), CONFIG, {"copy_gb_per_s": 4000.0})
    assert [one.arm for one in found] == [
        "ours recompute",
        "stock recompute",
        "ours read_back",
        "stock read_back",
    ]
    assert len(table(found)) == 5
    lines = markdown(found)
    assert len({line.count("|") for line in lines}) == 1
    assert "30.0 (30.0..30.0)" in table(found)[3]


def test_rows_survive_being_written() -> None:
    one = row("ours read_back", 150, 30, 2.0, handover=Transfer(1, 2.0, 1.0, 5, 6, 0))
    made = json.loads(json.dumps(one.as_json()))
    assert made["ttft_ms"] == 150
    assert from_json(made) == one


def test_a_line_of_the_log_is_found_by_the_request_and_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "p.log"
    path.write_text("INFO read-back req=cmpl-abc-0-1 outcome=read before=1\n", encoding="utf-8")
    log = PrefillLog(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(
            "INFO read-back req=cmpl-xyz-0-1 peer=d read=5 outcome=read\n"
            "INFO read-back req=cmpl-abc-0-9f peer=d hold_ms=0.5 engine_ms=1.5 outcome=recompute "
            "reason=expired\nINFO unfinished"
        )
    fields = numbers(log.read_back("abc"))
    assert (fields["engine_ms"], fields["outcome"], fields["reason"]) == (
        1.5,
        "recompute",
        "expired",
    )


def test_counters_are_taken_as_differences() -> None:
    text = 'vllm:nixl_{}{{engine="0"}} {}\n'
    names = ("xfer_time_seconds_sum", "post_time_seconds_sum", "bytes_transferred_sum")
    before = Reading("".join(text.format(name, 1) for name in names))
    after = Reading("".join(text.format(name, 1.5) for name in names))
    found = transfer(before, after)
    assert (found.transfer_ms, found.post_ms, found.failed) == (500, 500, 0)


def test_a_body_is_one_json_with_prompt_and_params() -> None:
    made = json.loads(body(encode([1, 2]), 3, {"a": 1}, stream=True))
    assert made["prompt"] == [1, 2]
    assert made["kv_transfer_params"] == {"a": 1}
    assert (made["max_tokens"], made["stream"]) == (3, True)
    assert "kv_transfer_params" not in json.loads(body("[1]", 1))


def settings(**more: Any) -> Settings:
    model = Model("qwen3-8b", Path("model"), "bfloat16", ("--load-format", "dummy"), (5,))
    fields: dict[str, Any] = {
        "model": model,
        "pythons": {"ours": Path("ours"), "stock": Path("stock")},
        "device": "cuda",
        "max_model_len": 1024,
        "prefill_kv_gib": 7,
        "decode_kv_gib": 16,
        "ttl_s": 30.0,
        "gpus": ("0", "1"),
    }
    return Settings(**{**fields, **more})


def test_each_engine_gets_its_gpu_its_memory_and_its_release() -> None:
    made = options(settings(decode_graphs=True), "stock")
    assert made.python == Path("stock").absolute()
    assert made.prefill.env["CUDA_VISIBLE_DEVICES"] == "0"
    assert made.decode.env["CUDA_VISIBLE_DEVICES"] == "1"
    assert str(7 * 2**30) in made.prefill.args
    assert str(16 * 2**30) in made.decode.args
    assert "--enforce-eager" in made.prefill.args
    assert "--compilation-config" in made.decode.args
    assert not made.prefill.prefix_caching
    assert made.decode.prefix_caching
    assert "--enforce-eager" in options(settings(), "ours").decode.args


def test_a_slow_transport_leaves_ucx_nothing_but_tcp() -> None:
    fast, slow = (options(settings(slow_transport=it), "ours").env for it in (False, True))
    assert (fast[ZERO_COPY], "UCX_TLS" in fast) == ("on", False)
    assert ZERO_COPY not in slow
    assert slow["UCX_TLS"] == SLOW_TRANSPORT["UCX_TLS"] == "tcp,cuda_copy,self"


def test_the_percentile_is_a_measured_value() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(n) for n in range(200)], 0.99) == 198.0


def test_wrong_arguments_say_what_to_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert main(["run", "--model", "qwen3-1.7b", *out]) == 2
    assert "--stock-python" in capsys.readouterr().err
    small = ["--sets", "ours", "--decode-kv-gib", "1"]
    assert main(["run", "--model", "qwen3-8b", *small, *out]) == 2
    assert "--decode-kv-gib" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--to", str(tmp_path)]) == 2


def test_a_published_command_names_no_folder() -> None:
    command = ("/opt/x/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/tmp/y/qwen3-8b")
    assert published((*command, "--port", "1")) == ["vllm", "serve", "qwen3-8b", "--port", "1"]


def test_held_figures_are_plain_json() -> None:
    held = Held("ours", 10, 5.5, 5.4, 6.3, 194, 25.0, 12.0, 0.1, 15000, True)
    assert Held(**json.loads(json.dumps(held.as_json()))) == held


@pytest.mark.parametrize(
    ("device", "apart", "batches"),
    [
        ("cuda", False, [["ours", "stock"]]),
        ("cuda", True, [["ours"], ["stock"]]),
        ("cpu", False, [["ours"], ["stock"]]),
    ],
)
def test_sets_are_up_together_or_apart(device: Any, apart: bool, batches: list[list[str]]) -> None:
    pythons: Any = {"ours": Path("a"), "stock": Path("b")}
    made = batches_of(settings(device=device, apart=apart, pythons=pythons))
    assert [list(batch.pythons) for batch in made] == batches


def test_those_that_come_later_have_their_share_of_the_time(tmp_path: Path) -> None:
    run = Run(settings(), PLAN, 1, tmp_path, "", 500.0, print)
    run.until_s = 250.0
    run.begin -= 251.0
    assert run.is_over()
    run.until_s = 500.0
    assert not run.is_over()
