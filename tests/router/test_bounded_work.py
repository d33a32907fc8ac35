"""What others send takes work and memory in proportion to its length, whatever is in it."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.bidir.reasons import Reason
from vllm.bidir.router.clients import client_params, parts
from vllm.bidir.router.clients.client_params import REFUSED, refuse_params
from vllm.bidir.router.clients.errors import ClientError
from vllm.bidir.router.clients.request import parse_request
from vllm.bidir.router.conversations import identity
from vllm.bidir.router.conversations.conversations import conversation_key
from vllm.bidir.router.conversations.identity import Identities, trace
from vllm.bidir.router.turns.responses import Responses, ResponsesFilter
from vllm.bidir.router.turns.stream import StreamFilter, take_params

from tests.router.conftest import Setup

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SIZE = 1 << 18
# Of the body: copies of it while it is looked into, and small change.
MOST_MEMORY = 6


def many(piece: bytes) -> bytes:
    return b",".join([piece] * (SIZE // (len(piece) + 1)))


def named(value: bytes = b"0") -> bytes:
    """Fields of different names."""
    return b",".join(b'"%x":%b' % (number, value) for number in range(SIZE // 10))


BODIES = {
    "messages that are none": (CHAT, b'{"model":"m","messages":[%b]}' % many(b"0")),
    "empty messages": (CHAT, b'{"model":"m","messages":[%b]}' % many(b"{}")),
    "items of Responses": (RESPONSES, b'{"input":[%b]}' % many(b"{}")),
    "fields": (CHAT, b'{"model":"m",%b}' % named()),
    "a key in fields": (CHAT, b'{"model":"m","x":{%b,"_transfer_params":1}}' % named()),
    "a key beside lists": (CHAT, b'{"model":"m","kv_transfer_params":null,"x":[%b]}' % many(b"[]")),
    "a key in lists": (CHAT, b'{"model":"m","x":[%b,"_transfer_params"]}' % many(b"[]")),
    "letters spelled out": (CHAT, b'{"model":"m","x":"\\u0061","y":[%b]}' % many(b"[]")),
    "marks": (
        CHAT,
        b'{"model":"m","messages":[{"a":0,%b}]}' % many(b'"cache_control":null'),
    ),
    "one text": (
        CHAT,
        b'{"model":"m","messages":[{"cache_control":0,"content":[{"type":"text","text":"%b"}]}]}'
        % (b"\\n" * (SIZE // 2)),
    ),
} | {
    field: (CHAT, b'{"model":"m","%b":[%b]}' % (field.encode(), many(b"[]")))
    for field in ("model", "stream", "n", "echo", "prompt_logprobs", "use_beam_search")
    + ("conversation_id", "session_id", "prompt")
}


def read(path: str, body: bytes) -> None:
    """All that a router reads of a request."""
    try:
        trace("tenant", parse_request(path, body), {})
    except ClientError as refused:
        assert refused.status == 400


def peak(run: Callable[[], object]) -> int:
    run()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BODIES)
def test_no_body_takes_much_more_memory_than_its_own(name: str) -> None:
    path, body = BODIES[name]
    assert peak(lambda: read(path, body)) < MOST_MEMORY * len(body)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kv_transfer_params":{"a":[%b]}}' % many(b"[]"),
        b'{"response":{"kv_transfer_params":{"a":[%b]}}}' % many(b"{}"),
        b'{"kv_transfer_params":{"a":1},%b}' % named(),
    ],
)
def test_no_answer_of_an_engine_does(answer: bytes) -> None:
    assert peak(lambda: take_params(answer)) < MOST_MEMORY * len(answer)
    assert take_params(answer)[1] is None


def test_params_of_a_very_long_turn_are_taken() -> None:
    """A million tokens in blocks of 16, eight groups of layers, and a proof."""
    groups = [list(range(n << 16, (n << 16) + 8_000)) for n in range(8)]
    params = {"remote_block_ids": groups, "prefix_proof": {"hashes": "x" * 400_000}}
    answer = json.dumps({"id": "a", "kv_transfer_params": params}).encode()
    stripped, found = take_params(answer)
    assert stripped == b'{"id":"a"}' and found is not None
    assert msgspec.json.decode(msgspec.json.encode(found)) == params


@pytest.mark.parametrize(
    "line",
    [
        b'"response.completed"\n',
        b'"response.incomplete"\n',
        b'"kv_transfer_params"\n',
        b'data: {"type":"response.completed","response":{"id":"i","output":[]}}\n',
        b'data: {"kv_transfer_params":{"a":1}}\n',
    ],
)
def test_a_piece_is_searched_once_however_many_lines_are_looked_into(line: bytes) -> None:
    """A megabyte; searched again for each line it would take minutes."""
    piece = line * (4 * SIZE // len(line))
    begun = time.process_time()
    taken = ResponsesFilter()
    assert len(taken.feed(piece)) <= len(piece)
    assert time.process_time() - begun < 10


def test_a_line_that_does_not_end_is_put_together_once() -> None:
    copied = 0

    class Piece(bytes):
        def __radd__(self, before: bytes) -> bytes:
            nonlocal copied
            copied += len(before)
            return bytes(before) + bytes(self)

    line = StreamFilter()
    for _ in range(1000):
        assert line.feed(Piece(b"x" * 100)) == b""
    assert line.feed(b"\ny") == b"x" * 100_000 + b"\n" and line.finish() == b"y"
    assert copied <= 100_000


@pytest.mark.parametrize("depth", [5, 500])
def test_however_deep_a_key_may_be_a_body_is_read_a_few_times(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = 0

    def counted(text: bytes) -> Any:
        nonlocal read_bytes
        read_bytes += len(text)
        return parts.split_object(text)

    monkeypatch.setattr(client_params, "split_object", counted)
    inner = b'"%b _transfer_params\\u005f"' % (b"x" * SIZE)
    body = b'{"a":' * depth + inner + b"}" * depth
    try:
        refuse_params(body)
        assert depth == 5
    except ClientError as refused:
        assert refused.status == 400 and "too deep" in refused.message and depth == 500
    assert read_bytes <= 7 * len(body)


def history(count: int, last: str = "") -> bytes:
    said = [{"role": "user", "content": f"{number} " + "word, " * 40} for number in range(count)]
    return json.dumps(
        {"model": "m", "messages": [*said, {"role": "user", "content": last}]}
    ).encode()


def test_the_longest_histories_of_agents_are_found_again() -> None:
    identities = Identities(99)
    before = identities.find("", parse_request(CHAT, history(9_000)[:-2] + b"]}"), {})
    assert before is not None
    kept = identities.settle(before).key
    body = json.loads(history(9_000))
    body["messages"] += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "b"}]
    after = identities.find("", parse_request(CHAT, json.dumps(body).encode()), {})
    assert after is not None and after.key == kept and after.by == "history"


@pytest.mark.parametrize("count", [parts.MOST_ITEMS - 1, parts.MOST_ITEMS])
def test_more_messages_than_these_are_no_history(count: int) -> None:
    request = parse_request(CHAT, history(count))
    chain = trace("", request, {}).chain
    assert len(chain) == (parts.MOST_ITEMS if count < parts.MOST_ITEMS else 0)
    assert trace("", request, {"X-Session-ID": "one"}).root == conversation_key("", "one")


@pytest.mark.parametrize("count", [0, 1, 1_000, 1_001, parts.MOST_ITEMS, parts.MOST_ITEMS + 1])
def test_a_long_list_is_split_into_its_items(count: int) -> None:
    items = [b'{"n":%d}' % number for number in range(count)]
    text = b"[" + b" ".join([b",".join(items), b" " * (20 << 10)]) + b"]"
    if count > parts.MOST_ITEMS:
        with pytest.raises(parts.TooManyError):
            parts.split_array(text)
    else:
        assert [bytes(item) for item in parts.split_array(text)] == items


async def test_what_is_no_history_is_served_and_counted(setup: Setup) -> None:
    assert (await setup.ask(CHAT, messages=[0] * 20_000))[0] == 200
    assert setup.metric("bidir_router_identified_total", by="none") == 1


async def test_too_many_fields_are_refused(setup: Setup) -> None:
    fields = {f"f{number}": number for number in range(parts.MOST_FIELDS)}
    for more in ({}, {"x": "y" * 20_000}):
        status, answer = await setup.ask(**fields, **more)
        assert status == 400 and f"{parts.MOST_FIELDS} fields" in answer.decode()
    assert setup.decode[0].asked == []


def test_a_response_behind_too_many_others_is_not_expanded() -> None:
    responses = Responses(1 << 30, 1 << 30)
    ids = [f"r{number}" for number in range(10_001)]
    keys = [conversation_key("", one) for one in ids]
    for key, before in zip(keys, [None, *keys], strict=False):
        responses.adopt(key, before, b"{}")
    for one, bypass in ((ids[-2], None), (ids[-1], Reason.BYPASS_STORED)):
        body = json.dumps({"input": "x", "previous_response_id": one}).encode()
        request, _ = responses.expand("", parse_request(RESPONSES, body))
        assert request.bypass is bypass
    assert len(responses.line(keys[-1])[0]) == 10_000


# Any JSON, in which the words that matter are frequent.
_WORDS = st.sampled_from(
    ["kv_transfer_params", "ec_transfer_params", "x_transfer_params", "input", "tools", "a", "b"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=12,
)


def refused_in(body: Any, free: frozenset[str]) -> bool:
    """The same by the whole tree."""
    if isinstance(body, list):
        return any(refused_in(one, free | {"input"}) for one in body)
    if not isinstance(body, dict):
        return False
    if any(body.get(key) is not None for key in REFUSED):
        return True
    return any(
        refused_in(value, free | {"input"}) for key, value in body.items() if key not in free
    )


@given(_JSON, st.sampled_from(["", "v", "_", "p"]), st.sampled_from(["", " "]))
def test_keys_are_found_as_in_the_whole_tree(body: Any, spelled: str, space: str) -> None:
    text = space + json.dumps(body)
    if spelled:
        text = text.replace(spelled, f"\\u{ord(spelled):04x}")
    expected = refused_in(body, client_params._FREE_FORM)
    try:
        refuse_params(text.encode())
    except ClientError:
        assert expected
    else:
        assert not expected


_MARKS = re.compile(rb',\s*"cache_control"\s*:\s*(?:\{[^{}]*\}|null)')
_TEXT = re.compile(
    rb'"content"(\s*:\s*)\[\s*\{\s*"type"\s*:\s*"text"\s*,'
    rb'\s*"text"\s*:\s*("[^"\\]*(?:\\.[^"\\]*)*")\s*\}\s*\]'
)
_MARK_VALUES = st.sampled_from([None, {}, {"type": "ephemeral"}, {"a": {}}, "x"])
_SAID = st.text(st.sampled_from('a",\\\n {}[]é'), max_size=8)
_BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image"]), "text": _SAID | st.integers(0, 9)},
    optional={"cache_control": _MARK_VALUES, "more": _SAID},
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.just("user")},
    optional={
        "cache_control": _MARK_VALUES,
        "content": _SAID | st.lists(_BLOCKS, max_size=3),
        "name": _SAID,
    },
)


@given(_MESSAGES, st.sampled_from([None, 1]))
def test_messages_are_the_same_to_us_as_by_expressions(message: Any, indent: int | None) -> None:
    text = json.dumps(message, indent=indent).encode()
    expected = _TEXT.sub(rb'"content"\1\2', _MARKS.sub(b"", text), count=1)
    assert identity._plain(text) == expected
