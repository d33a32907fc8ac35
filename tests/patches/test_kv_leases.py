"""`/v1/kv_leases` as a client of the server sees it.

The application, its API-key check and the engine core's client are vLLM's own, down to the bytes
that the client would send to an engine. A stand-in for the scheduler's side answers them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from vllm.bidir.connector import hooks, stats
from vllm.bidir.server import kv_leases
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutputs, UtilityOutput, UtilityResult
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import (
    AsyncMPClient,
    BackgroundResources,
    _process_utility_output,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

KEY = "secret"
HEADERS = {"Authorization": f"Bearer {KEY}"}
PARAMS = {"do_remote_prefill": False, "lease_id": "x", "remote_block_ids": [[1, 2]], "tp_size": 1}
READS_BACK = {"bidirectional_kv_xfer": True}


def nixl(extra: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    } | more


def several(*children: dict[str, Any]) -> dict[str, Any]:
    return nixl({"connectors": list(children)}, kv_connector="MultiConnector")


def build(config: Any, tasks: tuple[Any, ...] = ("generate",)) -> FastAPI:
    """The server's application, as `vllm serve` builds it; a dict is a config not yet parsed."""
    line = ["--model", "none", "--api-key", KEY]
    if isinstance(config, str):
        line += ["--kv-transfer-config", config]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    if isinstance(config, dict):
        args.kv_transfer_config = config
    return build_app(args, tasks)


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build(json.dumps(nixl(READS_BACK)))


def lease(rank: int, number: int = 0) -> str:
    return f"d{rank}-{number:032x}"


def totals(**counts: Any) -> dict[str, Any]:
    names = ["leases", "blocks", "holds", "budget_blocks", "total_blocks"]
    names += ["renewals", "refused", "reclaimed", "expired", "released"]
    return {"mode": "lease", **dict.fromkeys(names, 0), "oldest_s": None} | counts


class Rank:
    """The scheduler of one engine core: what it keeps, and what it is asked."""

    def __init__(self, *kept: str, **counts: Any) -> None:
        self.kept = set(kept)
        self.totals: Any = totals(**counts)
        self.asked: list[tuple[str, list[str]]] = []

    def answer(self, word: str, lease_ids: list[str]) -> dict[str, Any]:
        self.asked.append((word, lease_ids))
        found = [one for one in lease_ids if one in self.kept]
        lost = [one for one in lease_ids if one not in self.kept]
        answers: dict[str, dict[str, Any]] = {
            "renew": {"renewed": dict.fromkeys(found, 12.5), "lost": lost},
            "release": {"released": found, "lost": lost},
            "read": {"params": PARAMS if found else None},
            "totals": {},
        }
        return {**answers[word], "totals": self.totals}


class Core(AsyncMPClient):
    """vLLM's client without its sockets: calls are encoded, and the named rank answers at once.

    A rank that is None never answers.
    """

    def __init__(self, ranks: dict[int, Rank | None]) -> None:
        self.by_identity = {rank.to_bytes(2, "little"): one for rank, one in ranks.items()}
        self.core_engines = list(self.by_identity)
        self.core_engine = self.core_engines[0]
        context: Any = None
        self.resources = BackgroundResources(context)
        self.client_index = 0
        self.encoder = MsgpackEncoder()
        self.utility_results: dict[int, Any] = {}
        self.failure: str | None = None
        self.waiting = 0

    def _ensure_output_queue_task(self) -> None:
        """There is no socket to read."""

    async def _send_input_message(self, message: Any, engine: bytes) -> None:
        self.ensure_alive()
        _, call_id, method, args = MsgpackDecoder().decode(message[1:])
        scheduler = self.by_identity[engine]
        if scheduler is None:
            self.waiting += 1
            return
        core: Any = type("Core", (), {"scheduler": scheduler})()
        output = UtilityOutput(call_id, self.failure)
        if self.failure is None:
            output.result = UtilityResult(getattr(EngineCore, method)(core, *args))
        sent = MsgpackEncoder().encode(EngineCoreOutputs(utility_output=output))
        received = MsgpackDecoder(EngineCoreOutputs).decode(sent)
        asyncio.get_running_loop().call_soon(
            _process_utility_output, received.utility_output, self.utility_results
        )


class Client:
    """The part of AsyncLLM that the routes use."""

    def __init__(self, core: Core) -> None:
        self.engine_core = core

    @property
    def errored(self) -> bool:
        return self.engine_core.resources.engine_dead


Serve = Callable[..., "Server"]


class Server:
    def __init__(self, app: FastAPI, core: Core) -> None:
        self.app, self.core = app, core

    async def ask(self, method: str, path: str = "", headers: Any = HEADERS, **more: Any) -> Any:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://d") as client:
            return await client.request(method, f"/v1/kv_leases{path}", headers=headers, **more)

    async def post(self, word: str, lease_ids: Any) -> Any:
        answer = await self.ask("POST", f"/{word}", json={"lease_ids": lease_ids})
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gauges are told."""
    told: list[Any] = []
    monkeypatch.setattr(stats, "show_leases", lambda *one: told.append(one), raising=False)
    return told


@pytest.fixture
def serve(app: FastAPI, monkeypatch: pytest.MonkeyPatch, shown: list[Any]) -> Serve:
    """`serve({rank: Rank, ...})`: the server in front of these engines."""
    monkeypatch.setattr(
        hooks, "kv_leases", lambda scheduler, *call: scheduler.answer(*call), raising=False
    )

    def start(ranks: dict[int, Rank | None], application: FastAPI = app) -> Server:
        core = Core(ranks)
        application.state.engine_client = Client(core)
        return Server(application, core)

    return start


def error_of(answer: Any) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == answer.status_code
    found: dict[str, Any] = body["error"]
    return found


ROUTES = [("POST", "/renew"), ("POST", "/release"), ("GET", f"/{lease(0)}"), ("GET", "")]


# -- where the routes are -------------------------------------------------------------------------


async def test_a_server_that_reads_back_has_the_routes(serve: Serve) -> None:
    server = serve({0: Rank(lease(0))})
    for method, path in ROUTES:
        more = {"json": {"lease_ids": []}} if method == "POST" else {}
        answer = await server.ask(method, path, **more)
        assert answer.status_code == 200, (path, answer.text)


@pytest.mark.parametrize(
    "config",
    [
        json.dumps(several(nixl({}), nixl(READS_BACK))),
        nixl(READS_BACK),
        nixl(READS_BACK, kv_connector="NixlPullConnector"),
    ],
    ids=["within a MultiConnector", "not parsed yet", "by its other name"],
)
async def test_every_way_to_ask_for_read_back_counts(serve: Serve, config: Any) -> None:
    server = serve({0: Rank()}, build(config))
    assert (await server.ask("GET")).status_code == 200


@pytest.mark.parametrize(
    ("config", "tasks"),
    [
        (None, ("generate",)),
        (json.dumps(nixl({})), ("generate",)),
        (json.dumps(nixl({"bidirectional_kv_xfer": False})), ("generate",)),
        (json.dumps(several(nixl({}))), ("generate",)),
        (nixl(READS_BACK, kv_connector="SharedStorageConnector"), ("generate",)),
        (json.dumps(nixl(READS_BACK)), ("render",)),
    ],
    ids=["no connector", "not set", "off", "off in the child", "not ours", "no engine"],
)
async def test_other_servers_have_no_such_route(serve: Serve, config: Any, tasks: Any) -> None:
    server = serve({0: Rank()}, build(config, tasks))
    assert "kv_leases" not in json.dumps(server.app.openapi())
    for method, path in ROUTES:
        assert (await server.ask(method, path)).status_code == 404, path


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}])
async def test_without_the_key_nothing_is_told_or_done(
    serve: Serve, method: str, path: str, headers: dict[str, str]
) -> None:
    rank = Rank(lease(0))
    answer = await serve({0: rank}).ask(
        method, path, headers=headers, content=json.dumps({"lease_ids": [lease(0)]})
    )
    assert answer.status_code == 401
    assert rank.asked == []


def test_the_engine_core_asks_its_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(EngineCore, "kv_leases")
    monkeypatch.setattr(hooks, "kv_leases", lambda *call: call, raising=False)
    core: Any = type("Core", (), {"scheduler": "its scheduler"})()
    assert EngineCore.kv_leases(core, "renew", ["a"]) == ("its scheduler", "renew", ["a"])


# -- renew and release ----------------------------------------------------------------------------


async def test_renewed_leases_are_told_with_the_seconds_they_have_left(serve: Serve) -> None:
    server = serve({0: Rank(lease(0, 1))})
    assert await server.post("renew", [lease(0, 1), lease(0, 2)]) == {
        "renewed": {lease(0, 1): 12.5},
        "lost": [lease(0, 2)],
    }


async def test_released_leases_are_told(serve: Serve) -> None:
    server = serve({0: Rank(lease(0, 1))})
    assert await server.post("release", [lease(0, 1), lease(0, 2)]) == {
        "released": [lease(0, 1)],
        "lost": [lease(0, 2)],
    }


@pytest.mark.parametrize(("word", "done"), [("renew", "renewed"), ("release", "released")])
async def test_each_rank_is_asked_about_its_own_and_no_other(
    serve: Serve, word: str, done: str
) -> None:
    ranks = {rank: Rank(lease(rank, 1)) for rank in (0, 1, 2, 258)}
    server = serve(ranks)
    answer = await server.post(word, [lease(258, 1), lease(1, 1), lease(1, 2), lease(0, 1)])
    assert sorted(answer[done]) == sorted([lease(0, 1), lease(1, 1), lease(258, 1)])
    assert answer["lost"] == [lease(1, 2)]
    assert {rank: one.asked for rank, one in ranks.items()} == {
        0: [(word, [lease(0, 1)])],
        1: [(word, [lease(1, 1), lease(1, 2)])],
        2: [],
        258: [(word, [lease(258, 1)])],
    }


async def test_ranks_are_asked_at_once(serve: Serve) -> None:
    """A rank in a long step keeps no other waiting."""
    server = serve({0: None, 1: None})
    call = asyncio.create_task(server.post("renew", [lease(0), lease(1)]))
    while server.core.waiting < 2:
        await asyncio.sleep(0)
    call.cancel()


async def test_a_rank_of_another_server_is_lost(serve: Serve) -> None:
    """Behind an external load balancer each server has one rank."""
    rank = Rank(lease(3))
    server = serve({3: rank})
    answer = await server.post("renew", [lease(0), lease(3), lease(65535), lease(99999)])
    assert list(answer["renewed"]) == [lease(3)]
    assert answer["lost"] == [lease(0), lease(65535), lease(99999)]
    assert rank.asked == [("renew", [lease(3)])]


ODD: list[Any] = [
    "",
    "d0-",
    "d-" + "0" * 32,
    "d0-" + "0" * 31,
    "d0-" + "g" * 32,
    "d0-" + "A" * 32,
    "d00-" + "0" * 32,
    "d-1-" + "0" * 32,
    "d٣-" + "0" * 32,
    lease(0) + "\n",
    " " + lease(0),
    "\ud800",
    "\x00",
    None,
    True,
    1,
    0.5,
]


@pytest.mark.parametrize(("word", "done"), [("renew", "renewed"), ("release", "released")])
async def test_odd_ids_are_lost_and_fail_no_other(serve: Serve, word: str, done: str) -> None:
    rank = Rank(lease(0))
    answer = await serve({0: rank}).ask(
        "POST", f"/{word}", content=json.dumps({"lease_ids": [*ODD, lease(0)]})
    )
    assert answer.status_code == 200
    body = json.loads(answer.content)
    assert body["lost"] == ODD
    assert list(body[done]) == [lease(0)]
    assert rank.asked == [(word, [lease(0)])]


async def test_what_is_no_id_is_answered_in_short(serve: Serve) -> None:
    server = serve({0: Rank()})
    body = '{"lease_ids": ["' + "x" * 1000 + '", [1], {"a": [1]}, 1e999]}'
    answer = await server.ask("POST", "/renew", content=body)
    assert answer.json()["lost"] == ["x" * 64, "[1]", '{"a": [1]}', "Infinity"]


async def test_an_id_that_is_named_twice_is_answered_once(serve: Serve) -> None:
    rank = Rank(lease(0, 1))
    ids = [lease(0, 1), lease(0, 2), lease(9), "odd", 1, True, 1.0, None]
    answer = await serve({0: rank}).post("release", [*ids, *ids])
    assert answer["released"] == [lease(0, 1)]
    assert [repr(one) for one in answer["lost"]] == [
        repr(one) for one in [lease(9), "odd", 1, True, 1.0, None, lease(0, 2)]
    ]
    assert rank.asked == [("release", [lease(0, 1), lease(0, 2)])]


async def test_nothing_named_is_nothing_asked(serve: Serve) -> None:
    rank = Rank()
    assert await serve({0: rank}).post("renew", []) == {"renewed": {}, "lost": []}
    assert rank.asked == []


async def test_ten_thousand_ids_are_one_call(serve: Serve) -> None:
    ids = [lease(number % 2, number) for number in range(10_000)]
    ranks = {0: Rank(*ids), 1: Rank(*ids)}
    answer = await serve(ranks).post("renew", ids)
    assert answer["renewed"].keys() == set(ids)
    assert [len(one.asked) for one in ranks.values()] == [1, 1]


async def test_more_are_refused_as_a_whole(serve: Serve) -> None:
    rank = Rank(lease(0))
    answer = await serve({0: rank}).ask("POST", "/renew", json={"lease_ids": [lease(0)] * 10_001})
    assert answer.status_code == 413
    assert "at most 10000 lease_ids" in error_of(answer)["message"]
    assert rank.asked == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        '{"lease_ids": null}',
        '{"lease_ids": "d0"}',
        '{"lease_ids": {"d0": 1}}',
        '{"lease_ids": [NaN]}',
        "[" * 100_000,
        b"\xff",
    ],
)
async def test_another_body_is_refused(serve: Serve, body: Any) -> None:
    rank = Rank()
    answer = await serve({0: rank}).ask("POST", "/release", content=body)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "BadRequestError"
    assert '{"lease_ids": [...]}' in error_of(answer)["message"]
    assert rank.asked == []


# -- one lease, and totals ------------------------------------------------------------------------


async def test_one_lease_is_read_from_the_rank_that_keeps_it(serve: Serve) -> None:
    ranks = {0: Rank(), 1: Rank(lease(1))}
    answer = await serve(ranks).ask("GET", f"/{lease(1)}")
    assert (answer.status_code, answer.json()) == (200, PARAMS)
    assert ranks[0].asked == []
    assert ranks[1].asked == [("read", [lease(1)])]


@pytest.mark.parametrize("gone", [lease(0), lease(7), "renew", "odd", "d0-%0a"])
async def test_a_lease_that_is_gone_is_not_found(serve: Serve, gone: str) -> None:
    answer = await serve({0: Rank()}).ask("GET", f"/{gone}")
    assert answer.status_code == 404
    assert error_of(answer)["type"] == "NotFoundError"


async def test_totals_are_added_up_and_told_by_rank(serve: Serve) -> None:
    ranks = {
        0: Rank(leases=1, blocks=10, budget_blocks=50, total_blocks=100, oldest_s=3.0, renewals=4),
        1: Rank(leases=2, blocks=20, budget_blocks=50, total_blocks=100, oldest_s=9.0, expired=1),
        2: Rank(budget_blocks=50, total_blocks=100),
    }
    answer = await serve(ranks).ask("GET")
    assert answer.status_code == 200
    body = answer.json()
    assert body.pop("ranks") == [{"rank": rank, **one.totals} for rank, one in ranks.items()]
    assert body == totals(
        leases=3,
        blocks=30,
        budget_blocks=150,
        total_blocks=300,
        oldest_s=9.0,
        renewals=4,
        expired=1,
    )


async def test_an_engine_that_keeps_nothing_for_anybody_adds_nothing(serve: Serve) -> None:
    rank = Rank()
    rank.totals = None
    body = (await serve({0: rank}).ask("GET")).json()
    assert body == totals(mode=None) | {"ranks": []}


async def test_every_answer_of_an_engine_brings_its_gauges_up_to_date(
    serve: Serve, shown: list[Any]
) -> None:
    ranks = {4: Rank(lease(4), leases=1), 5: Rank(leases=2), 6: Rank()}
    ranks[6].totals = None
    server = serve(ranks)
    everyone = [(4, ranks[4].totals), (5, ranks[5].totals)]
    await server.post("renew", [lease(5), lease(4), lease(6)])
    assert sorted(shown, key=lambda one: int(one[0])) == everyone
    shown.clear()
    await server.ask("GET", f"/{lease(4)}")
    assert shown == everyone[:1]
    shown.clear()
    await server.ask("GET")
    assert shown == everyone


# -- engines that do not answer -------------------------------------------------------------------


async def calls(server: Server) -> list[Any]:
    body = {"lease_ids": [lease(0), lease(1)]}
    return [
        await server.ask(method, path, **({"json": body} if method == "POST" else {}))
        for method, path in ROUTES
    ]


def assert_unavailable(answers: list[Any]) -> None:
    for answer in answers:
        assert answer.status_code == 503, answer.text
        assert error_of(answer)["type"] == "ServiceUnavailableError"
        assert "d0-" not in answer.text


async def test_a_dead_engine_is_unavailable(serve: Serve) -> None:
    server = serve({0: Rank(lease(0)), 1: Rank()})
    server.core.resources.engine_dead = True
    assert_unavailable(await calls(server))


async def test_an_engine_that_dies_before_it_answers_is_unavailable(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_leases, "_LOOK_S", 0.01)
    server = serve({0: None, 1: Rank()})
    call = asyncio.create_task(server.ask("POST", "/renew", json={"lease_ids": [lease(0)]}))
    while not server.core.waiting:
        await asyncio.sleep(0)
    server.core.resources.engine_dead = True
    assert_unavailable([await asyncio.wait_for(call, 5)])


async def test_an_engine_that_stands_still_is_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_leases, "_LOOK_S", 0.01)
    monkeypatch.setattr(kv_leases, "_LIMIT_S", 0.02)
    server = serve({0: None, 1: Rank()})
    assert_unavailable(await asyncio.wait_for(calls(server), 10))
    answered_late = UtilityOutput(next(iter(server.core.utility_results)), None, UtilityResult({}))
    _process_utility_output(answered_late, server.core.utility_results)


async def test_an_engine_that_ends_is_unavailable(serve: Serve) -> None:
    server = serve({0: Rank(lease(0)), 1: Rank()})
    server.core.failure = "Server shutting down"
    assert_unavailable(await calls(server))


# -- logs -----------------------------------------------------------------------------------------


async def test_no_log_shows_a_lease_id(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the access log, and not when an engine fails."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.DEBUG)
    server = serve({0: Rank(lease(0))})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none")
        web = uvicorn.Server(config)
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        base = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/kv_leases"
        async with httpx.AsyncClient(headers=HEADERS) as client:
            codes = [(await client.get(f"{base}/{lease(n)}")).status_code for n in (0, 1)]
            body = {"lease_ids": [lease(0), "malformed-id"]}
            codes.append((await client.post(f"{base}/renew", json=body)).status_code)
            server.core.failure = f"KeyError: {lease(0)}"
            codes.append((await client.post(f"{base}/renew", json=body)).status_code)
        web.should_exit = True
        await serving
    assert codes == [200, 404, 200, 503]
    lines = [
        record.getMessage()
        for record in caplog.records
        if not record.name.startswith(("httpx", "httpcore"))  # the test's own client
    ]
    assert any("/v1/kv_leases/-" in line for line in lines)
    assert any("does not answer about leases" in line for line in lines)
    assert not [line for line in lines if lease(0)[3:] in line or "malformed-id" in line]


async def test_a_request_keeps_its_lease_id_in_neither_of_its_paths(serve: Serve) -> None:
    """Which of them a server's access log shows depends on its release."""
    server = serve({0: Rank(lease(0))})
    scopes = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await server.app(scope, receive, send)

    shown = httpx.ASGITransport(noted)
    async with httpx.AsyncClient(transport=shown, base_url="http://d", headers=HEADERS) as client:
        # As it is usually written, and with a letter of it escaped.
        for written in (lease(0), lease(0).replace("d", "%64", 1)):
            assert (await client.get(f"/v1/kv_leases/{written}")).status_code == 200
    paths = [(scope["path"], scope["raw_path"]) for scope in scopes]
    assert paths == [("/v1/kv_leases/-", b"/v1/kv_leases/-")] * 2
