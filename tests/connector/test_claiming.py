"""D uses what it has read of P only if P still had it: real NIXL, and workers without it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from vllm.bidir.connector import greeting, peer, questions
from vllm.bidir.connector.binding import binding
from vllm.bidir.connector.claiming import ClaimOrder
from vllm.bidir.connector.handed import HandedOver
from vllm.bidir.connector.kept import KeptTurns
from vllm.bidir.connector.listener import start_listener
from vllm.bidir.connector.messages import SideChannel
from vllm.bidir.connector.outcome import WorkerReport
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from tests.connector.nodes import Node, alone, handover
from tests.connector.test_worker import TIMEOUT_S, Bare

__all__ = ["alone"]

NOTICE = b"at-p:1"
ADDRESS = ("10.0.0.1", 5600)
PROMPT = b"a digest"
ORDER = ClaimOrder("token", "d/1", PROMPT)
OURS, THEIRS = [31, 30, 7], [20, 19, 33]
HANDED = binding("at-p", (THEIRS,), PROMPT)


# One for each answer that P gives.
may_answer = threading.Semaphore(0)
# What P was asked about.
claimed: list[bytes] = []


class Reader(Bare):
    """A D that reads handovers of engine `d`'s, whose answers to claims are the test's."""

    def __init__(self) -> None:
        super().__init__()
        self._remote_agents["d"] = {(0, 0): "agent"}
        self._addresses["d"] = ADDRESS
        self._binding_engines.add("d")

    def has_met_a_p_that_binds_nothing(self) -> None:
        """It is stock."""
        self._binding_engines.clear()

    def reads(
        self, request_id: str, claims: bool = True, ours: Sequence[int] | None = OURS
    ) -> None:
        """The request's READs are posted, unless it needs nothing: of one block at the least, or
        None, as the scheduler has it."""
        remote = SimpleNamespace(
            engine_id="d", host="10.0.0.1", port=5600, request_id="at-p", block_ids=(THEIRS,)
        )
        groups = () if ours is None else (ours,)
        meta: Any = SimpleNamespace(remote=remote, local_block_ids=groups)
        if ours:
            self._recving_metadata[request_id] = meta
        if claims:
            self._claimable[request_id] = ORDER
        self._read_blocks_for_req(request_id, meta)

    def step(self) -> set[str]:
        """A step's end: requests whose load is over, well or badly."""
        over, report = self.finish()
        self.said = report or WorkerReport()
        return over

    def hears(self) -> None:
        """One more answer is there for the next step."""
        before = self._questions.claims.qsize()
        may_answer.release()
        end = time.monotonic() + 5
        while self._questions.claims.qsize() == before:
            assert time.monotonic() < end
            time.sleep(0.001)

    @property
    def told(self) -> list[tuple[str, bytes]]:
        return self.nixl_wrapper.told


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[peer.Asked]:
    """What P answers next; the last one for ever."""
    found = [peer.Asked(stands_s=30.0, address=ADDRESS)]

    def claim(
        host: str, port: int, token: str, reader: str, named: bytes, timeout_s: float
    ) -> peer.Asked:
        assert (host, port, token, reader) == ("10.0.0.1", 5600, "token", "d/1")
        claimed.append(named)
        assert may_answer.acquire(timeout=5)
        answer = found.pop(0) if len(found) > 1 else found[0]
        return replace(answer, asked=time.monotonic())

    monkeypatch.setattr(questions.peer, "claim", claim)
    return found


@pytest.fixture
def d(answers: list[peer.Asked], monkeypatch: pytest.MonkeyPatch) -> Reader:
    def one_rank(self: Reader, req_id: str, meta: Any) -> None:
        """Which ranks are read from is the base's own."""
        spec: Any = SimpleNamespace(
            remote_rank=0,
            local_block_ids=meta.local_block_ids,
            remote_block_ids=meta.remote.block_ids[: len(meta.local_block_ids)],
        )
        self._read_blocks(spec, "d", req_id, "at-p", 1, 2, 1)

    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", one_rank)
    return Reader()


def lost(d: Reader) -> list[str]:
    """Why those do not count that were lost in the last step."""
    return [str(one.reason) for one in d.said.lost.values()]


def test_a_handover_counts_when_p_has_answered(d: Reader) -> None:
    d.reads("r")
    assert d.nixl_wrapper.notifications == [None], "NIXL would have P free it"
    assert d.step() == set() and d.told == []
    d.hears()
    assert d.step() == {"r"}
    assert d.told == [("agent", NOTICE)]
    assert d.lost() == (set(), set()) and lost(d) == []
    assert d.busy_engines() == set()


@pytest.mark.parametrize("why", ["several groups", "context parallelism", "other block sizes"])
def test_what_the_base_reads_is_claimed_too(
    d: Reader, answers: list[peer.Asked], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pairs the blocks by rules of its own, and would have NIXL tell P."""
    d._is_hma_required = why == "several groups"
    d.info.remote_dcp_size = 2 if why == "context parallelism" else 1
    monkeypatch.setattr(type(d), "is_alike", lambda self, engine: why != "other block sizes")
    answers[:0] = [replace(answers[0]), peer.Asked(reason=Reason.EXPIRED, address=ADDRESS)]
    d.reads("r")
    assert d.nixl_wrapper.notifications == [b""], "NIXL would have P free it"
    d.hears()
    assert d.step() == {"r"} and d.told == [("agent", NOTICE)]

    d.reads("again")
    d.hears()
    assert d.step() == {"again"} and lost(d) == ["expired"]
    assert d.said.failed == ({"again"} if why == "several groups" else set())

    d.has_met_a_p_that_binds_nothing()
    d.reads("unclaimed", claims=False)
    assert d.nixl_wrapper.notifications[-1] == NOTICE


def test_an_answer_that_is_there_first_delays_nothing(d: Reader) -> None:
    d.reads("r")
    d.hears()
    assert d.step() == {"r"}


def test_what_p_has_freed_is_not_used(d: Reader, answers: list[peer.Asked]) -> None:
    answers[0] = peer.Asked(reason=Reason.EXPIRED, address=ADDRESS)
    d.reads("r")
    d.hears()
    d.nixl_wrapper.states = ["PROC"]
    assert d.step() == set(), "NIXL is still writing"
    assert d.step() == {"r"}
    assert d._invalid_block_ids.get_nowait() == set(OURS)
    assert lost(d) == ["expired"]
    assert d.told == []


def test_a_read_that_outlasts_the_promise_is_asked_about_again(
    d: Reader, answers: list[peer.Asked]
) -> None:
    """D's heartbeats may have kept the blocks for longer than P could promise."""
    answers[0] = peer.Asked(stands_s=0.0)
    d.reads("r")
    d.hears()
    assert d.step() == set()
    d.hears()
    assert d.step() == {"r"} and lost(d) == []
    assert d.told == [("agent", NOTICE)]


def test_a_p_that_does_not_answer_is_not_waited_for_long(
    d: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(questions.peer, "claim", lambda *_: let_go.wait(10) and peer.Asked())
    d.reads("r")
    assert d.step() == set()
    assert d.busy_engines() == {"d"}, "its agents are still needed"
    time.sleep(2 * TIMEOUT_S + 0.05)
    assert d.step() == {"r"}
    let_go.set()
    assert lost(d) == ["timeout"]


def test_a_p_that_was_busy_is_asked_once_more(d: Reader, answers: list[peer.Asked]) -> None:
    """It may have stood still for a moment, or another's question may have had it taken for
    silent; what D has read is there."""
    answers[:] = [peer.Asked(reason=Reason.TIMEOUT, address=ADDRESS), peer.Asked(stands_s=30.0)]
    d.reads("r")
    d.hears()
    assert ADDRESS in d._questions._silent
    assert d.step() == set()
    d.hears()
    assert d.step() == {"r"} and lost(d) == []


def test_a_p_that_stays_silent_is_asked_no_more(d: Reader, answers: list[peer.Asked]) -> None:
    answers[0] = peer.Asked(reason=Reason.TIMEOUT, address=ADDRESS)
    d.reads("r")
    d.hears()
    assert d.step() == set()
    d.hears()
    assert d.step() == {"r"} and lost(d) == ["timeout"]


def test_a_silent_p_does_not_keep_the_threads_for_others(d: Reader) -> None:
    """Nobody waits for it who has not read from it."""
    d._questions.not_heard(ADDRESS)
    d._questions.claim("r", ADDRESS, "token", "d/1", HANDED)
    name, asked = d._questions.claims.get(timeout=5)
    assert (name, asked.reason, asked.address) == ("r", Reason.PEER_GONE, None)


def test_a_p_that_cannot_be_asked_is_told_by_the_read(d: Reader) -> None:
    """As in the base."""
    d.has_met_a_p_that_binds_nothing()
    d.reads("r", claims=False)
    assert d.nixl_wrapper.notifications == [NOTICE]
    assert d.step() == {"r"}
    assert d.told == []


def test_a_read_that_fails_is_not_claimed_any_more(d: Reader) -> None:
    d.reads("r")
    d.nixl_wrapper.states = ["ERR"]
    assert d.step() == {"r"}
    d.hears()
    assert d.step() == set() and d.told == [] and lost(d) == []


def test_two_requests_of_one_handover_end_it_together(d: Reader) -> None:
    """Else P frees what the second still reads, when the first is done."""
    d.nixl_wrapper.states = ["DONE", "PROC"]
    for name in ("a", "b"):
        d.reads(name)
        d.hears()
    assert d.step() == {"a"} and d.told == []
    assert d.step() == {"b"} and d.told == [("agent", NOTICE)]


def test_what_is_read_after_p_was_told_has_no_promise(d: Reader, answers: list[peer.Asked]) -> None:
    """P looks at notices now and then: until it does it promises what it is about to free."""
    d.reads("a")
    d.hears()
    assert d.step() == {"a"} and d.told == [("agent", NOTICE)]
    d.reads("b")
    d.hears()
    assert d.step() == set(), "P promises 30 s, and has been told that it may free"
    d.hears()
    assert d.step() == {"b"}, "asked behind the READ, it still stood"
    assert d.told == [("agent", NOTICE)], "it hears of each rank once: it counts them"
    d.reads("c")
    d.hears()
    assert d.step() == set()
    answers[0] = peer.Asked(reason=Reason.EXPIRED)
    d.hears()
    assert d.step() == {"c"} and lost(d) == ["expired"]


def test_p_is_told_when_the_last_reader_of_a_handover_is_lost(d: Reader) -> None:
    d.nixl_wrapper.states = ["DONE", "PROC", "ERR"]
    for name in ("a", "b"):
        d.reads(name)
        d.hears()
    assert d.step() == {"a"} and d.told == []
    assert d.step() == {"b"} and d.told == [("agent", NOTICE)]
    assert d._owed == {}


def test_what_is_posted_of_a_lost_request_tells_nobody(d: Reader) -> None:
    """Its first rank could not be read; P's other ranks are not freed for that."""
    d._posting = "r"
    assert d._told_by_read("r", 1, NOTICE) is None
    assert d._told_by_read("other", 1, NOTICE) == NOTICE


def test_p_is_told_what_d_does_not_need(d: Reader) -> None:
    """A request that has gone, or whose prompt D has: P keeps its blocks for nobody."""
    d.reads("r", ours=None)
    assert d.nixl_wrapper.posted == [] and d.told == []
    d.hears()
    assert d.busy_engines() == set()
    assert d.step() == set(), "nobody waits for it"
    assert d.told == [("agent", NOTICE)]
    assert d._claims == {}


def test_an_answer_that_comes_between_steps_is_taken_with_the_next(
    d: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NixlPullConnectorWorker, "start_load_kv", lambda *_: None)
    d.reads("r", ours=None)
    d.hears()
    d.start_load_kv(NixlConnectorMetadata())
    assert d._claims["r"].answer is not None


def test_what_another_d_reads_is_not_ended_by_one_that_does_not_need_it(
    d: Reader, answers: list[peer.Asked]
) -> None:
    """The first D may tell P late that its request has gone: the second is reading by then."""
    answers[0] = peer.Asked(reason=Reason.EXPIRED, address=ADDRESS)
    d.reads("r", ours=None)
    d.hears()
    assert d.step() == set()
    assert d.told == [] and d._claims == {}
    assert lost(d) == [] and d.lost() == (set(), set())


def test_of_a_stock_p_nothing_is_claimed_that_d_does_not_need(d: Reader) -> None:
    d.has_met_a_p_that_binds_nothing()
    d.reads("r", claims=False, ours=None)
    assert d.told == [("agent", NOTICE)]


def test_what_is_claimed_are_the_blocks_that_the_params_name(d: Reader) -> None:
    del claimed[:]
    d.reads("r")
    d.hears()
    assert d.step() == {"r"}
    assert claimed == [HANDED]


def test_p_is_asked_where_it_was_met(d: Reader) -> None:
    """Params may name another P, which has handed over blocks of the same ids: not those that are
    read."""
    d._addresses["d"] = ("10.0.0.9", 5600)
    with patch.object(d._questions, "claim") as claim:
        d.reads("r")
    assert claim.call_args.args[1] == ("10.0.0.9", 5600)


def test_what_p_has_not_handed_over_is_not_used(d: Reader, answers: list[peer.Asked]) -> None:
    answers[0] = peer.Asked(reason=Reason.NOT_HANDED_OVER, address=ADDRESS)
    d.reads("r")
    d.hears()
    assert d.step() == {"r"}
    assert d._invalid_block_ids.get_nowait() == set(OURS)
    assert lost(d) == ["not_handed_over"]
    assert d.told == []
    assert ADDRESS not in d._questions._silent and d.busy_engines() == set()


def test_what_was_forgotten_meanwhile_is_not_read(d: Reader) -> None:
    """It may be met anew at this moment, and whether it binds claims be known too late."""
    del d._addresses["d"]
    d.reads("r")
    assert d.nixl_wrapper.posted == []
    assert d.step() == {"r"} and d._claims == {}


def test_what_comes_without_the_token_is_not_read_of_a_p_that_binds(d: Reader) -> None:
    """Else who leaves it out would read whatever he names."""
    d.reads("r", claims=False)
    assert d.nixl_wrapper.posted == []
    assert d.step() == {"r"}
    assert d._invalid_block_ids.get_nowait() == set(OURS)
    assert lost(d) == ["not_handed_over"]
    assert d.told == []


@pytest.mark.parametrize("claims", [True, False])
def test_p_is_told_to_free_nothing_that_it_has_not_handed_over(
    d: Reader, answers: list[peer.Asked], claims: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It would free another's prompt, which that one's D is reading."""
    answers[0] = peer.Asked(reason=Reason.NOT_HANDED_OVER, address=ADDRESS)
    d._named["r"] = (b"agent",)
    d._agents["d"] = {0: b"agent"}
    d.reads("r", claims=claims, ours=None)
    if claims:
        d.hears()
    assert d.step() == set()
    assert d.told == [] and d._claims == {} and d._named == {}
    assert lost(d) == [] and d.lost() == (set(), set())
    (line,) = [one for one in caplog.messages if "handed over" in one]
    assert "at-p" not in line and "token" not in line


############################################################
# Real NIXL
############################################################


@pytest.fixture
def handed() -> HandedOver:
    return HandedOver()


@pytest.fixture
def token(handed: HandedOver) -> str:
    return handed.add("at-p", time.perf_counter() + 30, HANDED)


@pytest.fixture
def nodes(model: Path) -> Iterator[tuple[Node, Node]]:
    """P and D, which have not met."""
    p, d = Node(model, "p", "LBNHC"), Node(model, "d", "LBNHC")
    yield p, d
    for node in (p, d):
        node.worker.shutdown()


@pytest.fixture
def release(request: pytest.FixtureRequest) -> str:
    """Of P; a test may say another."""
    return getattr(request, "param", "this")


@pytest.fixture
def port(handed: HandedOver, nodes: tuple[Node, Node], release: str) -> Iterator[int]:
    """P's side channel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    stop = threading.Event()
    payload = nodes[0].worker.xfer_handshake_metadata
    greets = release == "this"
    channel = SideChannel(
        KeptTurns(),
        "p",
        1,
        greeting.payloads({(0, 0): payload})
        if greets
        else {(0, 0): msgspec.msgpack.encode(payload)},
        GET_META_MSG,
        time.perf_counter,
        handed=handed,
    )
    thread = start_listener(channel, "127.0.0.1", found, stop)
    yield found
    stop.set()
    thread.join(timeout=5)


@pytest.fixture
def pair(nodes: tuple[Node, Node], port: int) -> tuple[Node, Node]:
    """P and D, which have met by their handshake."""
    handshake = nodes[1].worker._ensure_handshake("p", "127.0.0.1", port, 1)
    assert handshake is not None
    handshake.result(timeout=10)
    return nodes


def claims(d: Node, port: int, token: str) -> set[str]:
    """D reads and claims; requests whose load is over, after a moment."""
    d.worker.start_load_kv(order(port, token))
    return finished(d)


def order(port: int, token: str) -> NixlConnectorMetadata:
    metadata = handover(OURS, THEIRS, "127.0.0.1", port)
    metadata.claims = {"r": ClaimOrder(token, "d/1", PROMPT)}
    return metadata


def finished(d: Node) -> set[str]:
    end = time.monotonic() + 10
    while not (over := d.worker.get_finished()[1]):
        assert time.monotonic() < end
        time.sleep(0.001)
    return set(over)


def test_p_hears_that_it_may_free_what_has_counted(
    pair: tuple[Node, Node], port: int, token: str
) -> None:
    p, d = pair
    assert claims(d, port, token) == {"r"}
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert torch.equal(d.block(ours), p.block(theirs))
    assert d.worker.get_block_ids_with_load_errors() == set()
    assert p.heard() == NOTICE


def test_p_hears_of_what_the_base_has_read_when_it_has_counted(
    pair: tuple[Node, Node], port: int, token: str
) -> None:
    """NIXL sends no empty message: P's worker could not read it."""
    p, d = pair
    d.worker._is_hma_required = True
    with patch.object(d.worker, "_take_answers", lambda: None):
        d.worker.start_load_kv(order(port, token))
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert d.worker.get_finished()[1] == set()
            assert p.worker.nixl_wrapper.get_new_notifs() == {}
            time.sleep(0.01)
    assert finished(d) == {"r"}
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert torch.equal(d.block(ours), p.block(theirs))
    assert p.heard() == NOTICE


@pytest.mark.parametrize("ours", [(), [], ([],)], ids=str)
@pytest.mark.parametrize("release", ["this", "stock"], indirect=True)
def test_p_hears_of_what_d_does_not_need(
    pair: tuple[Node, Node], port: int, token: str, ours: Any, release: str
) -> None:
    """As the base's scheduler orders it: of no group, or of an empty one."""
    p, d = pair
    metadata = order(port, token)
    meta = metadata.reqs_to_recv["r"]
    meta.local_block_ids = meta.local_physical_block_ids = ours
    if release == "stock":
        metadata.claims = {}
    d.worker.start_load_kv(metadata)
    end = time.monotonic() + 10
    while not (notices := p.worker.nixl_wrapper.get_new_notifs()):
        assert d.worker.get_finished()[1] == set()
        assert time.monotonic() < end
    assert list(notices.values()) == [[NOTICE]]


@pytest.mark.parametrize("whole", [True, False], ids=["several groups", "one"])
def test_a_failed_load_is_told_with_its_end(pair: tuple[Node, Node], whole: bool) -> None:
    _, d = pair
    d.worker._is_hma_required = whole
    d.worker._recving_metadata["r"] = handover(OURS, THEIRS, "127.0.0.1", 1).reqs_to_recv["r"]
    d.worker._handle_failed_transfer("r", None)
    assert d.worker.get_finished()[1] == {"r"}
    report = d.worker.take_report()
    assert (report.failed if report else set()) == ({"r"} if whole else set())
    assert d.worker.get_block_ids_with_load_errors() == (set() if whole else set(OURS))


def test_a_handover_that_p_has_ended_is_a_failed_load(
    pair: tuple[Node, Node], port: int, token: str, handed: HandedOver
) -> None:
    p, d = pair
    handed.end("at-p")
    assert claims(d, port, token) == {"r"}
    assert d.worker.get_block_ids_with_load_errors() == set(OURS)
    assert p.worker.nixl_wrapper.get_new_notifs() == {}


def why_lost(d: Node) -> list[str]:
    report = d.worker.take_report()
    return [] if report is None else [str(one.reason) for one in report.lost.values()]


@pytest.mark.parametrize(
    "change",
    [
        {"block_ids": ([20, 19, 34],)},
        {"block_ids": ([19, 20, 33],)},
        {"block_ids": ([5, 20, 19, 33],)},
        {"request_id": "another"},
    ],
    ids=str,
)
def test_params_that_name_anothers_are_a_failed_load(
    pair: tuple[Node, Node], port: int, token: str, handed: HandedOver, change: dict[str, Any]
) -> None:
    """Whoever may send params to D has a token of his own, and can guess the rest."""
    p, d = pair
    named = binding("another", ([20, 19, 34],), PROMPT)
    others = handed.add("another", time.perf_counter() + 30, named)
    metadata = order(port, token)
    remote = metadata.reqs_to_recv["r"].remote
    assert remote is not None
    metadata.reqs_to_recv["r"].remote = replace(remote, **change)
    d.worker.start_load_kv(metadata)
    assert finished(d) == {"r"}
    assert why_lost(d) == ["not_handed_over"]
    assert d.worker.get_block_ids_with_load_errors() == set(OURS)
    assert p.worker.nixl_wrapper.get_new_notifs() == {}
    assert handed.claim(others, "its own D", named) != Reason.EXPIRED

    assert claims(d, port, token) == {"r"}, "as they were handed over"
    assert why_lost(d) == [] and p.heard() == NOTICE


def test_params_without_the_token_are_a_failed_load(pair: tuple[Node, Node], port: int) -> None:
    _, d = pair
    d.worker.start_load_kv(handover(OURS, THEIRS, "127.0.0.1", port))
    assert finished(d) == {"r"}
    assert why_lost(d) == ["not_handed_over"]
    assert d.worker.get_block_ids_with_load_errors() == set(OURS)
    assert d.descriptors() == [], "nothing was read"


def test_what_d_has_of_a_prompt_is_handed_over_with_the_rest(
    pair: tuple[Node, Node], port: int, token: str
) -> None:
    """D reads what it has not; what is claimed is all."""
    p, d = pair
    metadata = order(port, token)
    meta = metadata.reqs_to_recv["r"]
    meta.local_block_ids = meta.local_physical_block_ids = (OURS[1:],)
    d.worker.start_load_kv(metadata)
    assert finished(d) == {"r"} and why_lost(d) == []
    for ours, theirs in zip(OURS[1:], THEIRS[1:], strict=True):
        assert torch.equal(d.block(ours), p.block(theirs))


@pytest.mark.parametrize("first", [True, False], ids=["meets it", "has met it"])
@pytest.mark.parametrize("release", ["stock"], indirect=True)
def test_a_stock_p_is_read_as_the_base_reads_it(
    nodes: tuple[Node, Node], port: int, token: str, handed: HandedOver, first: bool
) -> None:
    """Nor is it asked where the params have a token: it would end its listener."""
    p, d = nodes
    if not first:
        handshake = d.worker._ensure_handshake("p", "127.0.0.1", port, 1)
        assert handshake is not None
        handshake.result(timeout=10)
    d.worker.start_load_kv(order(port, token))
    end = time.monotonic() + 10
    while not (over := d.worker.get_finished()[1]):
        d.worker.start_load_kv(NixlConnectorMetadata())
        assert time.monotonic() < end
    assert over == {"r"} and why_lost(d) == []
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert torch.equal(d.block(ours), p.block(theirs))
    assert p.heard() == NOTICE
    assert isinstance(handed.claim(token, "another", HANDED), float), "nobody has asked"


def test_a_p_that_is_another_process_by_the_time_it_greets_is_not_met(
    nodes: tuple[Node, Node], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the first binds claims is not known."""
    _, d = nodes
    said = greeting.Greeting(b"another process", True)
    with monkeypatch.context() as changed:
        changed.setattr(peer, "greeting", lambda *_: said)
        failed = d.worker._ensure_handshake("p", "127.0.0.1", port, 1)
        assert failed is not None
        with pytest.raises(RuntimeError, match="started anew"):
            failed.result(timeout=10)
    assert not d.worker.binds_claims("p")
    again = d.worker._ensure_handshake("p", "127.0.0.1", port, 1)
    assert again is not None
    again.result(timeout=10)
    assert d.worker.binds_claims("p")
