"""Turns are linked by a name, by headers that agents send, or by their messages alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.clients.request import parse_request
from vllm.bidir.router.conversations.identity import CONVERSATION_HEADERS, Identities, Place

from tests.router.conftest import MakeSetup, Setup
from tests.router.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"


def say(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def talk(*texts: Any) -> list[dict[str, Any]]:
    """User and assistant in turns, the user first."""
    return [say(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]


def find(
    identities: Identities,
    messages: Any,
    tenant: str = "",
    headers: Any = None,
    compact: bool = False,
    **fields: Any,
) -> Place:
    separators = (",", ":") if compact else None
    body = json.dumps(
        {"model": "m", "messages": messages, **fields}, separators=separators
    ).encode()
    place = identities.find(tenant, parse_request(CHAT, body), headers or {})
    assert place is not None
    return place


def turn(identities: Identities, messages: Any, **more: Any) -> tuple[bytes, bytes]:
    """One whole turn: where its parent was looked for, and where it was kept."""
    place = find(identities, messages, **more)
    return place.key, identities.settle(place).key


async def parents(setup: Setup, *bodies: Any, headers: Any = None) -> list[str | None]:
    """Which earlier turn P was offered, for each of these histories."""
    for messages in bodies:
        assert (await setup.ask(CHAT, messages=messages, headers=headers))[0] == 200
    asked = setup.prefill[0].asked[-len(bodies) :]
    return [one["kv_transfer_params"].get("remote_request_id") for one in asked]


async def test_an_unmodified_client_is_linked_by_its_messages(setup: Setup) -> None:
    history = talk("a", "A", "b", "B", "c")
    offered = await parents(setup, history[:1], history[:3], history[:5])
    assert offered == [None, "turn-1", "turn-2"]
    assert setup.metric("bidir_router_turns_total", outcome="hit", reason="") == 2
    assert setup.metric("bidir_router_identified_total", by="history") == 3
    assert len(setup.router.conversations) == 1


async def test_several_new_messages_link_as_well(setup: Setup) -> None:
    """As after calls of several tools."""
    more = [say("tool", "1"), say("tool", "2"), say("tool", "3")]
    offered = await parents(setup, talk("a"), [*talk("a", "A"), *more])
    assert offered == [None, "turn-1"]


@pytest.mark.parametrize("tenants", [("a", "b"), ("", "a")])
async def test_equal_messages_of_two_tenants_never_meet(
    setup: Setup, tenants: tuple[str, str]
) -> None:
    offered = []
    for tenant in tenants:
        for messages in (talk("a"), talk("a", "A", "b")):
            offered += await parents(setup, messages, headers={"Authorization": tenant})
    assert offered == [None, "turn-1", None, "turn-3"]


@pytest.mark.parametrize("other", [{"model": "n"}, {"cache_salt": "s"}])
def test_what_could_never_be_reused_is_not_linked(other: dict[str, Any]) -> None:
    identities = Identities(99)
    _, kept = turn(identities, talk("a"))
    assert find(identities, talk("a", "A", "b")).key == kept
    assert find(identities, talk("a", "A", "b"), **other).key != kept


def test_another_beginning_is_another_conversation() -> None:
    identities = Identities(99)
    assert len({turn(identities, talk(text))[1] for text in ("a", "b", "c")}) == 3


def test_forks_share_their_parent_and_then_go_their_own_ways() -> None:
    identities = Identities(99)
    _, parent = turn(identities, talk("a"))
    one, two = (find(identities, talk("a", "A", text)) for text in ("b", "c"))
    assert one.key == two.key == parent
    first, second = identities.settle(one).key, identities.settle(two).key
    assert first == parent != second
    assert turn(identities, talk("a", "A", "b", "B", "d")) == (first, first)
    assert turn(identities, talk("a", "A", "c", "C", "d")) == (second, second)


def test_a_fork_of_an_old_turn_finds_the_line_that_came_of_it() -> None:
    identities = Identities(99)
    history = talk("a", "A", "b", "B", "c", "C", "d")
    for length in (1, 3, 5):
        _, line = turn(identities, history[:length])
    parent, fork = turn(identities, talk("a", "A", "other"))
    assert parent == line != fork
    assert turn(identities, history) == (line, line)


def test_the_same_request_again_goes_on_with_its_line() -> None:
    identities = Identities(99)
    _, kept = turn(identities, talk("a"))
    assert turn(identities, talk("a")) == (kept, kept)
    same = [find(identities, talk("a", "A", "b")) for _ in range(3)]
    assert {identities.settle(place).key for place in same} == {kept}


def test_a_first_turn_regenerated_later_does_not_end_what_came_of_it() -> None:
    identities = Identities(99)
    turn(identities, talk("a"))
    _, line = turn(identities, talk("a", "A", "b"))
    parent, again = turn(identities, talk("a"))
    assert parent == line != again
    assert turn(identities, talk("a", "A", "b", "B", "c")) == (line, line)


async def test_concurrent_requests_of_one_conversation_read_the_same_parent(setup: Setup) -> None:
    await setup.ask(CHAT, messages=talk("a"))
    together = asyncio.Event()

    async def all_of_them(request: web.Request, body: dict[str, Any]) -> None:
        if len(setup.decode[0].asked) == 6:
            together.set()
        await asyncio.wait_for(together.wait(), 5)

    setup.decode[0].script = all_of_them
    asked = [setup.ask(CHAT, messages=talk("a", "A", text)) for text in "bcdef"]
    assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 5
    offered = [one["kv_transfer_params"]["remote_request_id"] for one in setup.prefill[0].asked[1:]]
    assert offered == ["turn-1"] * 5
    assert len(setup.router.conversations) == 5


async def test_lines_of_one_session_do_not_take_each_others_turns(setup: Setup) -> None:
    """An agent, its subagent and the title of the session, under one session id."""
    headers = {"X-Claude-Code-Session-Id": "s"}
    main, sub = talk("a", "A", "b", "B", "c"), talk("sub", "S", "t")
    turns = (main[:1], sub[:1], talk("title"), main[:3], sub[:3], main[:5])
    offered = await parents(setup, *turns, headers=headers)
    assert offered == [None, "turn-1", "turn-1", "turn-1", "turn-2", "turn-4"]
    assert setup.metric("bidir_router_identified_total", by="header") == 6


async def test_a_compacted_history_of_a_session_is_offered_its_last_turn(setup: Setup) -> None:
    headers = {"X-Session-ID": "s"}
    offered = await parents(setup, talk("a"), talk("summary"), headers=headers)
    assert offered == [None, "turn-1"]


def test_lines_of_a_session_are_bounded_the_least_used_go() -> None:
    identities = Identities(999)
    headers = {"X-Session-ID": "s"}
    _, root = turn(identities, talk("main"), headers=headers)
    forks = [turn(identities, talk(f"s{n}"), headers=headers)[1] for n in range(8)]
    assert turn(identities, talk("s0", "S", "more"), headers=headers) == (forks[0], forks[0])
    over = identities.settle(find(identities, talk("s8"), headers=headers)).over
    assert over == [forks[1]]
    assert find(identities, talk("s1", "S", "more"), headers=headers).key == root
    assert find(identities, talk("main", "M", "more"), headers=headers).key == root


@pytest.mark.parametrize("end", ["delete", "last"])
async def test_a_session_ends_with_all_its_lines(make_setup: MakeSetup, end: str) -> None:
    setup = await make_setup(decode=1)
    headers = {"X-Session-ID": "s"}
    await parents(setup, talk("a"), talk("b"), talk("c"), headers=headers)
    assert len(setup.router.conversations) == 3
    if end == "delete":
        async with setup.client.delete(setup.url + "/conversations/s") as response:
            assert response.status == 204
        async with setup.client.delete(setup.url + "/conversations/s") as response:
            assert response.status == 404
    else:
        last = {**headers, "X-Conversation-End": "true"}
        assert await parents(setup, talk("b", "B", "bb"), headers=last) == ["turn-2"]
    assert len(setup.router.conversations) == 0
    assert await parents(setup, talk("a", "A", "aa"), headers=headers) == [None]


async def test_a_last_turn_without_a_name_leaves_nothing(setup: Setup) -> None:
    await parents(setup, talk("a"))
    headers = {"X-Conversation-End": "true"}
    assert await parents(setup, talk("a", "A", "b"), headers=headers) == ["turn-1"]
    assert len(setup.router.conversations) == 0
    assert await parents(setup, talk("a", "A", "b")) == [None]


@pytest.mark.parametrize("header", CONVERSATION_HEADERS)
async def test_every_header_that_agents_send_names_a_conversation(
    setup: Setup, header: str
) -> None:
    for name in ("s", "s", "t"):
        assert (await setup.ask(headers={header.lower(): name}))[0] == 200
    offered = [
        bool(one["kv_transfer_params"]["remote_block_ids"]) for one in setup.prefill[0].asked
    ]
    assert offered == [False, True, False]


async def test_the_body_wins_over_headers_and_the_first_header_over_others(setup: Setup) -> None:
    both = {"X-Session-ID": "x", "Session-Id": "y"}
    await setup.ask(conversation_id="b", session_id="z", headers=both)
    await setup.ask(conversation_id="b", session_id="other")
    await setup.ask(session_id="v", headers=both)
    await setup.ask(session_id="v")
    await setup.ask(headers=both)
    await setup.ask(headers={"X-Session-ID": "x"})
    asked = setup.prefill[0].asked
    offered = [bool(one["kv_transfer_params"]["remote_block_ids"]) for one in asked]
    assert offered == [False, True, False, True, False, True]
    assert asked[0]["session_id"] == "z" and "conversation_id" not in asked[0]


@pytest.mark.parametrize("header", ["X-Session-ID", "Session-Id"])
async def test_ids_are_capped(setup: Setup, header: str) -> None:
    assert (await setup.ask(headers={header: "x" * 512}))[0] == 200
    status, body = await setup.ask(headers={header: "x" * 513})
    assert status == 400 and json.loads(body)["error"]["param"] == header


@pytest.mark.parametrize("value", [7, None, "", "x" * 513, {"a": 1}])
async def test_an_engines_field_is_left_to_the_engine(setup: Setup, value: Any) -> None:
    assert (await setup.ask(session_id=value))[0] == 200
    assert setup.decode[0].asked[0]["session_id"] == value


@pytest.mark.parametrize(
    "marked",
    [
        [{"type": "text", "text": 'say "x" \\', "cache_control": {"type": "ephemeral"}}],
        [{"type": "text", "text": 'say "x" \\', "cache_control": {"type": "e", "ttl": "5m"}}],
        [{"type": "text", "text": 'say "x" \\', "cache_control": None}],
        [{"type": "text", "text": 'say "x" \\'}],
    ],
)
@pytest.mark.parametrize("compact", [True, False])
def test_marks_that_move_from_turn_to_turn_do_not_part_a_conversation(
    marked: Any, compact: bool
) -> None:
    plain = 'say "x" \\'
    last = [{"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}}]
    identities = Identities(99)
    first = [say("user", "0"), say("assistant", last), say("user", marked)]
    _, kept = turn(identities, first, compact=compact)
    again = [say("user", "0"), say("assistant", "y"), say("user", plain), say("user", last)]
    assert find(identities, again, compact=compact).key == kept


def test_text_that_looks_like_a_mark_counts_as_text() -> None:
    identities = Identities(99)
    mark = {"role": "user", "content": "z", "cache_control": {"type": "ephemeral"}}
    texts = ('a,"cache_control":{"b":1}', "a")
    keys = {turn(identities, [say("user", text), mark])[1] for text in texts}
    assert len(keys) == 2


@pytest.mark.parametrize("messages", [None, 7, {}, [], "x", [[]], [None], [1, 2]])
async def test_a_history_that_is_none_is_for_the_engine_to_judge(
    setup: Setup, messages: Any
) -> None:
    for _ in range(2):
        assert (await setup.ask(CHAT, messages=messages))[0] == 200
    assert setup.decode[0].asked[0]["messages"] == messages


def test_memory_is_bounded_and_the_oldest_go() -> None:
    identities = Identities(100)
    for number in range(1000):
        turn(identities, talk(f"{number}"))
        turn(identities, talk("x"), headers={"X-Session-ID": f"{number}"})
    assert len(identities) == 100
    assert find(identities, talk("0", "A", "b")).line is None
    assert find(identities, talk("999", "A", "b")).line is not None


async def test_a_d_that_kept_nothing_says_so_at_the_next_turn(setup: Setup) -> None:
    """The link is there all the same."""
    engine: FakeEngine = setup.decode[0]

    async def nothing(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"choices": [], "kv_transfer_params": {"reason": "budget"}})

    engine.script = nothing
    await parents(setup, talk("a"), talk("a", "A", "b"))
    assert setup.metric("bidir_router_turns_total", outcome="miss", reason="budget") == 1
