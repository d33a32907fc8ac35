"""The benchmark of policies without engines: the load, the figures, the table, the command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.bench.fake import VOCABULARY
from tests.unit.bench.fake_leases import FakeNodes
from tools.bench.errors import BenchError
from tools.bench.model import Model
from tools.bench.policies.__main__ import main
from tools.bench.policies.figures import summary, times
from tools.bench.policies.load import Turn, run_load
from tools.bench.policies.plan import DECODE, PAIRS, PREFILL, Pair, Plan, pairs_of
from tools.bench.policies.run import MARK, RESULTS, Run, run
from tools.bench.policies.servers import options
from tools.bench.policies.table import text
from tools.bench.prompts import Words

SMALL = replace(Plan(), clients=3, conversations=10, think_s=(0.0, 0.01), answer_tokens=4)
STICKY, ROUND = Pair("sticky", "least-tokens"), Pair("round-robin", "round-robin")


class CountingNodes(FakeNodes):
    """Each node says that it computes 7 tokens of a turn and reads 3; of turns, two are hits."""

    def _metrics(self) -> str:
        turns = len(self.bodies["router"])
        source = 'vllm:prompt_tokens_by_source_total{source="'
        return (
            f'{source}local_compute"}} {7 * turns}\n{source}external_kv_transfer"}} {3 * turns}\n'
            f'vllm:request_success_total{{finished_reason="length"}} {turns}\n'
            'bidir_router_turns_total{outcome="hit",reason=""} 2\n'
            'bidir_router_turns_total{outcome="miss",reason="first_turn"} 5\n'
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingNodes]:
    monkeypatch.setattr("tools.bench.policies.run._SETTLE_S", 0.0)
    with CountingNodes(pause_s=0.0) as nodes:
        yield nodes


@dataclass
class Four:
    """Stands for engines and routers; `happened` in this order."""

    fake: FakeNodes
    happened: list[str] = field(default_factory=list)

    @property
    def urls(self) -> Mapping[str, str]:
        return {
            "prefill-0": self.fake.url("prefill"),
            "prefill-1": self.fake.url("prefill"),
            "decode-0": self.fake.url("decode"),
            "decode-1": self.fake.url("decode"),
        }

    @contextmanager
    def route(self, pair: Pair) -> Iterator[str]:
        self.happened.append(str(pair))
        yield self.fake.url("router")

    def forget(self) -> None:
        self.happened.append("forget")

    def commands(self) -> dict[str, list[str]]:
        return {"prefill-0": ["vllm", "serve"]}


def test_the_pairs_are_what_the_router_knows() -> None:
    from vllm.bidir.router.nodes import policies

    assert list(policies.DECODE) == list(DECODE) and list(policies.PREFILL) == list(PREFILL)
    assert len(PAIRS) == 9 and pairs_of(",".join(DECODE), ",".join(PREFILL)) == PAIRS
    assert STICKY.args() == ("--decode-policy", "sticky", "--prefill-policy", "least-tokens")
    with pytest.raises(BenchError, match="no such policy"):
        pairs_of("sticky,warm", "round-robin")


def test_every_pass_has_the_same_conversations_of_all_kinds() -> None:
    plan = Plan()
    talks = plan.talks()
    assert talks == Plan().talks() != replace(plan, seed=1).talks()
    assert {talk.kind.name for talk in talks} == {"short", "medium", "long"}
    assert sum(talk.kind.name == "short" for talk in talks) == plan.conversations / 2
    longest = max(
        sum(talk.new_tokens) + len(talk.new_tokens) * plan.answer_tokens for talk in talks
    )
    assert longest < plan.max_model_len


def test_pairs_come_there_and_back() -> None:
    order = list(replace(Plan(), passes=3).order((STICKY, ROUND)))
    assert order == [(0, STICKY), (0, ROUND), (1, ROUND), (1, STICKY), (2, STICKY), (2, ROUND)]


def test_turns_follow_each_other_and_repeat_the_history(fake: CountingNodes) -> None:
    turns = run_load(fake.url("router"), "m", Words(VOCABULARY), SMALL, "x")
    assert len(turns) == SMALL.turns == len(fake.bodies["router"])
    talks: dict[str, list[list[int]]] = {}
    for body in fake.bodies["router"]:
        talks.setdefault(body["conversation_id"], []).append(body["prompt"])
    assert len(talks) == SMALL.conversations
    for prompts in talks.values():
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before)] == before
            assert len(after) > len(before) + SMALL.answer_tokens
    assert all(0 < turn.ttft_ms <= turn.turn_ms for turn in turns)
    again = run_load(fake.url("router"), "m", Words(VOCABULARY), SMALL, "y")
    lengths = sorted(turn.prompt_tokens for turn in turns)
    assert sorted(turn.prompt_tokens for turn in again) == lengths
    prompts = [body["prompt"][:100] for body in fake.bodies["router"]]
    assert all(prompt not in prompts[len(turns) :] for prompt in prompts[: len(turns)])


def test_each_pass_begins_with_empty_caches_and_a_router_of_its_own(
    fake: CountingNodes, tmp_path: Path
) -> None:
    four = Four(fake)
    what = Run(SMALL, (STICKY, ROUND), tmp_path, VOCABULARY, 900.0, {"command": "x"})
    made = json.loads(run(what, four, lambda line: None, lambda: 0.1).read_text())
    warm_up, passes = four.happened[:2], four.happened[2:]
    assert not {"forget", str(STICKY)} & set(warm_up)
    shown = [str(STICKY), str(ROUND), str(ROUND), str(STICKY)]
    assert passes == [one for pair in shown for one in ("forget", pair)]
    assert [one["pair"] for one in made["passes"]] == shown
    first = made["passes"][0]
    assert first["nodes"]["prefill-1"] == {
        "turns": SMALL.turns,
        "computed": 7 * SMALL.turns,
        "own_cache": 0,
        "from_peer": 3 * SMALL.turns,
    }
    assert first["reuse"] == {"hit": 2, "first_turn": 5}
    assert made["left_out"] == [] and made[MARK] == 1


def test_no_pass_is_begun_that_would_end_after_the_deadline(
    fake: CountingNodes, tmp_path: Path
) -> None:
    what = Run(SMALL, (STICKY, ROUND), tmp_path, VOCABULARY, 0.0, {})
    made = json.loads(run(what, Four(fake), lambda line: None, lambda: 0.1).read_text())
    assert made["passes"] == [] and len(made["left_out"]) == 4


def made_of(*passes: dict[str, Any]) -> dict[str, Any]:
    return {MARK: 1, "plan": asdict(Plan()), "turns": 4, "passes": passes, "left_out": []}


def one_pass(pair: Pair, first_ms: float, computed: tuple[int, int]) -> dict[str, Any]:
    turns = [Turn("short", 1, 100, first_ms, 2 * first_ms), Turn("short", 2, 200, 10.0, 20.0)]
    none = {"own_cache": 0, "from_peer": 50}
    return {
        "pair": str(pair),
        "seconds": 3.0,
        "reuse": {"hit": 1, "first_turn": 1},
        "nodes": {
            "prefill-0": {"turns": 1, "computed": computed[0], **none},
            "prefill-1": {"turns": 1, "computed": computed[1], **none},
            "decode-0": {"turns": 2, "computed": 0, **none},
            "decode-1": {"turns": 0, "computed": 0, **none},
        },
        "turns": [asdict(turn) for turn in turns],
    }


def test_a_pairs_figures_are_over_all_its_passes() -> None:
    made = made_of(
        one_pass(STICKY, 30.0, (300, 100)),
        one_pass(ROUND, 1.0, (1, 1)),
        one_pass(STICKY, 50.0, (300, 100)),
    )
    found = summary(made, str(STICKY))
    assert found["turns"] == 4 and found["ttft_p50_ms"] == 20.0 and found["ttft_p99_ms"] == 50.0
    assert found["later_ttft_p50_ms"] == 10.0 and found["hit_share"] == 0.5
    assert found["spread"] == (30.0 - 20.0) / 20.0
    assert found["p_computed"] == 400 and found["p_from_peer"] == 100
    assert found["p_balance"] == 0.75 and found["d_balance"] == 1.0
    assert times([])["ttft_p99_ms"] == 0.0


def test_the_table_has_a_line_for_each_pair() -> None:
    lines = text(made_of(one_pass(STICKY, 30.0, (300, 100)), one_pass(ROUND, 9.0, (1, 1))))
    rows = [line for line in lines.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == [str(STICKY), str(ROUND)]
    assert len({len(row) for row in rows}) == 1


def test_a_run_can_be_reported_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.bench.policies.__main__.find_spec", lambda name: None)
    made = made_of(one_pass(STICKY, 30.0, (300, 100)))
    (tmp_path / RESULTS).write_text(json.dumps(made), encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 0
    assert str(STICKY) in capsys.readouterr().out
    (tmp_path / RESULTS).write_text("{}", encoding="utf-8")
    assert main(["report", str(tmp_path)]) == 1
    assert "no results of this benchmark" in capsys.readouterr().err


def test_engines_are_as_in_a_deployment(tmp_path: Path) -> None:
    model = Model("tiny", tmp_path, "float32", token_ids=VOCABULARY)
    chosen = options(Plan(), model, Path("/python"), tmp_path, lambda line: None)
    assert chosen.prefill.prefix_caching and chosen.decode.prefix_caching and chosen.bidirectional
    assert chosen.decode.kv_connector_extra_config == {"decoder_kv_lease_duration": 15.0}
    assert chosen.patient, "four engines on a few cores"
    assert chosen.env["VLLM_SERVER_DEV_MODE"] == "1"
