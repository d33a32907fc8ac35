"""Engines of several ranks: each head comes to its place, whatever the sizes of the two.

Real workers, NIXL, handshakes, and a side channel with leases; only schedulers and models are
missing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.bidir.connector import greeting, listener
from vllm.bidir.connector.binding import binding
from vllm.bidir.connector.claiming import ClaimOrder
from vllm.bidir.connector.decision import Source
from vllm.bidir.connector.handed import HandedOver
from vllm.bidir.connector.kept import KeptTurn, KeptTurns
from vllm.bidir.connector.leases import LeaseOptions, Leases
from vllm.bidir.connector.listener import start_listener
from vllm.bidir.connector.messages import SideChannel
from vllm.bidir.connector.outcome import Outcome, WorkerReport
from vllm.bidir.connector.pace import Pace
from vllm.bidir.connector.proof import make_proof
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.scheduler import own_agents
from vllm.bidir.connector.stats import READ_BACK
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlConnectorMetadata,
    RemoteMeta,
    ReqMeta,
)

from tests.connector.nodes import BLOCKS, HEADS, LAYERS, Node, alone
from tests.connector.sim import BLOCK

__all__ = ["alone"]

HOST = "127.0.0.1"
LEASE = "d0-1"
# D's blocks by position, P's for them.
THEIRS = [31, 30, 29, 28, 11, 12, 7]
OURS = [20, 19, 18, 17, 4, 5, 33]
# 31..28 into 20..17, 11 and 12 into 4 and 5, 7 into 33: where they go the same way they are one.
RUNS = 3
TOKENS = len(OURS) * BLOCK
PROOF = make_proof("f", BLOCK, [b"h" * 32] * len(OURS), list(range(TOKENS)), TOKENS, TOKENS)
assert PROOF is not None


@dataclass
class Heard:
    """What the scheduler would hear of request r from all ranks together."""

    outcome: Outcome | None = None
    invalid: set[int] = field(default_factory=set)
    writers: list[int] = field(default_factory=list)
    # Why a rank has lost a handover.
    handovers: list[str] = field(default_factory=list)


class Engine:
    """The ranks of one engine, and its side channel, which also keeps a turn."""

    def __init__(
        self, model: Path, name: str, ranks: int, layout: str = "LBHNC", heads: int = HEADS
    ) -> None:
        self.name, self.heads = name, heads
        self.nodes = [
            Node(model, name, layout, rank=rank, ranks=ranks, heads=heads) for rank in range(ranks)
        ]
        if ranks > heads:
            # Ranks that share a head, or all of an MLA cache, have computed the same.
            for rank, node in enumerate(self.nodes):
                first = rank - rank % (ranks // max(1, heads))
                for mine, same in zip(node.layers, self.nodes[first].layers, strict=True):
                    mine.copy_(same)
        payloads = {
            (0, k): node.worker.xfer_handshake_metadata for k, node in enumerate(self.nodes)
        }
        self.handed = HandedOver()
        self.kept = KeptTurns(Leases(LeaseOptions(60.0, 60.0, 60.0, 100), time.monotonic))
        self.kept.keep(KeptTurn(LEASE, "at-d", tuple(THEIRS), TOKENS, PROOF.digest()), THEIRS)
        channel = SideChannel(
            self.kept,
            name,
            ranks,
            greeting.payloads(payloads),
            GET_META_MSG,
            time.perf_counter,
            own_agents(payloads),
            self.handed,
        )
        with socket.socket() as free:
            free.bind((HOST, 0))
            self.port = free.getsockname()[1]
        self._stop = threading.Event()
        self._listener = start_listener(channel, HOST, self.port, self._stop)

    def close(self) -> None:
        self._stop.set()
        self._listener.join(5)
        for node in self.nodes:
            node.worker.shutdown()

    def block(self, number: int) -> torch.Tensor:
        """[layer, head, token, content] of all ranks together."""
        step = max(1, len(self.nodes) // max(1, self.heads))
        return torch.cat([node.block(number) for node in self.nodes[::step]], dim=1)

    def all_blocks(self) -> list[list[torch.Tensor]]:
        return [
            [node.block(number).clone() for number in range(BLOCKS[self.name])]
            for node in self.nodes
        ]

    @property
    def holds(self) -> int:
        return self.kept.totals().holds

    def reads_back(self, d: Engine, name: str = "r") -> None:
        """All ranks are told to read what D keeps: THEIRS into OURS."""
        order = ReadBack(
            source=Source(LEASE, d.name, HOST, d.port, PROOF),
            digest=PROOF.digest(),
            first_block=0,
            local_block_ids=tuple(OURS),
            prompt=TOKENS + 1,
            local=0,
            verified=TOKENS,
            total=TOKENS,
        )
        for node in self.nodes:
            metadata = NixlConnectorMetadata()
            metadata.read_backs = {name: order}
            node.worker.start_load_kv(metadata)

    def takes_over(self, p: Engine, blocks: list[int], token: str) -> None:
        """All ranks are told to read these blocks of request x of P, the last into THEIRS."""
        for node in self.nodes:
            metadata = NixlConnectorMetadata()
            metadata.reqs_to_recv["r"] = ReqMeta(
                local_block_ids=(THEIRS,),
                local_physical_block_ids=(THEIRS,),
                tp_size=len(p.nodes),
                dcp_size=1,
                pp_size=1,
                remote=RemoteMeta(
                    block_ids=(blocks,), host=HOST, port=p.port, engine_id=p.name, request_id="x"
                ),
            )
            metadata.claims = {"r": ClaimOrder(token, "d/1", b"a digest")}
            node.worker.start_load_kv(metadata)

    def hears(self, until: Callable[[Heard], bool], name: str = "r") -> Heard:
        """Steps of all ranks, until the scheduler has heard that."""
        heard, end = Heard(), time.monotonic() + 30
        reports, finished = WorkerReport(), set()
        while not until(heard):
            assert time.monotonic() < end, heard
            for rank, node in enumerate(self.nodes):
                worker = node.worker
                worker.start_load_kv(NixlConnectorMetadata())
                if name in worker.get_finished()[1]:
                    assert rank not in finished, "a rank reports once"
                    finished.add(rank)
                heard.invalid |= worker.get_block_ids_with_load_errors()
                report = worker.take_report()
                if report is not None:
                    heard.writers += report.writers.values()
                    heard.handovers += [str(one.reason) for one in report.lost.values()]
                    reports.aggregate(report)
            if len(finished) == len(self.nodes):
                heard.outcome = reports.outcomes.get(name, Outcome(None))
            time.sleep(0.001)
        return heard


Made = Callable[..., Engine]


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    # How soon a listener looks whether it is to end.
    monkeypatch.setattr(listener, "_POLL_MS", 10)
    made: list[Engine] = []

    def make(*arguments: Any, **more: Any) -> Engine:
        made.append(Engine(model, *arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def over(heard: Heard) -> bool:
    return heard.outcome is not None


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def check_moved(before: list[list[torch.Tensor]], to: Engine, ours: list[int]) -> None:
    """No block but these is touched. A probe may have read into the null block."""
    for node, blocks in zip(to.nodes, before, strict=True):
        for number, block in enumerate(blocks[1:], 1):
            if number not in ours:
                assert torch.equal(node.block(number), block)


@pytest.mark.parametrize(
    ("p_ranks", "d_ranks", "layouts"),
    [
        (2, 1, "BLHNC BLHNC"),
        (2, 1, "LBHNC LBHNC"),
        (1, 2, "BLHNC BLHNC"),
        (1, 2, "LBHNC LBHNC"),
        (2, 2, "BLHNC BLHNC"),
        (4, 2, "BLHNC LBHNC"),
        (2, 4, "LBHNC BLHNC"),
    ],
)
def test_each_head_is_read_back_to_its_place(
    engine: Made, p_ranks: int, d_ranks: int, layouts: str
) -> None:
    p_layout, d_layout = layouts.split()
    p, d = engine("p", p_ranks, p_layout), engine("d", d_ranks, d_layout)
    before = p.all_blocks()
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is None
    assert (heard.invalid, heard.writers) == (set(), [])
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert torch.equal(p.block(ours), d.block(theirs))
    check_moved(before, p, OURS)
    # Every rank of P has held and confirmed; so D may free the turn on all of its ranks.
    assert d.holds == 0
    assert d.kept.release([LEASE]) == ([LEASE], ["at-d"])
    megabytes = len(OURS) * d.block(0).nbytes / 1e6
    assert heard.outcome.megabytes == pytest.approx(megabytes)
    transfers = [row for node in p.nodes for row in node.worker.xfer_stats.data["transfers"]]
    assert sum(row[-1] for row in transfers) == pytest.approx(megabytes * 1e6)
    assert {(row[0], row[1]) for row in transfers} == {(READ_BACK, "d")}
    assert len(transfers) == max(p_ranks, d_ranks)


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2)])
def test_the_way_to_all_ranks_is_opened_and_timed(engine: Made, p_ranks: int, d_ranks: int) -> None:
    p, d = engine("p", p_ranks), engine("d", d_ranks)
    p.reads_back(d)
    p.hears(over)
    assert torch.equal(p.block(0), d.block(0)), "the null block came from each of them"
    for node in p.nodes:
        rate = node.worker._probes.links.rate("d")
        assert rate is not None and rate > 1.0


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2)])
def test_a_cache_that_all_ranks_have_is_read_from_one(
    engine: Made, p_ranks: int, d_ranks: int, layout: str
) -> None:
    """MLA. With layers side by side a block is one descriptor."""
    p, d = (engine(name, ranks, layout, 0) for name, ranks in (("p", p_ranks), ("d", d_ranks)))
    before = p.all_blocks()
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is None
    for node in p.nodes:
        for ours, theirs in zip(OURS, THEIRS, strict=True):
            assert torch.equal(node.block(ours), d.nodes[-1].block(theirs))
    check_moved(before, p, OURS)
    assert d.holds == 0
    runs = RUNS if layout == "BLHNC" else RUNS * LAYERS
    assert [node.descriptors() for node in p.nodes] == [[runs]] * p_ranks
    assert all(not node.worker.nixl_wrapper.get_new_notifs() for node in d.nodes)


def test_ranks_that_share_a_head_each_read_it(engine: Made) -> None:
    """In whole blocks: they have as many heads as D's ranks, and the same."""
    p, d = engine("p", 4, "BLHNC", 2), engine("d", 2, "BLHNC", 2)
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is None
    for rank, node in enumerate(p.nodes):
        for ours, theirs in zip(OURS, THEIRS, strict=True):
            assert torch.equal(node.block(ours), d.nodes[rank // 2].block(theirs))
    assert [node.descriptors() for node in p.nodes] == [[RUNS]] * 4


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2)])
def test_a_handover_brings_each_head_to_its_place(engine: Made, p_ranks: int, d_ranks: int) -> None:
    p, d = engine("p", p_ranks, "BLHNC"), engine("d", d_ranks, "BLHNC")
    before = d.all_blocks()
    d.takes_over(p, [1, 2, *OURS], hands_over(p))
    assert d.hears(over).invalid == set()
    for theirs, ours in zip(THEIRS, OURS, strict=True):
        assert torch.equal(d.block(theirs), p.block(ours))
    check_moved(before, d, THEIRS)
    for node in p.nodes:
        told: list[bytes] = []
        readers = max(1, d_ranks // p_ranks)

        def all_told(node: Node = node, told: list[bytes] = told, readers: int = readers) -> bool:
            for messages in node.worker.nixl_wrapper.get_new_notifs().values():
                told.extend(messages)
            return len(told) >= readers

        wait_until(all_told)
        assert told == [f"x:{readers}".encode()] * readers


@pytest.mark.parametrize(("p_ranks", "d_ranks"), [(2, 1), (1, 2), (2, 2)])
def test_no_rank_takes_over_what_was_not_handed_over(
    engine: Made, p_ranks: int, d_ranks: int
) -> None:
    """Each of them claims, and says what it was told to read."""
    p, d = engine("p", p_ranks), engine("d", d_ranks)
    d.takes_over(p, [1, 3, *OURS], hands_over(p))
    heard = d.hears(over)
    assert heard.handovers == ["not_handed_over"] * d_ranks
    assert heard.invalid == set(THEIRS)
    assert [node.worker.nixl_wrapper.get_new_notifs() for node in p.nodes] == [{}] * p_ranks


def hands_over(p: Engine) -> str:
    """Request x, of which D needs all but two blocks; its token."""
    named = binding("x", ([1, 2, *OURS],), b"a digest")
    return p.handed.add("x", time.perf_counter() + 30, named)


class Transfers:
    """NIXL between a worker and its peers, of which some READs go wrong."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        nixl = node.worker.nixl_wrapper
        self._check, self._make = nixl.check_xfer_state, nixl.make_prepped_xfer
        self._remote: dict[Any, Any] = {}
        self._handles = node.worker.dst_xfer_side_handles["d"]
        self.states: dict[int, str] = {}
        self.refused: int | None = None
        monkeypatch.setattr(nixl, "check_xfer_state", self.check)
        monkeypatch.setattr(nixl, "make_prepped_xfer", self.make)

    def _rank(self, remote: Any) -> int:
        return next(rank for rank, handle in self._handles.items() if handle is remote)

    def make(
        self, operation: str, own: Any, ours: Any, remote: Any, *more: Any, **rest: Any
    ) -> Any:
        rank = self._rank(remote)
        if rank == self.refused:
            raise RuntimeError("not now")
        handle = self._make(operation, own, ours, remote, *more, **rest)
        self._remote[id(handle)] = rank
        return handle

    def check(self, handle: Any) -> str:
        return self.states.get(self._remote[id(handle)]) or str(self._check(handle))


@pytest.fixture
def met(engine: Made, request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    """P and D of these sizes, once they have met."""
    p_ranks, d_ranks = request.param
    p, d = engine("p", p_ranks), engine("d", d_ranks)
    p.reads_back(d, "first")
    p.hears(over, "first")
    return p, d


@pytest.mark.parametrize("met", [(1, 2)], indirect=True)
@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("how", ["refused", "failed"])
def test_a_rank_of_d_that_fails_fails_the_load_and_waits_for_no_other(
    met: tuple[Engine, Engine], loser: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other rank still sends goes into blocks that nobody else gets until it has ended."""
    p, d = met
    nixl = Transfers(p.nodes[0], monkeypatch)
    nixl.states[1 - loser] = "PROC"
    if how == "refused":
        nixl.refused = loser
    else:
        nixl.states[loser] = "ERR"
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is Reason.TRANSFER_FAILED
    assert heard.invalid == set(OURS)
    wait_until(lambda: d.holds == 0)
    begun = how == "failed" or loser == 1
    assert heard.writers == ([1] if begun else [])
    if begun:
        assert "d" in p.nodes[0].worker.busy_engines()
        nixl.states.clear()
        assert p.hears(lambda heard: bool(heard.writers)).writers == [-1]
    assert p.nodes[0].worker.busy_engines() == set()


@pytest.mark.parametrize("met", [(2, 1)], indirect=True)
@pytest.mark.parametrize("loser", [0, 1])
def test_a_rank_of_p_that_fails_fails_the_load_of_all(
    met: tuple[Engine, Engine], loser: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = met
    nixl = Transfers(p.nodes[loser], monkeypatch)
    nixl.states[0] = "ERR"
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is Reason.TRANSFER_FAILED
    assert heard.invalid == set(OURS)
    wait_until(lambda: d.holds == 0)


@pytest.mark.parametrize("met", [(1, 2), (2, 1)], indirect=True)
def test_a_read_of_one_rank_that_is_given_up_keeps_its_blocks_until_it_has_ended(
    met: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = met
    for node in p.nodes:
        node.worker._pace = Pace(least_s=0.1)
    nixl = Transfers(p.nodes[-1], monkeypatch)
    slow = len(d.nodes) - 1
    nixl.states[slow] = "PROC"
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is Reason.TIMEOUT
    assert heard.invalid == set(OURS)
    assert heard.writers == [1], "one rank's, however many it reads from"
    wait_until(lambda: d.holds == 1)
    nixl.states.clear()
    assert p.hears(lambda heard: bool(heard.writers)).writers == [-1]
    assert all(node.worker.busy_engines() == set() for node in p.nodes)


@pytest.mark.parametrize("met", [(1, 2), (2, 1)], indirect=True)
def test_a_turn_that_does_not_stand_until_all_ranks_have_read_is_lost(
    met: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = met
    nixl = Transfers(p.nodes[-1], monkeypatch)
    nixl.states[len(d.nodes) - 1] = "PROC"
    p.reads_back(d)
    wait_until(lambda: p.hears(lambda _: True).outcome is None and d.holds > 0)
    d.kept.end_all()
    nixl.states.clear()
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is Reason.HOLD_LOST
    assert heard.invalid == set(OURS)


def test_layouts_that_cannot_be_cut_by_head_compute_and_are_tried_once(
    engine: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = engine("p", 2), engine("d", 1, "LBNHC")
    tries: defaultdict[int, int] = defaultdict(int)
    for rank, node in enumerate(p.nodes):
        shake = node.worker._nixl_handshake

        def counted(*arguments: Any, rank: int = rank, shake: Any = shake) -> Any:
            tries[rank] += 1
            return shake(*arguments)

        monkeypatch.setattr(node.worker, "_nixl_handshake", counted)
    for name in ("r", "r2"):
        p.reads_back(d, name)
        heard = p.hears(over, name)
        assert heard.outcome is not None and heard.outcome.lost is Reason.UNSUPPORTED
        assert heard.invalid == set(OURS)
        wait_until(lambda: d.holds == 0)
    assert tries == {0: 1, 1: 1}


@pytest.mark.parametrize(("real", "told"), [(1, 2), (2, 1)])
def test_a_handshake_for_a_wrong_size_spoils_no_later_one(
    engine: Made, real: int, told: int
) -> None:
    """It comes with a handover's params, which may be a client's."""
    p, d = engine("p", 1), engine("d", real)
    worker = p.nodes[0].worker
    handshake = worker._ensure_handshake("d", HOST, d.port, told)
    assert handshake is not None and handshake.exception(timeout=10) is not None
    p.reads_back(d)
    heard = p.hears(over)
    assert heard.outcome is not None and heard.outcome.lost is None
    for ours, theirs in zip(OURS, THEIRS, strict=True):
        assert torch.equal(p.block(ours), d.block(theirs))
