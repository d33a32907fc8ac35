"""Where nothing can be read back the answers are right, and the reason is counted and logged."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import WITHOUT_PREFIX_CACHE, Route
from tests.e2e.turns import (
    FIELD,
    MODEL,
    KvCounters,
    Turn,
    ask,
    converse,
    http,
    metric,
    outcomes,
    tokens,
)
from tools.bench.stock import stock_tree
from tools.cluster import Cluster, ClusterOptions, Engine, PortReservations
from tools.cluster.command import EngineSpec
from tools.cluster.options import Role
from tools.cluster.placement import cpu_slots
from tools.cluster.readiness import wait_until_ready
from tools.cluster.router import RouterProcess

QUESTIONS = [tokens(count, seed) for seed, count in enumerate((200, 70), start=50)]
ROLES: tuple[Role, ...] = ("prefill", "decode")
# An engine that keeps blocks never sleeps, and would slow down what runs beside it.
KEPT_S = 20


@dataclass(frozen=True)
class Variant:
    """A prefill and a decode engine, and a router that was there before them.

    ``early``: what the router answered while no engine was up.
    """

    engines: Cluster
    router: RouterProcess
    early: httpx.Response

    @property
    def prefill(self) -> Engine:
        return self.engines.prefill[0]

    @property
    def decode(self) -> Engine:
        return self.engines.decode[0]


@pytest.fixture(scope="module")
def base_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose ``vllm`` is that of the pinned base wheel, every file of it."""
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        yield stock_tree("cpu", Path(folder) / "stock", print)


@pytest.fixture(scope="module", params=["off", "base", "base_prefill"])
def variant(
    request: pytest.FixtureRequest,
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    report: Callable[[str], None],
    route: Route,
) -> Iterator[Variant]:
    """``off``: the option is off on P and D. The others have it on; ``base``: D is the unpatched
    release, ``base_prefill``: P is.
    """
    options = ClusterOptions(
        model=model_folder,
        forked=True,
        prefill=WITHOUT_PREFIX_CACHE,
        decode=WITHOUT_PREFIX_CACHE,
    )
    if request.param == "off":
        options = replace(options, bidirectional=False)
    else:
        stock: Path = request.getfixturevalue("base_release")
        unpatched = replace(WITHOUT_PREFIX_CACHE, env={"PYTHONPATH": str(stock)})
        options = replace(options, kv_connector_extra_config={"decoder_kv_blocks_ttl": KEPT_S})
        if request.param == "base":
            options = replace(options, decode=unpatched)
        else:
            options = replace(options, prefill=unpatched)
    logs = tmp_path_factory.mktemp(f"{request.param}-logs")
    with ExitStack() as stack:
        ports = stack.enter_context(PortReservations())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="engines-")))
        engines = [
            Engine(
                EngineSpec(
                    name=f"{role}-0",
                    role=role,
                    device="cpu",
                    tensor_parallel=1,
                    slot=slot,
                    port=ports.reserve(),
                    side_channel_port=ports.reserve(),
                    scratch=scratch,
                    options=options,
                ),
                logs,
                report,
            )
            for role, slot in zip(ROLES, cpu_slots(len(ROLES), 1), strict=True)
        ]
        running = Cluster(engines, logs)
        router = stack.enter_context(route(running))
        with http() as client:
            body = {"model": MODEL, "prompt": [1, 2, 3]}
            early = client.post(f"{router.url}/v1/completions", json=body)
        for engine in engines:
            stack.callback(engine.stop)
        for engine in engines:
            engine.start()
            report(
                f"{request.param} {engine.name}: starting at {engine.url}, log {engine.log_path}"
            )
        wait_until_ready(engines, options.start_timeout_s, report)
        yield Variant(running, router, early)


def test_router_waits_for_its_engines_and_then_serves(variant: Variant) -> None:
    """A router that is started first refuses in OpenAI's shape, says so, and serves later."""
    assert variant.early.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert variant.early.headers["Retry-After"] == "1"
    error = variant.early.json()["error"]
    assert error["type"] == "server_error" and "decode node" in error["message"]
    names = [f"{engine.role} {engine.host}:{engine.port}" for engine in variant.engines.engines]
    log = variant.router.log_text
    assert f"waiting for nodes that do not answer yet: {', '.join(names)}" in log
    first = ask(variant.router, tokens(20, 1))
    assert first.generated == ask(variant.decode, first.prompt).generated


@pytest.mark.parametrize("variant", ["off", "base"], indirect=True)
def test_streamed_turns_are_right_and_say_why_nothing_is_read(
    variant: Variant, route: Route
) -> None:
    """P computes the second turn: D has not said where the first one's KV is."""
    before = KvCounters.of(variant.prefill)
    with route(variant.engines) as router:
        turns = list(converse(router, QUESTIONS, conversation_id="streamed"))
        assert outcomes(router) == {"first_turn": 1, "no_params": 1}
        assert "cache MISS (no_params)" in router.log_text
    counted = KvCounters.of(variant.prefill).since(before)
    assert (counted.read, counted.computed) == (0, sum(len(turn.prompt) for turn in turns))
    _assert_as_alone(variant, turns)


@pytest.mark.parametrize("variant", ["off", "base"], indirect=True)
def test_whole_turns_are_right(variant: Variant, route: Route) -> None:
    """Not streamed, also the base release's D says where its KV is; off, nothing does."""
    with route(variant.engines) as router:
        turns = list(converse(router, QUESTIONS, conversation_id="whole", stream=False))
        off = not variant.decode.spec.options.bidirectional
        assert outcomes(router) == {"first_turn": 1, "no_params" if off else "hit": 1}
    assert not any(FIELD in turn.wire for turn in turns)
    _assert_as_alone(variant, turns)


@pytest.mark.parametrize("variant", ["base"], indirect=True)
def test_what_a_stock_d_cannot_prove_is_computed(variant: Variant, route: Route) -> None:
    """Its params carry no proof: P reads nothing by count, counts why, and the turn succeeds."""
    before = KvCounters.of(variant.prefill)
    labels = {"outcome": "recompute", "reason": "no_proof"}
    refused = metric(variant.prefill, "vllm:bidir_read_back_total", **labels)
    with route(variant.engines) as router:
        turns = list(converse(router, QUESTIONS, conversation_id="unproven", stream=False))
        assert outcomes(router) == {"first_turn": 1, "hit": 1}
        assert metric(router, "bidir_router_leg_failures_total") == 0
    assert metric(variant.prefill, "vllm:bidir_read_back_total", **labels) == refused + 1
    assert "outcome=recompute reason=no_proof" in variant.prefill.log_path.read_text("utf-8")
    assert KvCounters.of(variant.prefill).since(before).moved == 0
    _assert_as_alone(variant, turns)


@pytest.mark.parametrize("variant", ["base_prefill"], indirect=True)
def test_a_stock_p_is_never_given_what_d_kept(variant: Variant, route: Route) -> None:
    """It would read by count. The handover to our D works as ever, and the text is right."""
    with route(variant.engines) as router:
        turns = list(converse(router, QUESTIONS, conversation_id="stock-p"))
        assert outcomes(router) == {"first_turn": 1, "hit": 1}
        assert metric(router, "bidir_router_withheld_total") == 1
    assert KvCounters.of(variant.prefill).moved == 0
    assert KvCounters.of(variant.decode).moved > 0
    _assert_as_alone(variant, turns)


@pytest.mark.parametrize("variant", ["base"], indirect=True)
def test_base_decode_engine_is_unpatched(variant: Variant) -> None:
    """The tests above are about the release itself: its stream lacks what its answer has."""
    ask_to_keep = {"do_remote_prefill": False, "do_remote_decode": False}
    prompt = tokens(20, 2)
    assert FIELD in ask(variant.decode, prompt, stream=False, kv_transfer_params=ask_to_keep).wire
    assert FIELD not in ask(variant.decode, prompt, kv_transfer_params=ask_to_keep).wire


def _assert_as_alone(variant: Variant, turns: list[Turn]) -> None:
    for turn in turns:
        assert ask(variant.decode, turn.prompt).generated == turn.generated
