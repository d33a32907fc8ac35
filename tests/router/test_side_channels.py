"""A node's params may name its own side channel and no other."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.nodes.address import Address
from vllm.bidir.router.nodes.health import Health, HealthRules
from vllm.bidir.router.nodes.node import Node
from vllm.bidir.router.nodes.side_channels import SideChannel, SideChannels, parse_side_channel

from tests.router.conftest import BODY, MakeSetup, Setup, another_router
from tests.router.fake_engine import P_PARAMS, FakeEngine, d_params


def params(port: Any = 5600, engine: Any = "e", **more: Any) -> dict[str, Any]:
    return {"remote_engine_id": engine, "remote_host": "x", "remote_port": port, **more}


def admitted(channels: SideChannels, given: dict[str, Any]) -> bool:
    return channels.admit(given, "n:1", "n") is not None


def test_the_host_is_always_the_one_that_the_router_knows() -> None:
    assert SideChannels({}).admit(params(), "n:1", "n") == {**params(), "remote_host": "n"}
    named = SideChannels({"n:1": SideChannel("rdma")})
    assert named.admit(params(), "n:1", "n") == {**params(), "remote_host": "rdma"}


def test_an_engine_keeps_its_port_and_ranks_have_their_own() -> None:
    channels = SideChannels({})
    assert admitted(channels, params(5600, "e_dp0")) and admitted(channels, params(5601, "e_dp1"))
    assert not admitted(channels, params(5601, "e_dp0"))
    assert admitted(channels, params(5600, "e_dp0"))


def test_an_engine_that_has_moved_is_known_again_with_its_second_answer() -> None:
    channels = SideChannels({})
    assert admitted(channels, params(5600))
    assert not admitted(channels, params(5700))
    assert admitted(channels, params(5700)) and not admitted(channels, params(5600))


def test_a_host_that_an_engine_has_not_named_before_is_dropped() -> None:
    for given in ({}, {"n:1": SideChannel("rdma", range(5600, 5602))}):
        channels = SideChannels(given)
        assert admitted(channels, params(5600)) and admitted(channels, params(5601, "e2"))
        other = {**params(5600), "remote_host": "evil"}
        assert not admitted(channels, other) and admitted(channels, params(5600))
        assert not admitted(channels, other) and admitted(channels, other)


@pytest.mark.parametrize("host", ["", 7, True, ["n"], "x" * 256])
def test_a_host_that_is_none_is_dropped(host: Any) -> None:
    assert not admitted(SideChannels({}), {**params(), "remote_host": host})


def test_another_host_is_told_of_once_and_not_which(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    channels = SideChannels({})
    for _ in range(2):
        assert admitted(channels, {**params(), "remote_host": "podname"})
        assert admitted(channels, {**params(engine="e2"), "remote_host": "n"})
    assert caplog.text.count("of n:1 names another host") == 1 and "podname" not in caplog.text


def test_an_engine_is_one_nodes_until_that_is_gone() -> None:
    channels = SideChannels({"given:1": SideChannel("rdma", range(5600, 5602))})
    node = Node("decode", Address("n", 1), Health(HealthRules(), lambda: 0.0))
    channels.joined(node)
    assert admitted(channels, params(engine="e_dp0"))
    for thief in ("other:1", "given:1"):
        for _ in range(3):
            assert channels.admit(params(engine="e_dp0"), thief, "x") is None
        assert channels.recognise(params(engine="e_dp0"), thief, "x") is None
        assert channels.admit(params(engine=f"e_{thief}"), thief, "x") is not None
    assert admitted(channels, params(engine="e_dp0")) and admitted(channels, params(engine="e_dp1"))
    assert not admitted(channels, params(engine="e_given:1"))
    channels.left(node)
    assert channels.admit(params(engine="e_dp0"), "other:1", "x") is None
    channels.gone(node)
    assert channels.admit(params(engine="e_dp0"), "other:1", "x") is not None


def test_odd_ports_that_differ_each_time_never_move_it() -> None:
    channels = SideChannels({})
    assert admitted(channels, params(5600))
    assert not any(admitted(channels, params(port)) for port in range(1, 50))
    assert admitted(channels, params(5600))


def test_named_ports_are_the_only_ones() -> None:
    channels = SideChannels({"n:1": SideChannel("n", range(5600, 5602))})
    assert admitted(channels, params(5600)) and admitted(channels, params(5601))
    assert not admitted(channels, params(5602))


@pytest.mark.parametrize("port", [None, 0, -1, 65536, "5600", True, 5600.0, [5600]])
def test_a_port_that_is_none_is_dropped(port: Any) -> None:
    assert not admitted(SideChannels({}), params(port, remote_block_ids=[[1]]))


@pytest.mark.parametrize("engine", [None, "", 7, "x" * 513])
def test_an_engine_id_that_is_none_is_dropped(engine: Any) -> None:
    assert not admitted(SideChannels({}), params(engine=engine))


def test_params_that_name_nothing_pass() -> None:
    assert SideChannels({}).admit({"reason": "budget"}, "n:1", "n") == {"reason": "budget"}


def test_memory_is_bounded_whatever_engine_ids_come() -> None:
    channels = SideChannels({})
    for number in range(1000):
        admitted(channels, params(engine=f"e{number}"))
    assert len(channels._engines["n:1"]) == 256


@pytest.mark.parametrize(
    ("text", "node", "channel"),
    [
        ("n:8100=rdma", "n:8100", SideChannel("rdma")),
        ("n:8100=10.0.0.9:5600", "n:8100", SideChannel("10.0.0.9", range(5600, 5601))),
        ("[::1]:8100=[fd00::9]:5600-5607", "[::1]:8100", SideChannel("fd00::9", range(5600, 5608))),
    ],
)
def test_an_option_names_node_host_and_ports(text: str, node: str, channel: SideChannel) -> None:
    assert parse_side_channel(text) == (node, channel)


@pytest.mark.parametrize("text", ["", "n", "n=", "=h", "n=h:", "n=h:0", "n=h:9-8", "n=h:70000"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"NODE=HOST|ports lie"):
        parse_side_channel(text)


def moves(engine: FakeEngine, own: dict[str, Any], ports: list[int]) -> None:
    """The engine names these ports, one a turn."""

    async def script(request: web.Request, body: dict[str, Any]) -> web.Response:
        moved = {**own, "remote_port": ports.pop(0)}
        return web.json_response({"choices": [], "kv_transfer_params": moved})

    engine.script = script


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_what_names_another_side_channel_is_dropped_and_counted(
    setup: Setup, leg: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = P_PARAMS if leg == "prefill" else d_params(1)
    moves(getattr(setup, leg)[0], own, [5600, 6666, 5600, 5600])
    said = []
    for _ in range(4):
        body = {**BODY, "conversation_id": "c"}
        async with setup.client.post(setup.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            said.append(response.headers["x-kv-reuse"].split(";")[0])
    assert said == ["miss", "miss" if leg == "prefill" else "hit", "hit", "hit"]
    assert setup.metric("bidir_router_params_dropped_total", leg=leg) == 1
    to_d = [asked.get("kv_transfer_params") for asked in setup.decode[0].asked]
    offered = [a["kv_transfer_params"]["remote_port"] for a in setup.prefill[0].asked]
    if leg == "prefill":
        assert [params is None for params in to_d] == [False, True, False, False]
    else:
        assert offered == [None, 5600, 5600, 5600]
    assert "names another side channel" in caplog.text and "6666" not in caplog.text


async def test_two_nodes_with_one_engine_id_do_not_lead_each_other_astray(
    make_setup: MakeSetup,
) -> None:
    setup = await make_setup(decode=2)
    setup.decode[1].engine_id = setup.decode[0].engine_id
    for _ in range(2):
        for name in ("a", "b"):
            assert (await setup.ask(conversation_id=name))[0] == 200
    assert setup.metric("bidir_router_params_dropped_total", leg="decode") == 2
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 1


@pytest.mark.parametrize("named", ["127.0.0.1", "elsewhere"])
async def test_hosts_that_are_replaced_are_counted(setup: Setup, named: str) -> None:
    for engine, own in ((setup.prefill[0], P_PARAMS), (setup.decode[0], d_params(1))):
        moves(engine, {**own, "remote_host": named}, [5600])
    assert (await setup.ask())[0] == 200
    for leg in ("prefill", "decode"):
        counted = setup.metric("bidir_router_hosts_replaced_total", leg=leg)
        assert counted == (named == "elsewhere")


async def test_other_nodes_are_sent_where_the_option_says(setup: Setup) -> None:
    prefill, decode = setup.prefill[0], setup.decode[0]
    named = {
        str(prefill.address): SideChannel("p.rdma"),
        str(decode.address): SideChannel("d.rdma", range(5700, 5701)),
    }
    async with another_router(setup, security=Security(side_channels=named)) as other:
        for _ in range(2):
            assert (await other.ask(conversation_id="c"))[0] == 200
    assert decode.asked[0]["kv_transfer_params"]["remote_host"] == "p.rdma"
    assert prefill.asked[1]["kv_transfer_params"]["remote_host"] == "d.rdma"


def test_a_node_that_goes_takes_nothing_with_it_from_another_of_its_name() -> None:
    channels = SideChannels({})
    old, new = (Node("decode", Address("n", 1), Health(HealthRules(), lambda: 0.0)) for _ in "ab")
    channels.joined(old)
    assert admitted(channels, params(5600))
    channels.joined(new)
    channels.gone(old)
    assert not admitted(channels, params(5700))
    channels.gone(new)
    assert admitted(channels, params(5700))


def test_a_node_that_has_gone_may_come_back_as_another_engine() -> None:
    channels = SideChannels({})
    assert admitted(channels, params(5600)) and not admitted(channels, params(5700))
    channels = SideChannels({})
    assert admitted(channels, params(5600))
    channels.gone(Node("decode", Address("n", 1), Health(HealthRules(), lambda: 0.0)))
    assert admitted(channels, params(5700))
