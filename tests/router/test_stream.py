"""The stream filter takes one field out and changes no other byte, however the stream is cut."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from vllm.bidir.router.turns.stream import StreamFilter, find_params, take_params

from tests.router.conftest import Setup
from tests.router.fake_engine import as_client_sees, d_params, event, stream_of

WHOLE = b"".join(stream_of(d_params(1)))


# All that a stream of events may hold: comments, ids, CRLF, empty lines, no last newline.
EVENTS = (
    ": keep-alive\r\n\r\nid: 7\r\nretry: 3\r\nevent: \u00fc\u4e2d\U0001f600\r\n"
    'data: {"text":"\u00fc\u4e2d\U0001f600\u2028\\r"}\r\n\r\n:\n\n\n'
    'data:{"a":1,"kv_transfer_params":{"b":"\u4e2d"},"c":"\U0001f600"}\r\n\r\nfield\ndata\n'
    'data:  {"kv_transfer_params":null}  \n\ndata: [DONE]\n\n: bye \u4e2d'
).encode()
EVENTS_SEEN = EVENTS.replace(',"kv_transfer_params":{"b":"\u4e2d"}'.encode(), b"").replace(
    b'"kv_transfer_params":null', b""
)


@given(st.lists(st.integers(0, len(EVENTS)), max_size=30))
def test_any_cut_of_any_event_stream_gives_the_same(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(EVENTS)]
    assert run([EVENTS[a:b] for a, b in itertools.pairwise(ends)])[0] == EVENTS_SEEN


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
async def test_a_stream_in_small_pieces_reaches_the_client_byte_for_byte(
    setup: Setup, size: int
) -> None:
    async def pieces(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for at in range(0, len(EVENTS), size):
            await response.write(EVENTS[at : at + size])
            await asyncio.sleep(0)
        return response

    setup.decode[0].script = pieces
    assert await setup.ask(stream=True) == (200, EVENTS_SEEN)


def run(pieces: list[bytes]) -> tuple[bytes, dict[str, object] | None]:
    taken = StreamFilter()
    out = b"".join([*map(taken.feed, pieces), taken.finish()])
    return out, taken.params


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12))
def test_any_cut_of_the_stream_gives_the_same(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(WHOLE)]
    pieces = [WHOLE[a:b] for a, b in itertools.pairwise(ends)]
    assert run(pieces) == (as_client_sees(d_params(1)), d_params(1))


@given(st.binary(max_size=300), st.integers(0, 300))
def test_bytes_without_the_field_are_never_changed(data: bytes, cut: int) -> None:
    assert run([data[:cut], data[cut:]]) == (data, None)


@given(st.text(max_size=80), st.sampled_from(["\n\n", "\r\n\r\n"]))
def test_text_that_speaks_of_the_field_is_no_field(text: str, ending: str) -> None:
    chunk = {"choices": [{"text": text + '"kv_transfer_params": {"a": 1}'}]}
    line = f"data: {json.dumps(chunk)}{ending}".encode()
    assert run([line]) == (line, None)


def test_a_nested_key_of_the_same_name_stays() -> None:
    line = event({"choices": [{"delta": {"kv_transfer_params": 1}}]})
    assert run([line]) == (line, None)


def test_null_params_are_taken_out_and_count_as_none() -> None:
    out, params = run([event({"id": "1", "kv_transfer_params": None})])
    assert out == b'data: {"id":"1"}\n\n'
    assert params is None


def test_params_that_cannot_be_read_count_as_none() -> None:
    out, params = run([b'data: {"id":"1","kv_transfer_params":{"lease_duration":1e999}}\n\n'])
    assert out == b'data: {"id":"1"}\n\n'
    assert params is None


def test_the_field_of_responses_lies_inside_its_response() -> None:
    data = {"type": "response.completed", "response": {"id": "r", "kv_transfer_params": {"a": 1}}}
    out, params = run([b"event: response.completed\n" + event(data)])
    assert params == {"a": 1}
    assert json.loads(out.split(b"data: ")[1]) == {
        "type": "response.completed",
        "response": {"id": "r"},
    }


def test_what_is_no_json_object_passes() -> None:
    for payload in (b"[DONE]", b'["kv_transfer_params"]', b"{", b""):
        assert take_params(payload) == (payload, None)
        assert find_params(payload) is None


@pytest.mark.parametrize(
    ("payload", "params"),
    [
        (b'{"a":1,"kv_transfer_params":{"b":[1,2]}}', {"b": [1, 2]}),
        (b'{"kv_transfer_params":null}', None),
        (b'{"kv_transfer_params":[1]}', None),
        (b'{"a":"kv_transfer_params"}', None),
        (b'{"response":{"id":"r","kv_transfer_params":{"b":1}}}', {"b": 1}),
        (b'{"response":{"kv_transfer_params":{"b":1}},"kv_transfer_params":{"c":2}}', {"c": 2}),
        (b'{"response":["kv_transfer_params"]}', None),
        (b'{"other":{"kv_transfer_params":{"b":1}}}', None),
    ],
)
def test_params_are_found_where_they_are_taken(
    payload: bytes, params: dict[str, Any] | None
) -> None:
    assert find_params(payload) == take_params(payload)[1] == params


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.bidir.router.turns.stream._MAX_LINE", 100)
    with pytest.raises(ValueError, match="exceeds 100 bytes"):
        StreamFilter().feed(b"x" * 101)
