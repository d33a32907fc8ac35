"""What the router counts and times of its turns, and what it remembers of what went wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from vllm.bidir.router.clients.reuse import prompt_tokens
from vllm.bidir.router.telemetry.last_errors import MOST_KINDS, LastErrors
from vllm.bidir.router.telemetry.last_minutes import MINUTES, LastMinutes

from tests.router.conftest import MakeSetup, Setup, until
from tests.router.fake_engine import P_PARAMS, event


async def test_a_stream_is_timed_to_its_first_byte_and_to_its_end(setup: Setup) -> None:
    await setup.ask(stream=True, conversation_id="c")
    await setup.ask(stream=True, conversation_id="c")
    for name in ("first_byte_seconds", "turn_seconds"):
        for outcome in ("miss", "hit"):
            assert setup.metric(f"bidir_router_{name}_count", outcome=outcome) == 1
    assert setup.metric("bidir_router_prefill_seconds_count") == 2
    assert setup.metric("bidir_router_decode_first_byte_seconds_count") == 2


async def test_a_whole_answer_has_no_first_byte_of_its_own(setup: Setup) -> None:
    await setup.ask()
    assert setup.metric("bidir_router_first_byte_seconds_count", outcome="miss") == 0
    assert setup.metric("bidir_router_decode_first_byte_seconds_count") == 0
    assert setup.metric("bidir_router_turn_seconds_count", outcome="miss") == 1


async def test_a_stream_that_breaks_off_has_a_first_byte_and_no_end(setup: Setup) -> None:
    async def half(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(event({"choices": [{"index": 0, "text": "x"}]}))
        assert request.transport is not None
        request.transport.close()
        return answer

    setup.decode[0].script = half
    await setup.ask(stream=True)
    assert setup.metric("bidir_router_first_byte_seconds_count", outcome="miss") == 1
    assert setup.metric("bidir_router_turn_seconds_count", outcome="miss") == 0


async def test_a_stream_that_begins_with_an_error_has_not_begun(setup: Setup) -> None:
    async def fails_once(request: web.Request, body: dict[str, Any]) -> web.Response | None:
        if len(setup.decode[0].asked) > 1:
            return None
        error = event({"error": {"message": "no", "type": "server_error", "code": 500}})
        return web.Response(body=error, content_type="text/event-stream")

    setup.decode[0].script = fails_once
    await setup.ask(stream=True)
    assert len(setup.decode[0].asked) == 2
    assert setup.metric("bidir_router_decode_first_byte_seconds_count") == 1
    assert setup.metric("bidir_router_first_byte_seconds_count", outcome="miss") == 1


async def test_prompt_tokens_are_counted_as_p_counts_them(setup: Setup) -> None:
    async def prefill(request: web.Request, body: dict[str, Any]) -> web.Response:
        usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 70}}
        return web.json_response({"choices": [], "usage": usage, "kv_transfer_params": P_PARAMS})

    setup.prefill[0].script = prefill
    await setup.ask()
    assert setup.metric("bidir_router_prompt_tokens_total", kind="reused") == 70
    assert setup.metric("bidir_router_prompt_tokens_total", kind="computed") == 30


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ({"prompt_tokens": 9}, (9, None)),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}}, (9, 4)),
        ({"input_tokens": 5, "cache_read_input_tokens": 4}, (9, 4)),
        (
            {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2},
            (9, 4),
        ),
        ({"input_tokens": 9}, (9, None)),
        ({"prompt_tokens": "9"}, (None, None)),
        (None, (None, None)),
    ],
)
def test_every_api_says_it_in_its_own_way(
    usage: Any, expected: tuple[int | None, int | None]
) -> None:
    assert prompt_tokens(json.dumps({"usage": usage}).encode()) == expected


@pytest.mark.parametrize("usage", [(3, 4), (3, -1), (None, 3), (3, None)])
def test_tokens_that_do_not_fit_are_not_counted(usage: Any, setup: Setup) -> None:
    setup.router.metrics.prompt_tokens(*usage)
    for kind in ("reused", "computed"):
        assert setup.metric("bidir_router_prompt_tokens_total", kind=kind) == 0


async def test_answers_are_counted_by_route_and_status(setup: Setup) -> None:
    await setup.ask()
    await setup.ask(n="no")
    await setup.ask(path="/v1/nothing-secret")
    await setup.client.get(setup.url + "/conversations/c-17")

    def answers(route: str, status: int) -> float:
        return setup.metric("bidir_router_answers_total", route=route, status=str(status))

    assert answers("/v1/completions", 200) == 2
    assert answers("unknown", 404) == 1
    assert answers("/conversations/{id}", 404) == 1


async def test_what_went_wrong_is_remembered_by_kind_and_node(make_setup: MakeSetup) -> None:
    setup = await make_setup(prefill=1, decode=1, health_interval=0)

    async def fails(request: web.Request, body: dict[str, Any]) -> web.Response:
        return web.json_response({"secret": body}, status=500)

    setup.decode[0].script = fails
    for _ in range(3):
        assert (await setup.ask(conversation_id="private", stream=True))[0] == 500
    node = str(setup.decode[0].address)
    errors = {
        (one.what, one.node, one.why): one.count
        for one in setup.router.metrics.last_errors.newest_first()
    }
    assert errors == {
        ("decode leg", node, "500"): 6,  # with what P handed over, and without
        ("decode node", node, "ejected"): 1,
        ("answer to /v1/completions", "", "500"): 3,
    }


async def test_a_node_that_goes_down_is_remembered_with_the_reason(make_setup: MakeSetup) -> None:
    setup = await make_setup(health_interval=0.02)
    await until(lambda: all(node.health.up for node in setup.router.decode.nodes))
    setup.decode[0].health = 503
    await until(lambda: setup.router.decode.nodes[0].health.up is False)
    (error,) = setup.router.metrics.last_errors.newest_first()
    assert (error.what, error.why) == ("decode node", "down: 503")


def test_the_last_errors_are_bounded_and_the_newest_come_first() -> None:
    now = [0.0]
    errors = LastErrors(lambda: now[0])
    errors.note("old", "n", "1")
    for number in range(MOST_KINDS - 1):
        now[0] += 1
        errors.note("leg", f"node-{number}", "500")
    now[0] += 1
    errors.note("old", "n", "1")
    errors.note("newest", "x" * 10_000, "y" * 10_000)
    newest, old, *rest = errors.newest_first()
    assert (newest.what, len(newest.node), len(newest.why)) == ("newest", 200, 200)
    assert (old.what, old.count, old.last) == ("old", 2, now[0])
    assert len(rest) == MOST_KINDS - 2 and rest[-1].node == "node-1"


def test_the_last_minutes_forget_what_is_older() -> None:
    now = [1000.0]
    minutes = LastMinutes(lambda: now[0])
    minutes.count("hit")
    minutes.count("expired")
    now[0] += 60
    minutes.count("hit")
    assert minutes.totals() == {"hit": 2, "expired": 1}
    now[0] += 60 * (MINUTES - 1)
    assert minutes.totals() == {"hit": 1}
    now[0] += 60
    assert minutes.totals() == {}
