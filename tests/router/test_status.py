"""What GET / and GET /status show: the router's state, to anybody, and nothing of a request."""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.clients.security import Security, key_digest
from vllm.bidir.router.status import page as status_page

from tests.router.chromium import BINARY, chromium
from tests.router.conftest import MakeSetup, Setup
from tests.router.statuses import DOWN, EMPTY, EVIL, STATUSES, serving

_VOID = {"meta", "rect"}


class Parsed(HTMLParser):
    """The page's tags with their attributes, its texts, and its style."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.style = ""
        self._open: list[str] = []
        self.feed(page.decode("utf-8"))
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "style":
            self.style += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(params=STATUSES.values(), ids=STATUSES.keys())
def parsed(request: pytest.FixtureRequest) -> Parsed:
    return Parsed(status_page.page(request.param))


def test_the_page_stands_alone(parsed: Parsed) -> None:
    """No script, no style of an element, nothing that is fetched."""
    assert not {"script", "link", "img", "iframe", "form", "base"} & {tag for tag, _ in parsed.tags}
    for _, attributes in parsed.tags:
        names = attributes.keys()
        assert not names & {"style", "src", "srcset"}
        assert not [name for name in names if name.startswith("on")]
        assert attributes.get("href", "metrics") in ("metrics", "status")
    assert "url(" not in parsed.style and "@import" not in parsed.style


def test_the_policy_allows_the_style_of_the_page_and_nothing_else(parsed: Parsed) -> None:
    digest = base64.b64encode(hashlib.sha256(parsed.style.encode()).digest()).decode()
    policy = status_page.headers()["Content-Security-Policy"].split("; ")
    assert f"style-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "unsafe" not in str(policy) and "script-src" not in str(policy)


def test_names_and_errors_are_shown_as_the_text_that_they_are() -> None:
    evil = EVIL.version
    assert "<script>" in evil and '"' in evil and "&lt;" in evil
    found = Parsed(status_page.page(EVIL))
    # The version, two nodes, a miss, a turn of D alone, an error's kind and its node.
    assert found.text.count(evil) == 8
    assert "Share" in found.texts and f"{evil}: {evil}" in found.texts


@pytest.mark.parametrize("field", ["node", "state"])
def test_an_attribute_is_not_broken_out_of(field: str) -> None:
    status = copy.deepcopy(EVIL)
    setattr(status.pools[0].nodes[0], field, '" onclick="x')
    found = Parsed(status_page.page(status))
    assert '" onclick="x' in found.texts
    assert not [tag for tag, attributes in found.tags if "onclick" in attributes]


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (STATUSES["busy"], "Serving; not all nodes are up"),
        (DOWN, "Not serving: no decode node is up"),
        (EMPTY, "Not serving: no decode node is up"),
        (EVIL, "Serving"),
    ],
    ids=["busy", "down", "empty", "well"],
)
def test_the_first_line_says_whether_it_serves(status: Any, word: str) -> None:
    assert word in Parsed(status_page.page(status)).texts


async def get(setup: Setup, path: str) -> tuple[web.StreamResponse | Any, bytes]:
    async with setup.client.get(setup.url + path) as response:
        return response, await response.read()


async def test_a_router_shows_its_nodes_turns_and_errors(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=1, decode=2, decode_in_flight=4, health_interval=0)
    held, gate = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if body.get("user") == "held":
            held.set()
            await gate.wait()
        return web.Response(status=500) if body.get("user") == "failing" else None

    for engine in setup.decode:
        engine.script = hold
    await setup.ask(conversation_id="c")
    await setup.ask(conversation_id="c")
    await setup.ask(n=2)
    await setup.ask(user="failing")
    task = asyncio.create_task(setup.ask(user="held"))
    await held.wait()
    _, body = await get(setup, "/status")
    said = json.loads(body)
    response, page = await get(setup, "/")
    gate.set()
    await task

    assert response.status == 200 and response.content_type == "text/html"
    assert {name: response.headers[name] for name in status_page.headers()} == status_page.headers()
    (prefill, decode) = said["pools"]
    assert [pool["role"] for pool in (prefill, decode)] == ["prefill", "decode"]
    assert [node["node"] for node in decode["nodes"]] == [str(one.address) for one in setup.decode]
    assert sorted(node["in_flight"] for node in decode["nodes"]) == [0, 1]
    assert decode["nodes"][0]["in_flight_limit"] == 4 and decode["usable"] == 2
    assert prefill["nodes"][0]["verifies"] is True
    assert said["turns"] == {"hits": 1, "misses": {"first_turn": 1, "no_conversation": 2}}
    assert said["turns_last_minutes"] == said["turns"]
    assert said["decode_alone"] == {"bypass_n": 1}
    assert (said["conversations"], said["leases"]) == (1, 0)
    failed = [(one["what"], one["why"], one["count"]) for one in said["errors"]]
    assert failed[0] == ("answer to /v1/completions", "500", 1)
    assert failed[1:] == [("decode leg", "500", 2)] * 2
    # Without it a phone shows the page as wide as a desk's screen, and tiny.
    assert b'<meta name="viewport" content="width=device-width' in page
    text = Parsed(page).text
    for word in ("25%", "of 4 turns", "first_turn", "bypass_n", "decode leg: 500", "1 / 4"):
        assert word in text
    assert str(setup.prefill[0].address) in text


async def test_a_node_that_is_taken_off_the_list_is_shown_while_it_drains(setup: Setup) -> None:
    (node,) = setup.router.decode.nodes
    node.in_flight += 1
    setup.router.decode.set_addresses(())
    _, body = await get(setup, "/status")
    _, decode = json.loads(body)["pools"]
    assert [one["state"] for one in decode["nodes"]] == ["draining"] and decode["usable"] == 0
    assert "Not serving" in Parsed((await get(setup, "/"))[1]).text


async def test_a_router_that_is_ending_says_so(setup: Setup) -> None:
    assert json.loads((await get(setup, "/status"))[1])["draining"] is False
    setup.router.draining.tell()
    assert json.loads((await get(setup, "/status"))[1])["draining"] is True
    assert "Ending: what is under way goes on" in Parsed((await get(setup, "/"))[1]).text


async def test_it_needs_no_key_and_shows_no_more_than_the_metrics(make_setup: MakeSetup) -> None:
    key = "key-that-is-secret"
    setup = await make_setup(security=Security(client_keys=frozenset([key_digest(key)])))
    headers = {"Authorization": f"Bearer {key}", "X-Request-Id": "request-that-is-secret"}
    said = {"conversation_id": "id-that-is-secret", "prompt": "prompt-that-is-secret"}
    assert (await setup.ask(headers=headers, **said))[0] == 200
    assert (await setup.ask(**said))[0] == 401
    _, metrics = await get(setup, "/metrics")
    for path in ("/", "/status"):
        response, body = await get(setup, path)
        assert response.status == 200
        assert b"that-is-secret" not in body and b"turn-1" not in body and b"elsewhere" not in body
        for address in re.findall(rb"127\.0\.0\.1:\d+", body):
            assert address in metrics


@pytest.mark.skipif(BINARY is None, reason="needs Chromium (Debian's package chromium)")
async def test_a_browser_shows_it_without_complaint_and_without_scrolling_sideways() -> None:
    async with serving(STATUSES) as url, chromium() as page:
        for name, width in (("busy", 1280), ("many", 390), ("evil", 390), ("down", 390)):
            await page.open(f"{url}/{name}", width, 844, "light")
            assert await page.width() == width, name
        assert page.complaints == []
