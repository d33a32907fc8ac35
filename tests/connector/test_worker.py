"""The worker holds, reads by position and confirms; whatever goes wrong, the prompt is computed.

A real BidirWorker without NIXL: its transfers and handshakes are recorded, its questions are
answered by the test.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector import peer, worker
from vllm.bidir.connector.decision import Source
from vllm.bidir.connector.messages import HoldAnswer
from vllm.bidir.connector.proof import make_proof
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.stats import BidirStats
from vllm.bidir.connector.worker import BidirWorker
from vllm.bidir.reasons import Reason

PROOF = make_proof("sha256:x", 16, [b"h" * 32] * 4, list(range(64)), 64, 64)
assert PROOF is not None
SOURCE = Source("d0-1", "d", "10.0.0.1", 5600, 1, 1, 1, PROOF)
ORDER = ReadBack(
    source=SOURCE,
    digest=PROOF.digest(),
    first_block=1,
    local_block_ids=(7, 8, 9),
    prompt=80,
    local=16,
    verified=64,
    total=64,
)


class FakeNixl:
    """Records transfers; `states` says how each check of one ends."""

    def __init__(self) -> None:
        self.posted: list[tuple[Any, ...]] = []
        self.states = ["DONE"]
        self.released = 0

    def make_prepped_xfer(self, *arguments: Any, **more: Any) -> int:
        assert not more, "a read-back notifies nobody"
        self.posted.append(arguments)
        return len(self.posted)

    def transfer(self, handle: int) -> None:
        pass

    def check_xfer_state(self, handle: int) -> str:
        return self.states.pop(0) if self.states else "DONE"

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        self.released += 1


class Bare(BidirWorker):
    """The worker's own logic, on stand-ins for what the base sets up with real memory."""

    def __init__(self) -> None:
        self._reads, self._recving_metadata, self._recving_transfers = {}, {}, {}
        self._holds, self._confirms = queue.SimpleQueue(), queue.SimpleQueue()
        self._invalid_block_ids, self._failed_recv_reqs = queue.Queue(), queue.Queue()
        self._timeout_s = 0.2
        self._askers = self._confirmers = ThreadPoolExecutor(1)
        self._silent_until, self._addresses, self._processes = {}, {}, {}
        self._obstacle = None
        self._remote_agents: dict[str, Any] = {"d": {}}
        self._addresses["d"] = (SOURCE.host, SOURCE.port)
        self._handshake_lock, self._handshake_futures = threading.Lock(), {}
        self._is_hma_required = False
        self._physical_blocks_per_logical_kv_block = 1
        self.world_size, self.tp_rank = 1, 0
        self.xfer_stats = BidirStats()
        self.nixl_wrapper = FakeNixl()
        self.engine_id = "p"
        self.dst_num_blocks = {"d": 100, "p": 100}
        self.block_len_per_layer = [1000]
        info = SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1)
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda engine: info, block_size_ratio=lambda size: 1
        )
        self.handshakes: list[str] = []
        self.cleaned: list[str] = []

    def __del__(self) -> None:
        self._askers.shutdown(wait=False)

    def _logical_to_kernel_block_ids(self, block_ids: Any, ratio: int) -> Any:
        return block_ids

    def _compute_desc_ids(self, block_ids: Any, **more: Any) -> Any:
        return [block for group in block_ids for block in group]

    def _background_nixl_handshake(self, request_id: str, engine: str, meta: Any) -> None:
        self.handshakes.append(engine)

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self.cleaned.append(engine_id)
        del self._remote_agents[engine_id]

    def _read_blocks_for_req(self, request_id: str, meta: Any) -> None:
        self._recving_transfers.setdefault(request_id, [])
        spec = SimpleNamespace(
            remote_rank=0,
            local_block_ids=meta.local_physical_block_ids,
            remote_block_ids=meta.remote.block_ids,
        )
        self._read_blocks(spec, "d", request_id, "x", 1, 2, 1)

    def lost(self) -> tuple[set[int], set[str]]:
        """Blocks and requests that the scheduler would hear of as not loaded."""
        blocks: set[int] = set()
        while not self._invalid_block_ids.empty():
            blocks |= self._invalid_block_ids.get()
        requests = set()
        while not self._failed_recv_reqs.empty():
            requests.add(self._failed_recv_reqs.get())
        return blocks, requests


def answer(**change: Any) -> HoldAnswer:
    fields = {
        "epoch": 5,
        "engine_id": "d",
        "process": b"one",
        "tp_size": 1,
        "block_ids": [40, 41, 42, 43],
        "valid_tokens": 64,
        "digest": ORDER.digest,
    }
    return HoldAnswer(**{**fields, **change})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Bare:
    # Questions are answered by the tests; none leaves the process.
    monkeypatch.setattr(worker.peer, "hold", lambda *args: peer.Asked(hold=answer()))
    monkeypatch.setattr(worker.peer, "confirm", lambda *args: peer.Asked(stood=True))
    made = Bare()
    made._order("r", ORDER)
    return made


def arrived(waiting: Any) -> peer.Asked:
    """Wait for the thread's answer, as the next engine step would find it."""
    name, asked = waiting.get(timeout=5)
    assert name == "r"
    return asked


def hold(bare: Bare, asked: peer.Asked | None = None) -> None:
    found = arrived(bare._holds)
    bare._held("r", asked or found)


def test_blocks_are_read_by_position_and_reported_after_confirm(bare: Bare) -> None:
    hold(bare)
    assert bare.nixl_wrapper.posted == [("READ", 1, [7, 8, 9], 2, [41, 42, 43])]
    assert bare._pop_done_transfers(bare._recving_transfers) == set(), "not before CONFIRM"
    bare._confirms.put(("r", arrived(bare._confirms)))
    assert bare._pop_done_transfers(bare._recving_transfers) == {"r"}
    assert bare.lost() == (set(), set())


def test_an_unconfirmed_read_is_lost(bare: Bare) -> None:
    hold(bare)
    bare._pop_done_transfers(bare._recving_transfers)
    arrived(bare._confirms)
    bare._confirms.put(("r", peer.Asked(reason=Reason.HOLD_LOST)))
    assert bare._pop_done_transfers(bare._recving_transfers) == set()
    assert bare.lost() == ({7, 8, 9}, {"r"})
    assert bare._reads["r"].lost is Reason.HOLD_LOST


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"digest": b"other"}, Reason.HOLD_LOST),
        ({"engine_id": "other"}, Reason.HOLD_LOST),
        ({"valid_tokens": 63}, Reason.HOLD_LOST),
        ({"block_ids": [40, 41, 42]}, Reason.HOLD_LOST),
        ({"block_ids": [40, 41, 42, 100]}, Reason.HOLD_LOST),
        ({"block_ids": [40, 41, 42, -1]}, Reason.HOLD_LOST),
        ({"tp_size": 2}, Reason.UNSUPPORTED),
    ],
)
def test_an_answer_that_does_not_fit_the_order_is_not_read(
    bare: Bare, change: dict[str, Any], reason: Reason
) -> None:
    hold(bare, peer.Asked(hold=answer(**change)))
    assert bare.nixl_wrapper.posted == []
    assert bare.lost() == ({7, 8, 9}, {"r"})
    assert bare._reads["r"].lost is reason


def test_an_engine_at_another_address_is_not_the_one_that_was_met(bare: Bare) -> None:
    """Two engines of one id: HOLD would be about one's memory, and the READ of the other's."""
    bare._addresses["d"] = ("10.0.0.2", 5600)
    hold(bare)
    assert bare.nixl_wrapper.posted == []
    assert bare._reads["r"].lost is Reason.PEER_GONE


@pytest.mark.parametrize("other", ["address", "process"])
def test_a_handshake_under_way_with_another_process_is_not_waited_for(
    bare: Bare, other: str
) -> None:
    """Two engines of one id at the same moment: the wait would end in the first one's memory."""
    bare._remote_agents.clear()
    bare._handshake_futures["d"] = object()
    bare._addresses["d"] = ("10.0.0.2", 5600) if other == "address" else (SOURCE.host, SOURCE.port)
    bare._processes["d"] = b"another" if other == "process" else b"one"
    hold(bare)
    assert bare.handshakes == []
    assert bare._reads["r"].lost is Reason.PEER_GONE


def test_a_handshake_that_failed_leaves_no_claim(bare: Bare) -> None:
    """An engine that came up elsewhere after a failed handshake is met there."""
    bare._remote_agents.clear()
    bare._addresses["d"] = ("10.0.0.2", 5600)
    hold(bare)
    assert bare.handshakes == ["d"]


def test_a_restarted_engine_is_met_anew(bare: Bare) -> None:
    """Same id, same address, another process: its old agent would read dead memory."""
    bare._processes["d"] = b"before"
    hold(bare)
    assert bare.cleaned == ["d"]
    assert bare.handshakes == ["d"]
    assert bare.nixl_wrapper.posted == []


def test_a_failed_transfer_is_lost_once(bare: Bare) -> None:
    hold(bare)
    bare.nixl_wrapper.states = ["ERR"]
    assert bare._pop_done_transfers(bare._recving_transfers) == {"r"}
    assert bare.lost() == ({7, 8, 9}, {"r"})
    assert bare._reads["r"].lost is Reason.TRANSFER_FAILED
    assert bare.nixl_wrapper.released == 1


def test_whatever_happens_in_a_thread_an_answer_arrives(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the request would wait for its KV for ever."""
    arrived(bare._holds)

    def explode(*args: Any) -> peer.Asked:
        raise RecursionError("a hostile answer")

    monkeypatch.setattr(worker.peer, "hold", explode)
    bare._order("r", ORDER)
    hold(bare)
    assert bare._reads["r"].lost is Reason.PEER_GONE


def test_a_silent_peer_is_not_asked_again_at_once(bare: Bare) -> None:
    hold(bare, peer.Asked(reason=Reason.TIMEOUT))
    bare.lost()
    bare._order("r2", ORDER)
    assert bare._reads["r2"].lost is Reason.PEER_GONE
    assert bare._holds.empty()
    assert bare.lost() == ({7, 8, 9}, {"r2"})


def test_a_gone_turn_is_logged_in_the_bases_words(
    bare: Bare, caplog: pytest.LogCaptureFixture
) -> None:
    hold(bare, peer.Asked(reason=Reason.HOLD_LOST))
    assert "Declining expired remote read for r from engine d." in caplog.text


def test_an_engine_whose_layers_are_not_plain_reads_nothing(bare: Bare) -> None:
    bare._obstacle = "it attends to a window"
    bare._order("r2", ORDER)
    assert bare._reads["r2"].lost is Reason.UNSUPPORTED
