"""Params that are not at hand: D is asked for them, and what it says is not trusted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from tests.router.conftest import MakeSetup, Setup
from tests.router.fake_engine import d_params, long_params
from tests.router.fake_leases import lease_id

KEY = "node-key"


async def small(make_setup: MakeSetup, duration_s: float | None = 60.0, **more: Any) -> Setup:
    """A router that has no params at hand, before a D that grants leases, or names turns only."""
    setup = await make_setup(max_kept_params=0, **more)
    leases = setup.decode[0].leases
    leases.duration_s = duration_s
    leases.names = True
    return setup


def offered(setup: Setup) -> list[Any]:
    asked = setup.prefill[0].asked
    return [one["kv_transfer_params"].get("remote_request_id") for one in asked]


def asked(setup: Setup, outcome: str) -> float:
    return setup.metric("bidir_router_params_asked_total", outcome=outcome)


@pytest.mark.parametrize("duration_s", [60.0, None])
async def test_d_is_asked_for_what_is_not_at_hand(
    make_setup: MakeSetup, duration_s: float | None
) -> None:
    """Also where it keeps turns for a fixed time."""
    setup = await small(make_setup, duration_s, engine_api_key=KEY)
    for _ in range(2):
        assert (await setup.ask(conversation_id="c"))[0] == 200
    assert offered(setup) == [None, "turn-1"]
    assert asked(setup, "found") == 1
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 1
    (call,) = [one for one in setup.decode[0].leases.calls if one.word == "read"]
    assert call.ids == [lease_id(1)] and call.headers["Authorization"] == f"Bearer {KEY}"


async def test_what_a_long_history_leaves_is_told_as_well(make_setup: MakeSetup) -> None:
    setup = await small(make_setup)
    setup.decode[0].keeps = long_params
    for _ in range(2):
        assert (await setup.ask(conversation_id="c"))[0] == 200
    found = setup.prefill[0].asked[1]["kv_transfer_params"]
    assert asked(setup, "found") == 1
    assert {**found, **long_params(1)} == {**found, "remote_host": "elsewhere"}


async def test_d_is_not_asked_for_what_is_at_hand(make_setup: MakeSetup) -> None:
    setup = await make_setup()
    setup.decode[0].leases.duration_s = 60.0
    for _ in range(3):
        await setup.ask(conversation_id="c")
    assert offered(setup) == [None, "turn-1", "turn-2"]
    assert [one for one in setup.decode[0].leases.calls if one.word == "read"] == []


async def test_the_least_recently_used_params_are_asked_for(make_setup: MakeSetup) -> None:
    setup = await make_setup(max_kept_params=1_000)
    setup.decode[0].leases.duration_s = 60.0
    for name in ("a", "b", "c"):
        await setup.ask(conversation_id=name)
    assert 0 < setup.metric("bidir_router_params_bytes") <= 1_000
    for name in ("c", "a"):
        await setup.ask(conversation_id=name)
    assert offered(setup)[3:] == ["turn-3", "turn-1"]
    assert asked(setup, "found") == 1


async def test_what_d_has_let_go_is_expired(make_setup: MakeSetup) -> None:
    setup = await small(make_setup)
    await setup.ask(conversation_id="c")
    setup.decode[0].leases.gone.add(lease_id(1))
    await setup.ask(conversation_id="c")
    assert offered(setup) == [None, None] and asked(setup, "expired") == 1
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="expired") == 1
    assert setup.decode[0].leases.released() == []


async def test_a_turn_that_nobody_can_be_asked_for_is_evicted(make_setup: MakeSetup) -> None:
    """A D that names no lease, as the base release's."""
    setup = await make_setup(max_kept_params=0)
    for _ in range(2):
        assert (await setup.ask(conversation_id="c"))[0] == 200
    assert offered(setup) == [None, None]
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="evicted") == 1


def told(**changed: Any) -> dict[str, Any]:
    return {**d_params(1), "lease_id": lease_id(1), "lease_duration": 60.0, **changed}


@pytest.mark.parametrize(
    ("status", "answer", "outcome"),
    [
        (500, {}, "peer_gone"),
        (302, {}, "peer_gone"),
        (200, [], "peer_gone"),
        (200, {}, "no_params"),
        (200, told(lease_id=lease_id(2)), "no_params"),
        (200, told(remote_block_ids=[[]]), "no_params"),
        (200, told(remote_port=1), "unsupported"),
        (200, told(remote_engine_id=7), "unsupported"),
    ],
)
async def test_an_answer_that_is_of_no_use_is_a_miss(
    make_setup: MakeSetup, status: int, answer: Any, outcome: str
) -> None:
    setup = await small(make_setup)
    await setup.ask(conversation_id="c")

    async def read(request: web.Request) -> web.Response:
        headers = {"Location": f"{setup.url}/v1/models"} if status == 302 else {}
        return web.json_response(answer, status=status, headers=headers)

    setup.decode[0].leases.read = read
    assert (await setup.ask(conversation_id="c"))[0] == 200
    assert offered(setup) == [None, None] and asked(setup, outcome) == 1
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason=outcome) == 1


async def test_a_d_that_does_not_answer_costs_a_second(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.bidir.router.turns.recall._LIMIT_S", 0.05)
    setup = await small(make_setup)
    await setup.ask(conversation_id="c")

    async def read(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError("it is not waited for")

    setup.decode[0].leases.read = read
    assert (await setup.ask(conversation_id="c"))[0] == 200
    assert asked(setup, "timeout") == 1 and offered(setup) == [None, None]
    setup.decode[0].leases.read = None
    # It may be there all the same.
    assert setup.metric("bidir_router_leases") == 1
