"""The benchmark of leases without engines: sizes, loads, turns, what is required, the command."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.fake import VOCABULARY
from tests.unit.bench.fake_leases import TOTALS, FakeNodes
from tools.bench import servers as bench_servers
from tools.bench.errors import BenchError
from tools.bench.leases.__main__ import main, parser
from tools.bench.leases.arms import ARMS, Arm, arms_of, groups_of
from tools.bench.leases.judge import judge
from tools.bench.leases.load import Chunk, Load, Running, Slice, summary, watching
from tools.bench.leases.others import Others
from tools.bench.leases.plan import PHASES, TURNS, Plan
from tools.bench.leases.run import RESULTS, Run, run
from tools.bench.leases.servers import Nodes, options
from tools.bench.leases.table import text
from tools.bench.leases.turns import LegsFront, RouterFront, Talks, hits
from tools.bench.model import Model
from tools.bench.prompts import Words
from tools.demo.metrics import Reading

WORDS = Words(VOCABULARY)
SMALL = replace(
    Plan(),
    conversations=3,
    seconds=0.3,
    cycles=1,
    warm_s=0.1,
    streams_fit=5,
    streams_full=60,
    load_output=100,
)


def nobody() -> float:
    """What others take of the machine."""
    return 0.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake's counters are never late, and whoever else uses this machine does not matter."""
    monkeypatch.setattr("tools.bench.leases.run._SETTLE_S", 0.0)
    monkeypatch.setattr("tools.bench.leases.run.Others", lambda groups: nobody)


@pytest.fixture
def fake() -> Iterator[FakeNodes]:
    with FakeNodes() as nodes:
        yield nodes


def phase(rate: float = 100.0, p99: float = 10.0, found: int = 20) -> dict[str, Any]:
    """What one load and the turns after it have come to."""
    load = {"streams": 5, "tokens_per_s": rate, "itl_p50_ms": 5.0, "itl_p99_ms": p99}
    return {
        "load": {**load, "ttft_p50_ms": 40.0, "others": 0.01},
        "decode": {
            "preempted": 3,
            "queued_ms": 7.0,
            "leases_before": TOTALS,
            "leases_after": {**TOTALS, "blocks": 0, "reclaimed": 17},
        },
        "back": {"turns": 20, "hits": found, "turn_ms": 70.0},
    }


def results(
    leases_fit: dict[str, Any] | None = None,
    leases_full: dict[str, Any] | None = None,
    heartbeat_ms: float = 4.0,
) -> dict[str, Any]:
    """A run's JSON in which leases are as good as nothing kept, unless said otherwise."""
    part = {"p50_ms": heartbeat_ms, "max_ms": 2 * heartbeat_ms}
    made: dict[str, Any] = {
        "bench_leases": 1,
        "plan": {**vars(Plan()), "budget": Plan().budget},
        "left_out": [],
        "heartbeat": {
            "leases": 5000,
            "parts": {"interval": part, "call": part, "looks": part},
        },
        "arms": {
            name: {"title": arm.title, "phases": {"fit": phase(), "full": phase()}}
            for name, arm in ARMS.items()
        },
    }
    made["arms"]["leases"]["phases"] = {
        "fit": leases_fit or phase(),
        "full": leases_full or phase(found=0),
    }
    return made


def test_by_default_the_loads_are_what_they_are_called() -> None:
    plan = Plan()
    plan.check()
    kept = int(plan.budget * plan.usable_blocks)
    assert kept >= plan.kept_blocks(TURNS) + plan.conversations
    assert plan.load_blocks("fit") + kept <= plan.usable_blocks
    assert plan.load_blocks("full") + plan.kept_blocks(TURNS - 1) > plan.usable_blocks


def test_streams_do_not_stay_in_step_and_are_the_same_in_every_arm() -> None:
    plan = Plan()
    lengths = [plan.output_tokens(f"full-3-{request}") for request in range(200)]
    assert lengths == [Plan().output_tokens(f"full-3-{request}") for request in range(200)]
    assert min(lengths) < 0.8 * plan.load_output and 1.2 * plan.load_output < max(lengths)
    assert max(lengths) <= plan.longest_output
    assert lengths != [replace(plan, seed=1).output_tokens(f"full-3-{n}") for n in range(200)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"streams_fit": 8}, "the smaller load does not fit beside the budget"),
        ({"conversations": 40}, "the smaller load does not fit beside the budget"),
        ({"decode_blocks": 2000}, "the larger load does not need all of the memory"),
        ({"cycles": 0}, "a load is measured for no time"),
    ],
    ids=["streams", "conversations", "memory", "cycles"],
)
def test_sizes_that_would_show_something_else_are_refused(change: dict[str, int], why: str) -> None:
    with pytest.raises(BenchError, match=why):
        replace(Plan(), **change).check()


def answer(chunks: list[Chunk], sent: float, *arrivals: float) -> None:
    """One that comes token by token."""
    watch = watching(chunks, sent)
    for at in arrivals:
        watch(at, 1)


def test_only_what_comes_within_the_slices_counts() -> None:
    chunks: list[Chunk] = []
    answer(chunks, 9.0, 9.9, 10.4, 12.0)
    answer(chunks, 10.5, 11.0, 11.25)
    load = summary(chunks, [Slice(10.0, 12.0, 0.0)], 2, 2.0)
    assert (load.streams, load.seconds, load.tokens_per_s) == (2, 2.0, 1.5)
    assert (load.gaps, load.itl_max_ms) == (1, 250.0), "the first answer's began before"
    assert load.ttft_max_ms == 500.0, "the first answer's first token came before"


def test_slices_in_which_others_worked_do_not_count() -> None:
    chunks: list[Chunk] = []
    answer(chunks, 0.0, *(number * 0.5 for number in range(12)))
    slices = [Slice(0.0, 2.0, 0.0), Slice(2.0, 4.0, 0.5), Slice(4.0, 6.0, 0.04)]
    load = summary(chunks, slices, 1, 4.0)
    assert (load.seconds, load.tokens_per_s, load.others) == (4.0, 2.0, 0.02)
    assert load.gaps == 6 and load.itl_max_ms == 500.0
    assert load.slices == ((2.0, 0.0), (2.0, 0.5), (2.0, 0.04))
    load = summary(chunks, slices, 1, 5.0)
    assert load.seconds == 6.0 and load.others > 0.05, "too few: all are taken, and it shows"


def test_the_99th_percentile_is_that_of_all_gaps() -> None:
    chunks: list[Chunk] = []
    answer(chunks, 0.0, *(number * 0.01 for number in range(100)), 9.0)
    load = summary(chunks, [Slice(0.0, 10.0, 0.0)], 3, 10.0)
    assert (load.tokens_per_s, load.gaps) == (10.1, 100)
    assert load.itl_p50_ms == pytest.approx(10.0)
    assert load.itl_p99_ms == load.itl_max_ms == pytest.approx(8010.0)


def test_a_load_without_a_token_is_zero_and_no_error() -> None:
    load = summary([], [Slice(0.0, 10.0, 0.0)], 3, 10.0)
    assert (load.tokens_per_s, load.itl_p99_ms, load.gaps) == (0.0, 0.0, 0)


def one_cycle(
    url: str, others: Callable[[], float] = nobody, at_end: Callable[[], object] = lambda: None
) -> Load:
    running = Running(url, "m", WORDS, SMALL, "fit", others, at_end)
    running.cycle(0)
    return running.load()


def test_streams_go_on_until_enough_is_measured(fake: FakeNodes) -> None:
    ended: list[int] = []
    url = fake.url("decode")
    load = one_cycle(url, at_end=lambda: ended.append(1))
    bodies = fake.bodies["decode"]
    assert ended and load.streams == 5
    assert SMALL.seconds <= load.seconds < 2 * SMALL.seconds
    assert load.tokens_per_s > 5 / 0.01 and len(bodies) > 5
    assert load.itl_p50_ms >= 2.0
    assert all(len(body["prompt"]) == SMALL.load_prompt for body in bodies)
    assert all("conversation_id" not in body for body in bodies)
    # The first requests end one after the other, all others are about as long as each other.
    firsts = sorted(body["max_tokens"] for body in bodies[:5])
    assert firsts[0] <= 25 and firsts == sorted(
        round((number + 1) / 5 * SMALL.output_tokens(f"fit-0-{number}-0")) for number in range(5)
    )
    later = [body["max_tokens"] for body in bodies[5:]]
    assert all(75 <= tokens <= 125 for tokens in later)
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert len(set(prompts)) == len(prompts), "nothing comes from a prefix cache"


def test_a_load_waits_for_others_with_an_end_to_its_patience(fake: FakeNodes) -> None:
    shares = iter([0.9, 0.5, 0.0])
    url = fake.url("decode")
    load = one_cycle(url, lambda: next(shares))
    assert [others for _, others in load.slices] == [0.5, 0.0]
    assert load.others == 0.0 and load.seconds < 2 * SMALL.seconds
    load = one_cycle(url, lambda: 0.5)
    assert len(load.slices) == 3 and load.others == 0.5


def test_all_arms_get_the_same_load(fake: FakeNodes) -> None:
    for _ in range(2):
        one_cycle(fake.url("decode"))
    first = [tuple(body["prompt"]) for body in fake.bodies["decode"]]
    assert set(first[:5]) <= set(first[5:])


def test_cycles_add_up_and_none_finds_anothers_prompts_cached(fake: FakeNodes) -> None:
    plan = replace(SMALL, cycles=3)
    running = Running(fake.url("decode"), "m", WORDS, plan, "fit", nobody, lambda: None)
    for cycle in range(plan.cycles):
        running.cycle(cycle)
    load = running.load()
    assert len(load.slices) == 3 and plan.seconds <= load.seconds < 2 * plan.seconds
    prompts = [tuple(body["prompt"]) for body in fake.bodies["decode"]]
    assert len(set(prompts)) == len(prompts) >= 15


def test_arms_that_are_held_against_each_other_take_turns() -> None:
    arms = arms_of(tuple(ARMS))
    assert [[arm.name for arm in group] for group in groups_of(arms)] == [
        ["none", "leases", "none-again"],
        ["fixed"],
        ["stock-none"],
        ["stock"],
    ]
    assert groups_of(arms_of(("stock",))) == (arms_of(("stock",)),)
    orders = [tuple(Plan().order(cycle, 3)) for cycle in range(6)]
    assert sorted(orders) == sorted(permutations(range(3))), "each before and after each other"
    two = [tuple(Plan().order(cycle, 2)) for cycle in range(4)]
    assert two == [(0, 1), (1, 0), (1, 0), (0, 1)]
    assert tuple(Plan().order(3, 1)) == (0,)


def test_a_failed_stream_is_an_error(fake: FakeNodes) -> None:
    fake.fails = True
    with pytest.raises(BenchError, match="no memory"):
        one_cycle(fake.url("decode"))


def test_the_router_links_turns_by_the_conversations_id(fake: FakeNodes) -> None:
    talks = Talks(SMALL, WORDS)
    front = RouterFront(fake.url("router"))
    for turn in (1, 2):
        assert talks.turn(front, turn) > 0
    asked = fake.bodies["router"]
    assert [len(body["prompt"]) for body in asked] == [256] * 3 + [352] * 3
    first = {body["conversation_id"]: body["prompt"] for body in asked[:3]}
    assert all(body["prompt"][:256] == first[body["conversation_id"]] for body in asked[3:]), (
        "a turn goes on where its own conversation was"
    )
    again = Talks(SMALL, WORDS)
    again.turn(front, 1)
    assert {tuple(body["prompt"]) for body in fake.bodies["router"][6:]} == {
        tuple(prompt) for prompt in first.values()
    }


def test_without_a_router_each_leg_gets_the_others_params(fake: FakeNodes) -> None:
    front = LegsFront(fake.url("prefill"), fake.url("decode"))
    talks = Talks(replace(SMALL, conversations=1), WORDS)
    for turn in (1, 2):
        talks.turn(front, turn)
    (p1, p2), (d1, d2) = (
        [body["kv_transfer_params"] for body in fake.bodies[node]] for node in ("prefill", "decode")
    )
    assert p1["remote_block_ids"] is None and p1["do_remote_decode"] is True
    assert (d1["from"], d1["turn"]) == ("prefill", 1)
    assert (p2["from"], p2["turn"], p2["do_remote_decode"]) == ("decode", 1, True)
    assert (d2["from"], d2["turn"]) == ("prefill", 2)


def test_a_d_that_keeps_nothing_gives_p_nothing_to_read(fake: FakeNodes) -> None:
    fake.keeps = False
    front = LegsFront(fake.url("prefill"), fake.url("decode"))
    talks = Talks(replace(SMALL, conversations=1), WORDS)
    for turn in (1, 2):
        talks.turn(front, turn)
    asked = [body["kv_transfer_params"] for body in fake.bodies["prefill"]]
    assert asked[0] == asked[1] and asked[0]["remote_block_ids"] is None


def test_hits_are_what_p_has_read() -> None:
    def reading(read: int, expired: int, reads: int) -> Reading:
        name = "vllm:bidir_read_back_total"
        return Reading(
            f'{name}{{outcome="read",reason=""}} {read}\n'
            f'{name}{{outcome="recompute",reason="expired"}} {expired}\n'
            f"vllm:nixl_xfer_time_seconds_count {reads}\n"
        )

    before, after = reading(5, 1, 7), reading(22, 4, 30)
    assert hits(before, after, stock=False) == (17, {"expired": 3})
    assert hits(before, after, stock=True) == (23, {})


def test_as_good_as_keeping_nothing_meets_all() -> None:
    assert [line.met for line in judge(results())] == [True] * 5


@pytest.mark.parametrize(
    ("made", "number", "found"),
    [
        (results(leases_fit=phase(rate=94.0)), 0, "94.0, 94.0% of 100.0"),
        (results(leases_fit=phase(p99=10.6)), 1, "10.6, 106.0% of 10.0"),
        (results(leases_fit=phase(found=17)), 2, "17 of 20, 85%"),
        (results(leases_full=phase(rate=94.0)), 3, "94.0, 94.0% of 100.0"),
        (results(heartbeat_ms=5.1), 4, "p50 5.10 ms, max 10.20 ms"),
    ],
    ids=["throughput", "latency", "hits", "throughput-full", "heartbeat"],
)
def test_each_requirement_can_fail_alone(made: dict[str, Any], number: int, found: str) -> None:
    lines = judge(made)
    assert [line.met for line in lines] == [index != number for index in range(5)]
    assert str(lines[number]).startswith("NOT MET: ") and found in lines[number].found


def test_better_is_no_failure() -> None:
    lines = judge(results(phase(rate=150.0, p99=2.0), phase(rate=150.0)))
    assert all(line.met for line in lines)


def test_leases_are_held_against_the_mean_of_both_runs_that_keep_nothing() -> None:
    made = results(leases_fit=phase(rate=94.0))
    made["arms"]["none-again"]["phases"]["fit"] = phase(rate=96.0)
    line = judge(made)[0]
    assert line.met and "95.9% of 98.0 when nothing is kept, whose two runs differ by 4.1%" in (
        line.found
    )


@pytest.mark.parametrize("arm", ["leases", "none", "none-again"])
def test_what_was_measured_beside_others_work_proves_nothing(arm: str) -> None:
    made = results()
    made["arms"][arm]["phases"]["full"]["load"]["others"] = 0.2
    lines = judge(made)
    assert [line.met for line in lines] == [True, True, True, None, True]
    assert "others took up to 20% of the machine" in str(lines[3])


def test_stock_is_held_against_stock_that_keeps_nothing() -> None:
    made = results()
    for name, rate in (("stock-none", 50.0), ("stock", 40.0)):
        made["arms"][name]["phases"] = {"fit": phase(rate=rate), "full": phase(rate=rate)}
    rows = [line.split() for line in text(made).splitlines() if line.startswith("stock, fixed")]
    assert [row[3:5] for row in rows] == [["40.0", "-20.0%"]] * 2


def test_what_has_not_run_is_not_met() -> None:
    made = results()
    del made["arms"]["leases"], made["heartbeat"]
    assert [line.met for line in judge(made)] == [None] * 5
    made = results()
    del made["arms"]["none"], made["arms"]["none-again"]
    assert [line.met for line in judge(made)] == [None, None, True, None, True]


def test_the_table_has_all_arms_under_both_loads_and_every_requirement() -> None:
    shown = text(results(leases_full=phase(rate=80.0, found=2)))
    assert all(shown.count(f"{arm.title:20}") == 2 for arm in ARMS.values())
    rows = [line.split() for line in shown.splitlines() if line.startswith("leases ")]
    assert [row[1:3] for row in rows] == [["100.0", "+0.0%"], ["80.0", "-20.0%"]]
    assert "2/20" in rows[1] and shown.count("met: ") == 4 and shown.count("NOT MET: ") == 1
    assert "240 blocks kept before the load, 0 at its end; 17 ended for want of blocks" in shown


@contextmanager
def started(fake: FakeNodes, arm: Arm) -> Iterator[Nodes]:
    front = RouterFront(fake.url("router"))
    if arm.stock:
        yield Nodes(
            LegsFront(fake.url("prefill"), fake.url("decode")),
            fake.url("prefill"),
            fake.url("decode"),
        )
    else:
        yield Nodes(front, fake.url("prefill"), fake.url("decode"))


def small_run(out: Path, *arms: str, deadline_s: float = 60.0) -> Run:
    return Run(SMALL, arms_of(arms), out, VOCABULARY, deadline_s, {"command": "c"})


def test_an_arm_takes_turns_before_between_and_after_both_loads(
    fake: FakeNodes, tmp_path: Path
) -> None:
    fake.read = 1
    said: list[str] = []
    path = run(
        small_run(tmp_path, "leases", "stock"),
        lambda arm, _: started(fake, arm),
        said.append,
        lambda: 0.0,
    )
    made = json.loads(path.read_text())
    assert path == tmp_path / RESULTS and list(made["arms"]) == ["leases", "stock"]
    leases, stock = (made["arms"][name]["phases"] for name in ("leases", "stock"))
    for found in (leases, stock):
        assert list(found) == list(PHASES)
        assert [found[one]["back"]["hits"] for one in PHASES] == [3, 3]
        assert [found[one]["load"]["streams"] for one in PHASES] == [5, 60]
        assert all(found[one]["decode"]["preempted"] > 0 for one in PHASES)
    assert leases["fit"]["decode"]["leases_before"] == TOTALS
    assert stock["fit"]["decode"]["leases_before"] is None
    asked = [body["conversation_id"] for body in fake.bodies["router"]]
    assert asked[:2] == ["warm-up"] * 2 and len(asked) == 2 + TURNS * SMALL.conversations
    assert any("leases, full: 60 streams" in line for line in said)


def test_loads_of_arms_that_alternate_are_measured_while_all_are_up(
    fake: FakeNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    up: list[str] = []
    seen: list[tuple[str, tuple[str, ...]]] = []

    @contextmanager
    def start(arm: Arm, folder: Path) -> Iterator[Nodes]:
        up.append(arm.name)
        with started(fake, arm) as nodes:
            yield replace(nodes, decode_url=f"{nodes.decode_url}#{arm.name}")
        up.remove(arm.name)

    def cycle(running: Running, number: int) -> None:
        seen.append((f"{running.phase}-{number}-{running.url.split('#')[1]}", tuple(up)))
        running.at_end()

    monkeypatch.setattr(Running, "cycle", cycle)
    monkeypatch.setattr("tools.bench.leases.run.lease_totals", lambda url: TOTALS)
    what = replace(small_run(tmp_path, "none", "leases", "stock"), plan=replace(SMALL, cycles=2))
    path = run(what, start, lambda _: None, lambda: 0.0)
    assert list(json.loads(path.read_text())["arms"]) == ["none", "leases", "stock"]
    together, alone = ("none", "leases"), ("stock",)
    assert [one for one, _ in seen[:4]] == [
        "fit-0-none", "fit-0-leases", "fit-1-leases", "fit-1-none"
    ]  # fmt: skip
    assert [those for _, those in seen] == [together] * 8 + [alone] * 4
    assert not up


def test_an_arm_that_would_end_after_the_deadline_is_left_out(
    fake: FakeNodes, tmp_path: Path
) -> None:
    path = run(
        small_run(tmp_path, "none", "fixed", deadline_s=0.5),
        lambda arm, _: started(fake, arm),
        lambda _: None,
        lambda: 0.0,
    )
    made = json.loads(path.read_text())
    assert (list(made["arms"]), made["left_out"]) == (["none"], ["fixed"])


def test_what_has_ended_stays_when_a_later_arm_fails(
    fake: FakeNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def start(arm: Arm, _: Path) -> Iterator[Nodes]:
        fake.leased = arm.name != "none"
        with started(fake, arm) as nodes:
            yield nodes

    monkeypatch.setattr("tools.bench.leases.run.groups_of", lambda arms: [(one,) for one in arms])
    with pytest.raises(BenchError, match="leases cannot be counted"):
        run(
            small_run(tmp_path, "fixed", "none"),
            start,
            lambda _: None,
            lambda: 0.0,
        )
    assert list(json.loads((tmp_path / RESULTS).read_text())["arms"]) == ["fixed"]


@pytest.mark.parametrize("name", list(ARMS))
def test_engines_differ_in_what_d_keeps_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tree(device: str, into: Path, say: Callable[[str], None]) -> Path:
        return into

    monkeypatch.setattr(bench_servers, "stock_tree", tree)
    model = Model("tiny", tmp_path, "float32")
    arm, plan = ARMS[name], Plan()
    made = options(arm, plan, model, Path("python"), tmp_path, lambda _: None)
    assert made.decode.args == ("--num-gpu-blocks-override", str(plan.decode_blocks))
    assert made.args == ("--block-size", "32") and not made.prefill.prefix_caching
    assert made.bidirectional == (name != "stock-none")
    found = made.decode.kv_connector_extra_config
    assert found.get("decoder_kv_lease_duration") == (
        plan.lease_s if name in ("leases", "none", "none-again") else None
    )
    blocks = found.get("decoder_kv_lease_budget", 0) * plan.usable_blocks
    assert (int(blocks) == 0) == (name != "leases")
    stock = made.env.get("PYTHONPATH", "").startswith(str(tmp_path / "stock-cpu"))
    assert stock == name.startswith("stock")


def test_time_of_others_is_what_is_not_ours() -> None:
    clock = [100.0]
    others = Others([], busy=lambda: clock[0])
    clock[0] += 1000.0
    assert others() == 1.0
    assert others() < 0.5, "each call tells of the time since the last one"


def test_our_own_time_is_not_that_of_others() -> None:
    others = Others([], busy=time.process_time)
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert others() < 0.5 / (os.cpu_count() or 1)


@pytest.mark.parametrize("command", ["run", "report"])
def test_each_command_has_help_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        parser().parse_args([command, "--help"])
    assert status.value.code == 0
    assert f"\n  python -m tools.bench.leases {command}" in capsys.readouterr().out


@pytest.mark.parametrize(("heartbeat_ms", "status"), [(4.0, 0), (6.0, 1)])
def test_the_report_says_by_its_status_whether_all_was_met(
    heartbeat_ms: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RESULTS).write_text(json.dumps(results(heartbeat_ms=heartbeat_ms)))
    assert main(["report", str(tmp_path)]) == status
    shown = capsys.readouterr().out
    assert ("NOT MET: a heartbeat for 5000 kept conversations" in shown) == bool(status)
    written = json.loads((tmp_path / RESULTS).read_text())
    assert [line["met"] for line in written["required"]] == [True] * 4 + [not status]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["report", "nowhere"], "results cannot be read"),
        (["run", "--arms", "none,most", "--out", "nowhere"], "arm 'most' does not exist"),
        (["run", "--arms", "none,none", "--out", "nowhere"], "arm 'none' comes twice"),
        (["run", "--streams-full", "6", "--out", "nowhere"], "does not need all of the memory"),
    ],
    ids=["results", "arm", "twice", "sizes"],
)
def test_a_wrong_argument_is_one_message(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and why in error
