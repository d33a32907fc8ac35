"""Two P and two D behind the router, under load, while first a P and then a D is killed.

Then the D comes back, and is asked to end; and so is the P that is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx
import pytest
from vllm.bidir.router.turns.beginning import Beginning

from tests.e2e.conftest import compared, model_folder, report
from tests.e2e.oracle import CHAT, IDS, Compared, Kind, compare
from tests.e2e.turns import http, metric
from tests.shapes.load import Load, Told, begin, go_on, say, used
from tools.cluster import Cluster, ClusterOptions, Engine, RoleOptions, cluster
from tools.cluster.router import RouterProcess, router

__all__ = ["compared", "model_folder", "report"]

LEASE_S = 6.0
# P keeps for so long what no D reads: longer than a D takes to meet it on a busy machine.
HANDOVER_S = 10
CLIENTS = 5
# Conversations that are silent while D dies, and streams that it dies under: more than the clients'
# turns, so that least loaded gives some of them to each D.
RESTING, LONG = 6, 8
LONG_TOKENS = 200
WAIT_S = 60.0
# More than what is under way takes.
DRAIN_S = 30
FIRST_TURN = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(scope="module")
def four(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, report: Callable[[str], None]
) -> Iterator[Cluster]:
    options = ClusterOptions(
        model=model_folder,
        max_model_len=2048,
        patient=True,
        forked=True,
        kv_connector_extra_config={
            "kv_recompute_threshold": 0,
            "kv_lease_duration": HANDOVER_S,
        },
        prefill=RoleOptions(prefix_caching=True),
        decode=RoleOptions(kv_connector_extra_config={"decoder_kv_lease_duration": LEASE_S}),
        args=("--enable-prompt-tokens-details", "--shutdown-timeout", str(DRAIN_S)),
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    folder = tmp_path_factory.mktemp("two-and-two")
    with cluster(2, 2, options=options, log_folder=folder, report=report) as running:
        yield running


@dataclass
class Story:
    """What happened, in order. `nodes`: which D kept a resting conversation before one died.

    D's processes died between `d_died` and `d_was_dead`.
    """

    four: Cluster
    router: RouterProcess
    load: Load
    p_died: float = 0.0
    d_died: float = 0.0
    d_was_dead: float = 0.0
    nodes: dict[str, str] = field(default_factory=dict)
    long: list[Told] = field(default_factory=list)
    resting: dict[str, list[Told]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    up: dict[str, list[float]] = field(default_factory=dict)

    @property
    def survivors(self) -> tuple[Engine, Engine]:
        return self.four.prefill[1], self.four.decode[1]

    @property
    def all(self) -> list[Told]:
        return [
            *self.load.told,
            *self.long,
            *(told for two in self.resting.values() for told in two),
        ]


@pytest.fixture(scope="module")
def story(four: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The whole of it; the tests look at what it has left."""
    folder = tmp_path_factory.mktemp("two-and-two-router")
    # A D that has come back gets its full share at once.
    args = ("--slow-start", "0")
    with router(four.prefill, four.decode, folder, args=args, report=lambda line: None) as running:
        told = Story(four, running, Load(running, CLIENTS))
        with told.load.running():
            told.load.wait_for_turns(3 * CLIENTS, WAIT_S)
            told.p_died = time.monotonic()
            four.prefill[0].kill()
            told.load.wait_for_turns(3 * CLIENTS, WAIT_S)
            _rest(told)
            _kill_d_under_streams(told)
            told.load.wait_for_turns(3 * CLIENTS, WAIT_S)
            for _ in range(2):
                _come_back(told)
            _note_metrics(told)
        # It loads while the tests look at what there was without it.
        four.decode[0].start()
        yield told


def _rest(story: Story) -> None:
    """Conversations of one turn each, all at once, so that each D gets some; then silent."""

    def first(number: int) -> Told:
        kind = CHAT if number % 2 else IDS
        history = begin(kind, 900_000 + number)
        return say(story.router, f"rest-{number}", kind, history, stream=True)

    with ThreadPoolExecutor(RESTING) as pool, http() as client:
        for told in pool.map(first, range(RESTING)):
            name = told.conversation
            story.resting[name] = [told]
            (line,) = client.get(f"{story.router.url}/conversations/{name}").json()["lines"]
            assert line["kept"], line
            story.nodes[name] = line["node"]


@contextmanager
def _streams(story: Story, name: str) -> Iterator[list[Told]]:
    """Each has shown its first event, and is far from its end; what became of them comes last."""
    begun = [Event() for _ in range(LONG)]

    def stream(number: int) -> Told:
        history = begin(IDS, 800_000 + number)
        talk = f"{name}-{number}"
        return say(story.router, talk, IDS, history, True, LONG_TOKENS, begun[number].set)

    ended: list[Told] = []
    with ThreadPoolExecutor(LONG) as pool:
        streams = [pool.submit(stream, number) for number in range(LONG)]
        assert all(one.wait(WAIT_S) for one in begun)
        yield ended
        ended += [one.result() for one in streams]


def _kill_d_under_streams(story: Story) -> None:
    with _streams(story, "long") as story.long:
        story.d_died = time.monotonic()
        story.four.decode[0].kill()
        story.d_was_dead = time.monotonic()
    dead = story.four.decode[0]
    node = f"{dead.host}:{dead.port}"
    _wait_until(lambda: not metric(story.router, "bidir_router_node_up", node=node))


def _wait_until(so: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not so():
        assert time.monotonic() < end, "it does not come to that"
        time.sleep(0.1)


def _come_back(story: Story) -> None:
    """The next turn of each resting conversation."""
    for number, (name, before) in enumerate(story.resting.items()):
        last = before[-1]
        history = go_on(last.kind, last.history, last.said, 910_000 + 100 * len(before) + number)
        before.append(say(story.router, name, last.kind, history, number % 2 == 0))


def _note_metrics(story: Story) -> None:
    for name, labels in {
        "hit": {"outcome": "hit"},
        "peer_gone": {"outcome": "miss", "reason": "peer_gone"},
    }.items():
        story.metrics[name] = metric(story.router, "bidir_router_turns_total", **labels)
    for role, engines in (("prefill", story.four.prefill), ("decode", story.four.decode)):
        story.up[role] = [
            metric(story.router, "bidir_router_node_up", role=role, node=f"{one.host}:{one.port}")
            for one in engines
        ]


def test_nothing_fails_that_had_not_begun_to_stream(story: Story) -> None:
    failed = [str(told) for told in story.all if told.began is None]
    assert not failed, failed
    assert all(told.status == 200 for told in story.all)
    after = [told for told in story.load.told if told.sent > story.d_was_dead]
    assert {told.stream for told in after} == {True, False}
    assert {told.kind.name for told in after} == {IDS.name, CHAT.name}


def test_streams_that_had_begun_on_the_dead_d_end_with_an_error_event(story: Story) -> None:
    broken = [told for told in story.all if not told.whole]
    assert broken and all(told.stream and told.code == 502 for told in broken), broken
    for told in broken:
        assert told.began is not None and told.began < story.d_was_dead
        assert story.d_died < told.ended
    assert 0 < sum(told.whole for told in story.long) < LONG


def test_p_dies_without_any_client_seeing_it(story: Story) -> None:
    between = [told for told in story.load.told if told.sent < story.d_died - 5]
    around = [told for told in between if told.sent < story.p_died < told.ended]
    assert around, "turns were under way when P died"
    assert all(told.whole for told in between)


def test_what_is_answered_after_each_death_is_right(story: Story, compared: Compared) -> None:
    """As the same prompts sent to an engine alone, whose prefix cache they cannot meet."""
    died = (story.p_died, story.d_died)
    told = [one for one in story.load.told if one.whole and one.ended > story.p_died]
    # Those under way at each death and those right after it.
    near = [sorted(told, key=lambda one: abs(one.ended - at))[:6] for at in died]
    rest = [told[-1] for told in story.resting.values()]
    for one in [*near[0], *near[1], *rest]:
        answer, d = _answer(one), story.survivors[1]
        try:
            compare(one.kind, d, one.history, answer, True, compared, ignore_eos=True)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{_evidence(story, one)}") from error


def _evidence(story: Story, told: Told) -> str:
    """When it was served, and what the logs say of it and of transfers that went wrong."""
    times = (told.sent, told.began, told.ended, story.p_died, story.d_died, story.d_was_dead)
    words = (told.request_id, "handover req=", "invalid KV", "expired KV", "given up", "Failing")
    lines = [f"{told}, {told.reuse}; sent, began, ended, P died, D died, D was dead: {times}"]
    logs = [
        story.router.log_path,
        *(one.log_path for one in (*story.four.prefill, *story.four.decode)),
    ]
    for log in logs:
        found = log.read_text(errors="replace").splitlines()
        lines += [f"{log.stem}: {line}" for line in found if any(word in line for word in words)]
    return "\n".join(lines)


def _answer(told: Told) -> dict[str, object]:
    if told.kind is IDS:
        return {"choices": [{"token_ids": told.said}]}
    return {"choices": [{"message": {"content": "".join(told.said)}}]}


def test_what_the_dead_d_kept_is_a_miss_and_the_others_go_on(story: Story) -> None:
    dead, lives = (f"{one.host}:{one.port}" for one in story.four.decode)
    assert set(story.nodes.values()) == {dead, lives}
    for name, (_, second, third) in story.resting.items():
        if story.nodes[name] == dead:
            # What tokens there are P has from its own prefix cache.
            assert second.reuse.startswith("miss; reason=peer_gone; tokens="), name
        else:
            assert second.reuse.startswith("hit; tokens="), name
        assert third.reuse.startswith("hit; tokens="), name
        assert int(third.reuse.rpartition("=")[2]) > 300, name


def test_the_routers_metrics_say_what_happened(story: Story) -> None:
    kept_by_the_dead = sum(
        node == f"{story.four.decode[0].host}:{story.four.decode[0].port}"
        for node in story.nodes.values()
    )
    assert story.metrics["peer_gone"] >= kept_by_the_dead
    assert story.metrics["hit"] > 0
    for role in ("prefill", "decode"):
        assert story.up[role] == [0, 1]
        failed = metric(story.router, "bidir_router_leg_failures_total", leg=role)
        assert failed > 0
        assert metric(story.router, "bidir_router_retries_total", role=role) > 0
    # There was a P at all times. What one had handed over as it died, D could not read any more.
    assert metric(story.router, "bidir_router_decode_alone_total", reason="peer_gone") == 0


def test_nothing_stays_kept_for_the_dead(story: Story) -> None:
    """Once the conversations are over, and what the dead would have read has run out."""
    p, d = story.survivors
    with http() as client:
        names = {told.conversation for told in story.all}
        for name in names:
            client.delete(f"{story.router.url}/conversations/{name}")
    end = time.monotonic() + LEASE_S + HANDOVER_S + 10
    for engine in (p, d):
        while used(engine) > 0:
            assert time.monotonic() < end, f"{engine.name} keeps blocks for nobody"
            time.sleep(0.5)
        assert metric(engine, "vllm:num_requests_running") == 0
        assert metric(engine, "vllm:num_requests_waiting") == 0
        text = engine.log_path.read_text(encoding="utf-8", errors="replace")
        assert "AssertionError" not in text and "EngineDeadError" not in text


@dataclass
class Drained:
    """What clients saw while a D and then a P were asked to end.

    `on_d`: requests under way on D as it was asked; `unread`: some for what P had computed for no
    D; `times`: when each role was asked, and when it had ended.
    """

    p: Engine
    d: Engine
    load: Load
    unread: list[tuple[Kind, dict[str, object]]]
    long: list[Told] = field(default_factory=list)
    on_d: float = 0.0
    times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def end(self, engine: Engine) -> None:
        asked = time.monotonic()
        engine.ask_to_stop()
        _wait_until(lambda: not engine.is_alive())
        self.times[engine.role] = asked, time.monotonic()


@pytest.fixture(scope="module")
def drained(story: Story) -> Drained:
    """One D is left in the end: it serves alone."""
    p, d = story.four.prefill[1], story.four.decode[0]
    d.wait()
    _wait_until(lambda: metric(story.router, "bidir_router_node_up", node=f"{d.host}:{d.port}"))
    told = Drained(p, d, Load(story.router, CLIENTS, "drained"), _hand_over(p))
    with told.load.running():
        told.load.wait_for_turns(CLIENTS, WAIT_S)
        with _streams(story, "drained-long") as told.long:
            told.on_d = metric(d, "vllm:num_requests_running")
            told.end(d)
        told.end(p)
        told.load.wait_for_turns(CLIENTS, WAIT_S)
    return told


def _hand_over(p: Engine) -> list[tuple[Kind, dict[str, object]]]:
    unread = []
    for number, kind in enumerate((IDS, CHAT)):
        history = kind.body(begin(kind, 700_000 + number))
        body = {"model": p.model, "max_tokens": 4, "temperature": 0, **history}
        handed = _post(p, kind, {**body, "max_tokens": 1, "kv_transfer_params": FIRST_TURN})
        params = handed.json()["kv_transfer_params"]
        unread.append((kind, {**body, "stream": True, "kv_transfer_params": params}))
    return unread


def test_no_client_sees_that_a_d_and_a_p_are_asked_to_end(drained: Drained) -> None:
    told = [*drained.load.told, *drained.long]
    broken = [str(one) for one in told if not one.whole]
    assert not broken, broken
    assert all(len(one.said) == LONG_TOKENS for one in drained.long)
    asked, ended = drained.times["decode"]
    meanwhile = [one for one in drained.load.told if asked < one.sent < ended]
    assert {one.kind.name for one in meanwhile} == {IDS.name, CHAT.name}
    assert {one.stream for one in meanwhile} == {True, False}
    asked, ended = drained.times["prefill"]
    assert any(asked < one.sent < ended for one in drained.load.told)


def test_they_end_by_themselves_when_they_have_finished(drained: Drained) -> None:
    assert drained.on_d > 0
    for engine in (drained.p, drained.d):
        text = engine.log_path.read_text(encoding="utf-8", errors="replace")
        assert "mode=drain" in text and "Application shutdown complete" in text
        assert "force killing" not in text


def test_what_d_says_of_a_lost_handover_the_router_takes_for_a_failure(
    story: Story, drained: Drained
) -> None:
    """In a stream, after its 200: with the first event, or the one after a chat's opening."""
    d = story.survivors[1]
    for kind, body in drained.unread:
        answer = _post(d, kind, body)
        if answer.status_code == httpx.codes.OK:
            beginning = Beginning(kind.path)
            beginning.feed(answer.content)
            failed = beginning.failed
            assert failed is not None and failed.status == 500, answer.text
        else:
            assert answer.status_code == 500


def _post(engine: Engine, kind: Kind, body: dict[str, object]) -> httpx.Response:
    with http() as client:
        return client.post(engine.url + kind.path, json=body)
