"""Nodes come and go with the file and the names that list them, and no stream is dropped."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from vllm.bidir.router.clients.security import Security
from vllm.bidir.router.nodes import discovery
from vllm.bidir.router.nodes.address import Address, parse_address
from vllm.bidir.router.nodes.discovery import NodeList, read_node_list
from vllm.bidir.router.options import RouterOptions, parse

from tests.router.conftest import MakeSetup, Setup, until
from tests.router.fake_engine import FakeEngine, event
from tests.router.fake_leases import lease_id
from tests.router.tls import make_certificate

LONG_S = 60.0


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOK_S", 0.05)


@pytest.fixture
async def another() -> AsyncIterator[FakeEngine]:
    """A decode node that is not on the list at first."""
    engine = await FakeEngine("decode", "another").start()
    yield engine
    await engine.stop()


def write(path: Path, setup: Setup, *decode: FakeEngine) -> None:
    lines = ["prefill:", *(f"- '{one.address}'" for one in setup.prefill)]
    lines += ["decode:", *(f"- '{one.address}'" for one in decode)]
    path.write_text("\n".join(lines))


async def followed(make_setup: MakeSetup, path: Path, **options: Any) -> Setup:
    """A router that follows a file, which does not exist yet."""
    return await make_setup(file=path, **options)


def names(setup: Setup) -> list[str]:
    return [node.name for node in setup.router.decode.nodes]


def test_a_list_names_both_roles(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("prefill: ['dns:p.svc:1']\ndecode:\n- d:2\n- '[::1]:3'\n")
    assert read_node_list(path) == NodeList(
        (Address("p.svc", 1, many=True),), (Address("d", 2), Address("::1", 3))
    )
    path.write_text("decode: [d:2]")
    assert read_node_list(path) == NodeList((), (Address("d", 2),))
    options = parse(["--nodes", str(path), "--dns-interval", "3"])
    assert (options.prefill, options.decode) == ((), (Address("d", 2),))
    assert (options.nodes.file, options.nodes.dns_interval) == (path, 3.0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must be a mapping"),
        ("[]", "must be a mapping"),
        ("prefil: []", "must be a mapping"),
        ("decode: d:1", "`decode` must be a list"),
        ("decode: [1]", "must be text"),
        ("decode: [d:1, d:1]", "`decode`: d:1 is named twice"),
        ("decode: [d:1, https://d:1]", "`decode`: d:1 is named twice"),
        ("decode: [d]\nprefill: [p]", "`prefill`: 'p' does not end in a port; write host:port; `d"),
        ("decode: [", "is not YAML"),
        ("\x00", "is not YAML"),
        ("a: !!python/object:os.system x", "is not YAML"),
        ("x" * 2_000_000, "is larger than"),
    ],
)
def test_a_list_that_is_none_is_refused_at_the_start(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        parse(["--nodes", str(path)])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"--nodes {path} " in said and complaint in said


def test_flags_and_a_file_are_not_mixed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--nodes", "f", "--decoder-host", "d"])
    assert "not by both" in capsys.readouterr().err


def test_flags_take_ipv6_and_names_of_many() -> None:
    argv = ["--prefiller-hosts", "[::1]", "::2", "dns:p.svc", "--prefiller-ports", "1", "2", "3"]
    assert parse(argv) == RouterOptions(
        prefill=(Address("::1", 1), Address("::2", 2), Address("p.svc", 3, many=True))
    )


async def test_a_node_that_is_added_is_given_turns(
    make_setup: MakeSetup, another: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path, slow_start=0.0)
    write(path, setup, setup.decode[0], another)
    await until(lambda: len(setup.router.decode.usable()) == 2)
    for _ in range(4):
        assert (await setup.ask())[0] == 200
    assert len(another.asked) == len(setup.decode[0].asked) == 2


async def test_a_stream_goes_on_where_its_node_is_removed_and_nothing_is_kept(
    make_setup: MakeSetup, another: FakeEngine, tmp_path: Path
) -> None:
    """Leases of the past are given back at once, that of the running turn when it has ended."""
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path)
    old = setup.decode[0]
    old.leases.duration_s = LONG_S
    for name in ("idle", "c"):
        await setup.ask(conversation_id=name)
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event("first"))
        await may_end.wait()
        told = {"remote_block_ids": [[1]], "remote_engine_id": "slow", "remote_port": 5600}
        chunk = {"choices": [], "kv_transfer_params": told}
        chunk["kv_transfer_params"] |= old.leases.terms(3)
        await response.write(event(chunk) + event("[DONE]"))
        return response

    old.script = slow
    asking = asyncio.create_task(setup.ask(conversation_id="c", stream=True))
    await until(lambda: len(old.asked) == 3)
    write(path, setup, another)
    await until(lambda: set(old.leases.released()) == {lease_id(1), lease_id(2)})
    assert names(setup) == [str(another.address)] and not asking.done()
    may_end.set()
    status, body = await asking
    assert status == 200 and body.endswith(event("[DONE]"))
    await until(lambda: lease_id(3) in old.leases.released())
    assert setup.metric("bidir_router_lease_releases_total", reason="drained") == 3
    assert setup.metric("bidir_router_leases") == 0
    for name in ("idle", "c"):
        await setup.ask(conversation_id=name)
    assert len(another.asked) == 2
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="peer_gone") == 2
    await until(lambda: not setup.router.decode.draining)


async def test_a_node_that_comes_back_is_renewed_again(
    make_setup: MakeSetup, another: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path)
    back = setup.decode[0]
    back.leases.duration_s = 0.3
    await setup.ask(conversation_id="a")
    write(path, setup, another)
    await until(lambda: back.leases.released() == [lease_id(1)])
    await until(lambda: setup.metric("bidir_router_leases") == 0)
    write(path, setup, back)
    await until(lambda: names(setup) == [str(back.address)])
    await setup.ask(conversation_id="b")
    await until(lambda: [lease_id(2)] in back.leases.renewed())
    assert (await setup.ask(conversation_id="b"))[0] == 200
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 1


async def test_leases_of_a_node_that_was_added_are_renewed(
    make_setup: MakeSetup, another: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path)
    another.leases.duration_s = 0.3
    write(path, setup, another)
    await until(lambda: names(setup) == [str(another.address)])
    await setup.ask(conversation_id="c")
    await until(lambda: bool(another.leases.renewed()))


@pytest.mark.parametrize("busy", [False, True])
async def test_leases_go_on_where_a_node_is_spoken_to_in_another_way(
    make_setup: MakeSetup, busy: bool
) -> None:
    """With TLS now, say: the node before leaves when the other is there under its name."""
    setup = await make_setup()
    engine = setup.decode[0]
    engine.leases.duration_s = 0.3
    now = engine.address
    # A router that has asked over another scheme until now: what it has said does not count here.
    before = replace(now, scheme="HTTP")
    setup.router.decode.set_addresses([before])
    await setup.ask(conversation_id="a")
    may_end = asyncio.Event()

    async def slow(request: web.Request, body: dict[str, Any]) -> None:
        await may_end.wait()

    engine.script = slow
    asking = [asyncio.create_task(setup.ask())] if busy else []
    await until(lambda: len(engine.asked) == 1 + busy)
    setup.router.decode.set_addresses([now])
    async with setup.client.get(setup.url + "/metrics") as response:
        gauges = (await response.text()).count(f'node_up{{node="{now}",role="decode"}}')
    assert gauges == 1
    may_end.set()
    await asyncio.gather(*asking)
    await until(lambda: not setup.router.decode.draining)
    seen = len(engine.leases.renewed())
    await until(lambda: [lease_id(1)] in engine.leases.renewed()[seen:])
    assert lease_id(1) not in engine.leases.released()
    assert (await setup.ask(conversation_id="a"))[0] == 200
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 1


async def test_a_list_that_cannot_be_used_changes_nothing(
    make_setup: MakeSetup, another: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path)
    before = names(setup)
    path.write_text("decode: [")
    await until(lambda: setup.metric("bidir_router_node_list_errors_total") == 1)
    assert "the nodes stay as they were" in caplog.text
    path.unlink()
    await asyncio.sleep(0.15)
    assert names(setup) == before
    assert setup.metric("bidir_router_node_list_errors_total") == 1
    write(path, setup, another)
    await until(lambda: names(setup) == [str(another.address)])


async def test_half_of_a_list_is_not_used(
    make_setup: MakeSetup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path)
    own = str(setup.decode[0].address)
    with path.open("w") as file:
        file.write("decode:\n- other:1\n")
        for _ in range(20):
            file.write("# still writing\n")
            file.flush()
            await asyncio.sleep(0.015)
        assert names(setup) == [own]
        file.write(f"- '{own}'\n")
    await until(lambda: names(setup) == ["other:1", own])


async def test_an_empty_list_is_a_503_until_there_is_a_node(
    make_setup: MakeSetup, tmp_path: Path
) -> None:
    path = tmp_path / "nodes.yaml"
    setup = await followed(make_setup, path)
    write(path, setup)
    await until(lambda: names(setup) == [])
    assert (await setup.ask())[0] == 503
    async with setup.client.get(setup.url + "/v1/models") as response:
        assert response.status == 503
    assert setup.prefill[0].asked == []


async def test_a_name_is_one_node_for_each_address_and_is_resolved_again(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await FakeEngine("decode").start("127.0.0.1")
    port = one.address.port
    two = await FakeEngine("decode", "two").start("127.0.0.2", port)
    answers: list[list[str] | Exception] = [["127.0.0.1", "127.0.0.2"]]

    async def resolve(name: str, asked: int) -> list[str]:
        assert (name, asked) == ("decode.svc", port)
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        return answers[-1]

    monkeypatch.setattr(discovery, "resolve", resolve)
    setup = await make_setup(decode=(Address("decode.svc", port, many=True),), dns_interval=0.1)
    try:
        for _ in range(4):
            assert (await setup.ask())[0] == 200
        assert len(one.asked) == len(two.asked) == 2
        answers.append(["127.0.0.2"])
        await until(lambda: names(setup) == [f"127.0.0.2:{port}"])
        answers.append(socket.gaierror(-2, "unknown"))
        await until(lambda: setup.metric("bidir_router_node_list_errors_total") >= 2)
        assert names(setup) == [f"127.0.0.2:{port}"]
        answers.append(["127.0.0.1"])
        await until(lambda: names(setup) == [f"127.0.0.1:{port}"])
        assert (await setup.ask())[0] == 200
    finally:
        await one.stop()
        await two.stop()


@pytest.mark.parametrize(("asked", "status"), [("decode.svc.", 200), ("other.svc", 503)])
async def test_nodes_that_a_name_stands_for_prove_in_tls_that_they_have_it(
    asked: str,
    status: int,
    make_setup: MakeSetup,
    another: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(discovery, "resolve", resolve)
    cert, key = make_certificate(tmp_path, "DNS:decode.svc")
    context = Security(tls=(cert, key)).server_context()
    security = Security(engine_ca=cert)
    app = web.Application()
    app.router.add_post("/v1/completions", another._generate)
    node = TestServer(app, host="127.0.0.1")
    await node.start_server(ssl=context)
    address = parse_address(f"https://dns:{asked}:{node.port}")
    try:
        setup = await make_setup(decode=(address,), security=security, health_interval=0.0)
        assert names(setup) == [f"127.0.0.1:{node.port}"]
        assert (await setup.ask())[0] == status
    finally:
        await node.close()


async def test_a_name_resolves_to_the_addresses_of_one_family() -> None:
    assert await discovery.resolve("127.0.0.1", 80) == ["127.0.0.1"]
    assert await discovery.resolve("localhost", 80) in (["127.0.0.1"], ["::1"])


async def test_nodes_with_ipv6_addresses(make_setup: MakeSetup) -> None:
    engines = {role: await FakeEngine(role).start("::1") for role in ("prefill", "decode")}
    addresses = {role: (engine.address,) for role, engine in engines.items()}
    setup = await make_setup(**addresses)
    try:
        assert (await setup.ask(conversation_id="c", stream=True))[0] == 200
        (to_d,) = engines["decode"].asked
        assert to_d["kv_transfer_params"]["remote_host"] == "::1"
        assert names(setup) == [str(engines["decode"].address)]
    finally:
        for engine in engines.values():
            await engine.stop()


async def test_a_name_that_was_unknown_is_asked_for_again_at_once(
    make_setup: MakeSetup, monkeypatch: pytest.MonkeyPatch, another: FakeEngine
) -> None:
    """A service that has no pods yet: its first turn must not wait for the interval."""
    asked: list[str] = []

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        if len(asked) < 3:
            raise socket.gaierror(-2, "unknown")
        return ["127.0.0.1"]

    monkeypatch.setattr(discovery, "resolve", resolve)
    name = Address("decode.svc", another.address.port, many=True)
    setup = await make_setup(decode=(name,), dns_interval=600.0)
    assert (await setup.ask())[0] == 503
    await until(lambda: names(setup) == [str(another.address)])
    await until(lambda: len(setup.router.decode.usable()) == 1)
    assert (await setup.ask())[0] == 200
    await asyncio.sleep(0.15)
    assert len(asked) == 3


async def test_a_node_that_is_added_before_it_is_up_is_given_no_turns_yet(
    make_setup: MakeSetup, another: FakeEngine
) -> None:
    setup = await make_setup(health_interval=0.05, slow_start=0.0)
    await until(lambda: setup.router.decode.nodes[0].health.up is True)
    another.health = 503
    setup.router.decode.set_addresses([setup.decode[0].address, another.address])
    assert [node.address for node in setup.router.decode.usable()] == [setup.decode[0].address]
    for _ in range(4):
        assert (await setup.ask())[0] == 200
    assert another.asked == []
    another.health = 200
    await until(lambda: len(setup.router.decode.usable()) == 2)
    for _ in range(2):
        await setup.ask()
    assert len(another.asked) == 1


async def test_nodes_that_have_gone_leave_nothing_in_the_router(
    make_setup: MakeSetup, another: FakeEngine
) -> None:
    setup = await make_setup()
    own = setup.decode[0].address
    await setup.ask()
    await asyncio.sleep(0.05)
    before = len(asyncio.all_tasks())
    for number in range(20):
        setup.router.decode.set_addresses([own, Address(f"127.0.1.{number}", 9)])
        await asyncio.sleep(0)
    setup.router.decode.set_addresses([own])
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert set(setup.router.leases._of) == {str(own)}
