"""Whole runs against a server that takes the place of router and engines."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.bench.fake import BYTES_PER_TOKEN, VOCABULARY, FakeServing, Starts, reply_to
from tests.unit.bench.made import WORKLOAD
from tools.bench import run as running
from tools.bench.arms import ARMS, order
from tools.bench.collect import RECORDS, collect, unjoined
from tools.bench.errors import BenchError
from tools.bench.plan import Talk, Turn
from tools.bench.progress import Progress
from tools.bench.prove import prove
from tools.bench.records import Key, read_records
from tools.bench.run import PLAN, Engines, Experiment, Start, fresh
from tools.cluster import ClusterError

ENGINES = Engines(
    device="cpu",
    model_name="tiny",
    config={"vocab_size": 1000},
    dtype="float32",
    token_ids=VOCABULARY,
    max_model_len=1024,
    tensor_parallel=1,
    kv_bytes_per_token=BYTES_PER_TOKEN,
    versions={"vllm": "0.29.0"},
)
TRACE = tuple(
    Talk(tuple(Turn("trace", 60 * n, 4, text=(200 + n,)) for n in (1, 2, 3)), 0.01 * talk)
    for talk in range(3)
)


def experiment(out: Path, repeats: int = 2, **changes: object) -> Experiment:
    made = Experiment((ARMS["off"], ARMS["on"]), repeats, WORKLOAD, ENGINES, out)
    return replace(made, **changes)  # type: ignore[arg-type]  # a test names what it changes


def run(made: Experiment, start: Start, progress: Callable[[int, int], Progress]) -> None:
    """Without the second that it takes to see how busy the machine is."""
    running.run(made, start, progress, busy=lambda: 0.0)


def keys(out: Path) -> list[Key]:
    return sorted(record.key for record in read_records(out / RECORDS))


class Interrupting(Progress):
    """Raises KeyboardInterrupt when so many requests have been answered."""

    def __init__(self, total: int, done: int, after: int) -> None:
        super().__init__(io.StringIO(), total, done)
        self._left = after

    def advance(self, what: str) -> None:
        super().advance(what)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def interrupting(after: int) -> Callable[[int, int], Progress]:
    return lambda total, done: Interrupting(total, done, after)


def quiet(total: int, done: int) -> Progress:
    return Progress(io.StringIO(), total, done)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Starts]:
    out, starts = tmp_path_factory.mktemp("whole") / "out", Starts()
    run(experiment(out, trace=TRACE, clients=2), starts, quiet)
    return out, starts


def test_each_arm_and_repeat_has_the_same_requests(whole: tuple[Path, Starts]) -> None:
    out, _ = whole
    by_run: dict[tuple[str, int], set[tuple[object, ...]]] = {}
    for arm, repeat, *request in keys(out):
        by_run.setdefault((arm, repeat), set()).add(tuple(request))
    assert set(by_run) == {("off", 0), ("off", 1), ("on", 0), ("on", 1)}
    # 2 lengths of 2 turns, 3 turns, 2 streams, 2 held, 3 conversations of 3.
    assert {len(found) for found in by_run.values()} == {2 * 2 + 3 + 2 + 2 + 9}
    assert len({frozenset(found) for found in by_run.values()}) == 1


def test_all_arms_are_asked_the_same_prompts_of_exactly_the_planned_lengths(
    whole: tuple[Path, Starts],
) -> None:
    out, starts = whole
    asked = {name: prompt for one in starts.started for name, prompt in one.asked.items()}
    by_key: dict[tuple[object, ...], set[tuple[int, ...]]] = {}
    for record in read_records(out / RECORDS):
        prompt = asked[record.request_id]
        assert len(prompt) == record.input_num_tokens
        by_key.setdefault(record.key[1:], set()).add(tuple(prompt))
        if record.phase == "sweep" and record.turn == 2:
            assert record.unit == f"sweep-{len(prompt)}"
    assert {len(prompts) for prompts in by_key.values()} == {1}
    # Repeats are asked other prompts, so that no cache can know them.
    assert len(set.union(*by_key.values())) == len(by_key)


def test_live_replies_are_in_the_history(whole: tuple[Path, Starts]) -> None:
    out, starts = whole
    asked = {name: prompt for one in starts.started for name, prompt in one.asked.items()}
    talks: dict[tuple[object, ...], dict[int, list[int]]] = {}
    for record in read_records(out / RECORDS):
        talks.setdefault(record.key[:4], {})[record.turn] = asked[record.request_id]
    followed = 0
    for turns in talks.values():
        for turn in sorted(turns)[1:]:
            before = turns[turn - 1]
            history = before + reply_to(before, 4)
            assert turns[turn][: len(history)] == history
            assert len(turns[turn]) > len(history)
            followed += 1
    assert followed == 2 * 2 * (2 + 2 + 6)


def test_every_request_is_joined_and_the_on_arm_is_proven(whole: tuple[Path, Starts]) -> None:
    runs = collect(whole[0])
    assert unjoined(runs) == []
    proofs = {(proof.arm, proof.repeat): proof for proof in map(prove, runs)}
    assert all(proof.holds for proof in proofs.values())
    assert proofs["on", 0].reads > 0 and proofs["off", 0].reads == 0


def test_turns_that_are_not_linked_are_computed_and_joined_all_the_same(tmp_path: Path) -> None:
    """The same engines as on; only nobody is told which conversation a request belongs to."""
    run(experiment(tmp_path, repeats=1, arms=(ARMS["unlinked"],)), Starts(), quiet)
    (found,) = collect(tmp_path)
    assert unjoined([found]) == [] and prove(found).holds
    assert {(one.decision, one.tokens_read) for one in found.joined} == {("miss", 0)}
    assert all(one.tokens_computed == one.record.input_num_tokens for one in found.joined)


def test_an_on_arm_that_reads_nothing_has_failed(tmp_path: Path) -> None:
    run(experiment(tmp_path, repeats=1), Starts(stay_off=True), quiet)
    proofs = {run.arm: prove(run) for run in collect(tmp_path)}
    assert proofs["off"].holds
    assert "nothing moved" in proofs["on"].problems[0]


@pytest.mark.parametrize("after", [1, 2, 9, 10, 25, 37, 41])
def test_interrupted_and_resumed_gives_the_same_records(
    whole: tuple[Path, Starts], tmp_path: Path, after: int
) -> None:
    """Whenever it comes, units that were whole stay, and only what is left is asked again."""
    made = experiment(tmp_path, trace=TRACE, clients=2)
    with pytest.raises(KeyboardInterrupt):
        run(made, Starts(), interrupting(after))
    kept = keys(tmp_path) if (tmp_path / RECORDS).exists() else []
    assert len(kept) <= after
    again = Starts()
    run(made, again, quiet)
    assert keys(tmp_path) == keys(whole[0])
    warm_up = 2 * 2 * len(again.started)
    assert sum(len(one.asked) for one in again.started) == len(keys(tmp_path)) - len(kept) + warm_up
    assert unjoined(collect(tmp_path)) == []


def test_a_line_torn_by_a_crash_is_measured_again(
    whole: tuple[Path, Starts], tmp_path: Path
) -> None:
    made = experiment(tmp_path, trace=TRACE, clients=2)
    run(made, Starts(), quiet)
    path = tmp_path / RECORDS
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    run(made, Starts(), quiet)
    assert keys(tmp_path) == keys(whole[0])


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run(experiment(tmp_path, repeats=1), Starts(), quiet)
    again = Starts()
    run(experiment(tmp_path, repeats=1), again, quiet)
    assert again.started == []


def test_results_of_another_workload_are_not_mixed_in(tmp_path: Path) -> None:
    run(experiment(tmp_path, repeats=1), Starts(), quiet)
    other = experiment(tmp_path, repeats=1, workload=replace(WORKLOAD, new_tokens=51))
    with pytest.raises(BenchError) as error:
        run(other, Starts(), quiet)
    text = str(error.value)
    assert str(tmp_path / PLAN) in text and "another workload" in text
    assert "'new_tokens': 50" in text and "'new_tokens': 51" in text and "--fresh" in text


def test_records_of_an_arm_that_is_not_asked_for_are_not_dropped(tmp_path: Path) -> None:
    run(experiment(tmp_path, repeats=1), Starts(), quiet)
    with pytest.raises(BenchError, match="another plan"):
        run(experiment(tmp_path, repeats=1, arms=(ARMS["off"],)), Starts(), quiet)
    assert {record.arm for record in read_records(tmp_path / RECORDS)} == {"off", "on"}


def test_a_server_that_refuses_ends_the_run_and_says_what_it_answered(tmp_path: Path) -> None:
    """The fake has no answer for what one engine is asked."""
    with pytest.raises(BenchError) as error:
        run(experiment(tmp_path, repeats=1, arms=(ARMS["single"],)), Starts(), quiet)
    assert "expected  status 200" in str(error.value) and "found     500" in str(error.value)


def test_a_request_that_fails_since_an_engine_has_ended_shows_that_engines_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(serving: FakeServing) -> None:
        raise ClusterError("decode-0 ended by itself")

    monkeypatch.setattr(FakeServing, "check_alive", ended)
    with pytest.raises(ClusterError, match="decode-0 ended by itself"):
        run(experiment(tmp_path, repeats=1, arms=(ARMS["single"],)), Starts(), quiet)


def test_arms_take_turns_and_every_other_repeat_goes_backwards() -> None:
    arms = [ARMS[name] for name in ("off", "on", "single")]
    named = [(repeat, arm.name) for repeat, arm in order(arms, 2)]
    assert named == [
        (0, "off"),
        (0, "on"),
        (0, "single"),
        (1, "single"),
        (1, "on"),
        (1, "off"),
    ]


def test_a_later_repeat_alone_is_asked_what_it_would_have_been_asked_in_a_whole_run(
    whole: tuple[Path, Starts], tmp_path: Path
) -> None:
    """For servers that one starts by hand, where arms can only take turns by repeats."""
    alone = Starts()
    arms = (ARMS["on"],)
    run(experiment(tmp_path, 1, trace=TRACE, clients=2, arms=arms, first_repeat=1), alone, quiet)
    assert keys(tmp_path) == [key for key in keys(whole[0]) if key[:2] == ("on", 1)]
    of_whole = {tuple(p) for one in whole[1].started for p in one.asked.values()}
    assert {tuple(p) for one in alone.started for p in one.asked.values()} <= of_whole


def test_only_a_folder_of_results_is_ever_deleted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").touch()
    with pytest.raises(BenchError, match="not deleted"):
        fresh(mine)
    assert (mine / "thesis.tex").exists()
    (mine / PLAN).write_text(json.dumps({}))
    fresh(mine)
    assert not mine.exists()
