"""P's list of handovers, and what it answers to who claims: a real scheduler, a real socket."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.bidir.connector import peer
from vllm.bidir.connector.binding import binding, prompt_digest
from vllm.bidir.connector.handed import PARAM, HandedOver, parse_token
from vllm.bidir.connector.kept import KeptTurns
from vllm.bidir.connector.listener import start_listener
from vllm.bidir.connector.messages import (
    CLAIM,
    MAX_NAME,
    MalformedMessageError,
    SideChannel,
    ask_claim,
    read_claim,
)
from vllm.bidir.connector.outcome import LostHandover, WorkerReport
from vllm.bidir.connector.rest import LOOKS_S
from vllm.bidir.reasons import Reason
from vllm.v1.outputs import KVConnectorOutput

from tests.connector.sim import FIRST_TURN, Engine
from tests.connector.test_failed_loads import GROUPS

HOST = "127.0.0.1"
TOKEN = "ab" * 16
BLOCKS = [[4, 5, 6], [9]]
PROMPT = b"a digest"
BINDING = binding("r", BLOCKS, PROMPT)
HANDOVER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(1, 9))],
    "remote_engine_id": "p",
    "remote_request_id": "there",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    PARAM: TOKEN,
}


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def handed(clock: Clock) -> HandedOver:
    return HandedOver(clock)


@pytest.fixture
def token(handed: HandedOver, clock: Clock) -> str:
    """Of one handover, kept for 30 s."""
    return handed.add("r", clock.now + 30, BINDING)


def test_a_claim_says_for_how_long_the_blocks_stay(
    handed: HandedOver, token: str, clock: Clock
) -> None:
    assert handed.claim(token, "d", BINDING) == 30
    clock.now += 10
    assert handed.claim(token, "d", BINDING) == 20, "its own reader may ask again"


def test_what_d_keeps_alive_beyond_its_time_stands_without_a_promise(
    handed: HandedOver, token: str, clock: Clock
) -> None:
    """The workers prolong it when D sends a heartbeat; the list is not told."""
    clock.now += 31
    assert handed.claim(token, "d", BINDING) == 0


def test_what_has_been_freed_cannot_be_claimed(handed: HandedOver, token: str) -> None:
    handed.claim(token, "d", BINDING)
    handed.end("r")
    handed.end("r")
    assert handed.claim(token, "d", BINDING) is Reason.EXPIRED
    assert len(handed) == 0


def test_who_knows_a_requests_id_only_can_claim_nothing(handed: HandedOver, token: str) -> None:
    """Clients have a say in those ids."""
    assert handed.claim("r", "stranger", BINDING) is Reason.EXPIRED
    assert handed.claim(token, "d", BINDING) == 30
    assert handed.add("r2", 0.0, BINDING) != token


def test_a_handover_is_one_readers(handed: HandedOver, token: str) -> None:
    """The first may say that it is done, and have it freed, while the second reads."""
    assert handed.claim(token, "d0", BINDING) == 30
    assert handed.claim(token, "d1", BINDING) is Reason.EXPIRED
    assert handed.claim(token, "d0", BINDING) == 30


@pytest.mark.parametrize(
    ("request_id", "blocks"),
    [
        ("r", [[4, 5, 7], [9]]),
        ("r", [[4, 5], [9]]),
        ("r", [[5, 4, 6], [9]]),
        ("r", [[9], [4, 5, 6]]),
        ("r", [[4, 5], [6, 9]]),
        ("r", [[4, 5, 6, 9]]),
        ("r", [[4, 5, 6], [9], []]),
        ("r", [[4, 5, 1 << 64], [9]]),
        ("r2", BLOCKS),
    ],
    ids=str,
)
def test_what_was_not_handed_over_cannot_be_claimed(
    handed: HandedOver, token: str, request_id: str, blocks: list[list[int]]
) -> None:
    """A token that is one's own, and the blocks of somebody else."""
    named = binding(request_id, blocks, PROMPT)
    assert handed.claim(token, "d", named) is Reason.NOT_HANDED_OVER
    assert handed.claim(token, "another", BINDING) == 30, "it is nobody's yet"
    assert handed.claim(token, "another", named) is Reason.NOT_HANDED_OVER


def test_a_binding_is_of_what_params_say_however_they_have_travelled() -> None:
    """As P's scheduler has them, and as they have come as JSON."""
    assert binding("r", ([4, 5, 6], (9,)), PROMPT) == BINDING
    assert binding("r", json.loads(json.dumps(BLOCKS)), PROMPT) == BINDING
    assert len(BINDING) == 16


@pytest.mark.parametrize("value", [None, 1, "", "a" * 31, "a" * 33, ["a" * 32]])
def test_what_is_no_token_is_not_claimed(value: object) -> None:
    assert parse_token(value) is None


@pytest.fixture
def port(handed: HandedOver) -> Iterator[int]:
    """Where the list is asked about."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        found: int = free.getsockname()[1]
    stop = threading.Event()
    channel = SideChannel(KeptTurns(), "p", 1, {}, b"get_meta", lambda: 0.0, handed=handed)
    thread = start_listener(channel, HOST, found, stop)
    yield found
    stop.set()
    thread.join(timeout=5)


def test_a_claim_over_the_wire(handed: HandedOver, token: str, port: int) -> None:
    asked = peer.claim(HOST, port, token, "d", BINDING, 5.0)
    assert (asked.stands_s, asked.reason, asked.address) == (30, None, (HOST, port))
    assert asked.asked > 0
    asked = peer.claim(HOST, port, token, "d", binding("r", [[1]], PROMPT), 5.0)
    assert (asked.stands_s, asked.reason) == (None, Reason.NOT_HANDED_OVER)
    handed.end("r")
    asked = peer.claim(HOST, port, token, "d", BINDING, 5.0)
    assert (asked.stands_s, asked.reason) == (None, Reason.EXPIRED)


def test_of_a_name_with_both_kinds_of_addresses_the_listeners_is_asked(
    handed: HandedOver, token: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is named by a name, such as localhost, listens at its IPv4 address only."""
    real = socket.getaddrinfo

    def both(_: str, port: int, family: int = 0, kind: int = 0) -> list[Any]:
        four = real(HOST, port, socket.AF_INET, kind)
        six = (socket.AF_INET6, kind, 0, "", ("::1", port, 0, 0))
        return four if family == socket.AF_INET else [six, *four]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    assert peer.claim("localhost", port, token, "d", BINDING, 1.0).stands_s == 30


@pytest.mark.parametrize("names", [("", "d"), ("r", ""), ("r" * (MAX_NAME + 1), "d"), (1, "d")])
def test_a_claim_that_names_nothing_is_not_understood(
    handed: HandedOver, names: tuple[object, object]
) -> None:
    channel = SideChannel(KeptTurns(), "p", 1, {}, b"get_meta", lambda: 0.0, handed=handed)
    with pytest.raises(MalformedMessageError):
        channel.answer(msgspec.msgpack.encode((CLAIM, *names, BINDING)))


@pytest.mark.parametrize("named", [None, "ab", 1, b"a" * 65, [b"a"]])
def test_a_binding_that_is_none_is_not_understood(
    handed: HandedOver, token: str, named: object
) -> None:
    """Nor is it taken for a claim that says nothing of blocks."""
    channel = SideChannel(KeptTurns(), "p", 1, {}, b"get_meta", lambda: 0.0, handed=handed)
    for rest in ((named,), (), (BINDING, BINDING)):
        with pytest.raises(MalformedMessageError):
            channel.answer(msgspec.msgpack.encode((CLAIM, token, "d", *rest)))


@pytest.mark.parametrize("answer", [-1.0, math.inf, math.nan, "soon", True, [1.0]])
def test_an_answer_that_is_no_time_is_not_believed(answer: object) -> None:
    with pytest.raises(MalformedMessageError):
        read_claim(msgspec.msgpack.encode(answer))


@pytest.mark.parametrize("groups", [1, 2])
def test_p_lists_what_it_hands_over_until_its_blocks_are_freed(model: Path, groups: int) -> None:
    """Of a sliding window the blocks that are left, which is what its params name."""
    p = Engine(model, "p", groups=GROUPS[:groups])
    request = p.add(list(range(100)), FIRST_TURN)
    while not request.is_finished():
        p.step()
    params = p._finished[request.request_id]
    assert params is not None
    channel = SideChannel(
        p.bidir.kept, "p", 1, {}, b"get_meta", time.perf_counter, handed=p.bidir.handed
    )
    params = json.loads(json.dumps(params))
    prompt = prompt_digest(request, 100)
    named = binding(params["remote_request_id"], params["remote_block_ids"], prompt)
    ask = ask_claim(params[PARAM], "d", named)
    stands_s = read_claim(channel.answer(ask)[0])
    assert isinstance(stands_s, float) and 20 < stands_s <= 30, "kv_lease_duration"
    assert len(params["remote_block_ids"]) == groups
    other = ask_claim(params[PARAM], "d", binding("r", [[1]] * groups, prompt))
    assert read_claim(channel.answer(other)[0]) is Reason.NOT_HANDED_OVER
    freed = p.free_blocks
    p.expire(request.request_id)
    assert p.free_blocks > freed
    assert read_claim(channel.answer(ask)[0]) is Reason.EXPIRED
    assert len(p.bidir.handed) == 0


@pytest.mark.parametrize(
    ("prompt", "more", "stands"),
    [
        (range(100), {}, True),
        (range(101), {}, False),
        (range(112), {}, False),
        (range(99), {}, False),
        ([*range(99), 7], {}, False),
        (range(100), {"salt": "another's"}, False),
    ],
)
def test_what_is_handed_over_is_one_prompts(
    model: Path, prompt: Iterable[int], more: dict[str, str], stands: bool
) -> None:
    """A longer one would have D take what lies in P's last block behind the prompt's end."""
    p, d = Engine(model, "p"), Engine(model, "d")
    request = p.add(list(range(100)), FIRST_TURN)
    while not request.is_finished():
        p.step()
    params = json.loads(json.dumps(p._finished[request.request_id]))
    claims = d.add(list(prompt), params, **more).request_id
    order = d.scheduler.schedule().kv_connector_metadata.claims[claims]
    named = binding(params["remote_request_id"], params["remote_block_ids"], order.prompt)
    found = p.bidir.handed.claim(order.token, order.reader, named)
    assert found is Reason.NOT_HANDED_OVER if not stands else isinstance(found, float)


def test_a_prompt_is_that_of_one_adapter_and_of_one_salt() -> None:
    def digest(adapter: str | None, salt: str | None, ids: list[int] | None = None) -> bytes:
        lora = None if adapter is None else SimpleNamespace(lora_name=adapter)
        request: Any = SimpleNamespace(
            prompt_token_ids=ids or [1, 2, 3], lora_request=lora, cache_salt=salt
        )
        return prompt_digest(request, 3)

    assert digest("a", "b") == digest("a", "b", [1, 2, 3, 4])
    found = [digest(*names) for names in ((None, None), ("a", None), (None, "a"), ("a", "b"))]
    assert len({*found, digest("ab", None), digest("a", "b", [1, 2, 4])}) == 6


def test_what_a_turn_on_d_keeps_is_no_handover(model: Path) -> None:
    d = Engine(model, "d")
    params, _ = d.run(list(range(100)), {"do_remote_prefill": False}, max_tokens=3)
    assert params is not None and PARAM not in params
    assert len(d.bidir.handed) == 0


@pytest.mark.parametrize(("token", "claims"), [(TOKEN, True), (None, False), (1, False)])
def test_d_claims_what_p_says_can_be_claimed(model: Path, token: object, claims: bool) -> None:
    """A stock P would not understand."""
    d = Engine(model, "d")
    request = d.add(list(range(100)), {**HANDOVER, PARAM: token})
    metadata = d.scheduler.schedule().kv_connector_metadata
    assert request.request_id in metadata.reqs_to_recv
    found = {name: order.token for name, order in metadata.claims.items()}
    assert found == ({request.request_id: TOKEN} if claims else {})
    assert d.bidir._claims == {}, "each is told once"


def test_a_restarted_d_of_the_same_name_is_another_reader(model: Path) -> None:
    readers = {Engine(model, "d").bidir._reader for _ in range(2)}
    assert len(readers) == 2 and all(one.startswith("d/") for one in readers)


def test_a_lost_handover_is_counted_once_for_all_ranks(model: Path) -> None:
    d = Engine(model, "d")
    request = d.add(list(range(100)), HANDOVER)
    d.scheduler.schedule()
    name, lost = request.request_id, LostHandover("p", Reason.EXPIRED)
    ranks = [WorkerReport(lost={name: lost}) for _ in range(2)]
    report = ranks[0].aggregate(ranks[1])
    assert report
    output = KVConnectorOutput(finished_recving=set(), kv_connector_worker_meta=report)
    d.bidir.update_connector_output(output)
    output = KVConnectorOutput(finished_recving={name}, kv_connector_worker_meta=ranks[1])
    d.bidir.update_connector_output(output)
    assert d.bidir.stats.data["lost_handovers"] == ["expired"]
    assert d.bidir._lost == {}


def test_d_claims_what_it_tells_p_to_free(model: Path) -> None:
    """A request that goes before it is scheduled; the engine may be at rest behind it."""
    d = Engine(model, "d")
    request = d.add(list(range(100)), HANDOVER)
    d.abort(request)
    assert d.bidir.rest.is_due()
    metadata = d.scheduler.schedule().kv_connector_metadata
    assert set(metadata.claims) == {request.request_id}
    left = d.bidir.rest.seconds_left()
    assert left is not None and 0 < left <= LOOKS_S[0], "then the answer is looked for"
