"""The worker holds, reads by position and confirms; whatever goes wrong, the prompt is computed.

A real BidirWorker without NIXL: its transfers and handshakes are recorded, its questions are
answered by the test.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.bidir.connector import peer, questions
from vllm.bidir.connector.decision import Source, parse_source
from vllm.bidir.connector.messages import HoldAnswer
from vllm.bidir.connector.outcome import WorkerReport
from vllm.bidir.connector.pace import Pace
from vllm.bidir.connector.posting import INLINE, Descriptors, Post, Poster
from vllm.bidir.connector.probes import Probes
from vllm.bidir.connector.proof import make_proof
from vllm.bidir.connector.read_back import ReadBack
from vllm.bidir.connector.rows import RowHandles
from vllm.bidir.connector.stats import BidirStats
from vllm.bidir.connector.worker import BidirWorker, _State
from vllm.bidir.reasons import Reason
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

TIMEOUT_S = 0.5
PROOF = make_proof("sha256:x", 16, [b"h" * 32] * 4, list(range(64)), 64, 64)
assert PROOF is not None
SOURCE = Source("d0-1", "d", "10.0.0.1", 5600, PROOF)
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
        self.notifications: list[bytes | None] = []
        self.told: list[tuple[str, bytes]] = []
        self.states = ["DONE"]
        self.released = 0

    def make_prepped_xfer(self, *arguments: Any, **more: Any) -> int:
        self.posted.append(arguments)
        self.notifications.append(more.get("notif_msg"))
        return len(self.posted)

    def transfer(self, handle: int) -> None:
        pass

    def check_xfer_state(self, handle: int) -> str:
        return self.states.pop(0) if self.states else "DONE"

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.told.append((agent, notif_msg))

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        self.released += 1


class StillProbes(Probes):
    """Knows what tests say of links; notes which engines were to be probed."""

    def __init__(self) -> None:
        super().__init__(None, lambda *_: None, lambda: None, threading.Lock())
        self.started: list[str] = []

    def start(self, engine_id: str) -> None:
        self.started.append(engine_id)
        self.links.probe_started(engine_id)


class Bare(BidirWorker):
    """The worker's own logic, on stand-ins for what the base sets up with real memory."""

    def __init__(self) -> None:
        self._recving_metadata, self._recving_transfers = {}, defaultdict(list)
        self._failed: set[str] = set()
        self._invalid_block_ids, self._failed_recv_reqs = queue.Queue(), queue.Queue()
        self._remember_nobody()
        self.nixl_wrapper = FakeNixl()
        self.nixl_memory_type = "DRAM"
        self._poster = Poster(self.nixl_wrapper, lambda: None, shared=False)
        self._probes = StillProbes()
        self._to_be_measured: set[str] = set()
        self._set_up(timeout_s=TIMEOUT_S)
        self._obstacle = None
        self._remote_agents: dict[str, Any] = {"d": {}}
        self._addresses["d"] = (SOURCE.host, SOURCE.port)
        self._agents["d"] = {0: b"one"}
        self._handshake_lock, self._handshake_futures = threading.Lock(), {}
        self._is_hma_required = False
        self.kv_cache_config = SimpleNamespace(transfer_groups=["one"], kv_cache_groups=["one"])
        self._physical_blocks_per_logical_kv_block = 1
        self.world_size, self.tp_rank = 1, 0
        self.xfer_stats = BidirStats()
        self.engine_id = "p"
        self.dst_num_blocks = {"d": 100, "p": 100}
        self.block_len_per_layer, self.dcp_size = [1000], 1
        self._has_mamba = False
        self._rows = RowHandles(self.nixl_wrapper, "DRAM")
        info = self.info = SimpleNamespace(
            remote_block_size=16,
            remote_physical_blocks_per_logical=1,
            remote_tp_size=1,
            remote_dcp_size=1,
        )
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda engine: info,
            block_size_ratio=lambda size: 1,
            tp_ratio=lambda size: 1,
            tp_size=1,
            total_num_kv_heads=1,
            is_mla=False,
        )
        self.use_mla, self.tp_mappings = False, {"d": SimpleNamespace(all_source_ranks=(0,))}
        self.src_xfer_handles_by_block_size = {16: 1}
        self.dst_xfer_side_handles = {"d": {0: 2}}
        self._engine_last_active: dict[str, float] = {}
        self.may_confirm = threading.Event()
        self.confirmed: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self.handshakes: list[Future[Any]] = []
        self.cleaned: list[str] = []

    def __del__(self) -> None:
        self._questions.close()

    def _logical_to_kernel_block_ids(self, block_ids: Any, ratio: int) -> Any:
        return block_ids

    def _compute_desc_ids(self, block_ids: Any, **more: Any) -> Any:
        return [block for group in block_ids for block in group]

    def _apply_prefix_caching(
        self, decode_block_ids: Any, prefill_block_ids: Any, *ratios: int, **named: int
    ) -> Any:
        pairs = zip(decode_block_ids, prefill_block_ids, strict=True)
        return decode_block_ids, [theirs[len(theirs) - len(ours) :] for ours, theirs in pairs]

    def _ensure_handshake(self, engine_id: str, *address: Any) -> Future[Any] | None:
        if engine_id in self._remote_agents:
            return None
        if engine_id in self._handshake_futures:
            return self._handshake_futures[engine_id]
        self.handshakes.append(Future())
        return self.handshakes[-1]

    def meets(self, engine_id: str, address: tuple[str, int], agent: bytes) -> None:
        """The handshake under way ends: the engine has been met there, as this process."""
        self._remote_agents[engine_id] = {}
        self._addresses[engine_id], self._agents[engine_id] = address, {0: agent}
        self.handshakes[-1].set_result(None)
        self._advance()

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self.cleaned.append(engine_id)
        for known in (self._remote_agents, self._addresses, self._agents):
            known.pop(engine_id, None)

    def finish(self) -> tuple[set[str], WorkerReport | None]:
        """A step's end: requests that the scheduler hears of, and the report beside them."""
        self._take_up_posts()
        done = self._pop_done_transfers(self._recving_transfers)
        while not self._failed_recv_reqs.empty():
            done.add(self._failed_recv_reqs.get())
        self._note(done)
        return done, self.take_report()

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
        "agents": [b"one"],
        "tp_size": 1,
        "block_ids": [40, 41, 42, 43],
        "valid_tokens": 64,
        "digest": ORDER.digest,
    }
    return HoldAnswer(**{**fields, **change})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Bare:
    # Questions are answered by the tests; none leaves the process.
    monkeypatch.setattr(questions.peer, "hold", lambda *args: peer.Asked(hold=answer()))
    made = Bare()

    def confirm(host: str, port: int, lease_id: str, epoch: int, *args: Any) -> peer.Asked:
        made.confirmed.put((lease_id, epoch))
        made.may_confirm.wait(5)
        return peer.Asked(stood=True)

    monkeypatch.setattr(questions.peer, "confirm", confirm)
    made._order("r", ORDER)
    return made


def arrived(waiting: Any, request_id: str = "r") -> peer.Asked:
    """Wait for the thread's answer, as the next engine step would find it."""
    name, asked = waiting.get(timeout=5)
    assert name == request_id
    return asked


def confirm(bare: Bare, asked: peer.Asked | None = None) -> None:
    """The thread's answer to CONFIRM, or another in its place, is there for the next step."""
    bare.may_confirm.set()
    found = arrived(bare._questions.confirms)
    bare._questions.confirms.put(("r", asked or found))


def hold(bare: Bare, asked: peer.Asked | None = None) -> None:
    found = arrived(bare._questions.holds)
    bare._held("r", asked or found)


def test_blocks_are_read_by_position_and_reported_after_confirm(bare: Bare) -> None:
    hold(bare)
    assert bare.nixl_wrapper.posted == [("READ", 1, [7, 8, 9], 2, [41, 42, 43])]
    assert bare._pop_done_transfers(bare._recving_transfers) == set(), "not before CONFIRM"
    confirm(bare)
    assert bare._pop_done_transfers(bare._recving_transfers) == {"r"}
    assert bare.lost() == (set(), set())


def test_transfers_are_told_apart(bare: Bare) -> None:
    """Read-backs from handovers, each with its peer."""
    hold(bare)
    remote = SimpleNamespace(engine_id="other")
    bare._recving_metadata["handover"] = SimpleNamespace(remote=remote)
    bare._recving_transfers["handover"] = [7]
    bare._pop_done_transfers(bare._recving_transfers)
    found = {row[0]: row[1] for row in bare.xfer_stats.data["transfers"]}
    assert found == {"read_back": "d", "handover": "other"}


def test_an_unconfirmed_read_is_lost(bare: Bare) -> None:
    hold(bare)
    bare._pop_done_transfers(bare._recving_transfers)
    confirm(bare, peer.Asked(reason=Reason.HOLD_LOST))
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
        ({"tp_size": 0}, Reason.UNSUPPORTED),
        ({"tp_size": -1}, Reason.UNSUPPORTED),
    ],
)
def test_an_answer_that_does_not_fit_the_order_is_not_read(
    bare: Bare, change: dict[str, Any], reason: Reason
) -> None:
    hold(bare, peer.Asked(hold=answer(**change)))
    assert bare.nixl_wrapper.posted == []
    assert bare.lost() == ({7, 8, 9}, {"r"})
    assert bare._reads["r"].lost is reason
    assert bare.confirmed.get(timeout=5) == (SOURCE.lease_id, 5), "D need not wait for a reader"


def test_a_read_that_fails_lets_go_of_its_hold_once(bare: Bare) -> None:
    hold(bare)
    bare._handle_failed_transfer("r", None)
    assert bare._reads["r"].lost is Reason.TRANSFER_FAILED
    assert bare.confirmed.get(timeout=5) == (SOURCE.lease_id, 5)
    bare.may_confirm.set()
    time.sleep(0.05)
    assert bare.confirmed.empty() and bare._questions.confirms.empty(), "nobody waits for it"


def test_a_hold_that_comes_too_late_is_let_go_of(bare: Bare) -> None:
    """It would pin the turn until it runs out."""
    bare._reads["r"].deadline = 0.0
    late = arrived(bare._questions.holds)
    bare._advance()
    assert bare._reads["r"].lost is Reason.TIMEOUT
    bare._questions.holds.put(("r", late))
    bare._advance()
    assert bare.confirmed.get(timeout=5) == (SOURCE.lease_id, 5)


def test_letting_go_of_a_silent_peer_delays_nobody(bare: Bare) -> None:
    bare._questions.not_heard((SOURCE.host, SOURCE.port))
    for _ in range(20):
        bare._questions.let_go(SOURCE, 5)
    time.sleep(0.05)
    assert bare.confirmed.empty(), "its hold runs out by itself"
    other = replace(SOURCE, port=SOURCE.port + 1)
    bare.may_confirm.set()
    bare._questions.confirm("r", other, 7)
    assert bare.confirmed.get(timeout=5) == (SOURCE.lease_id, 7)


def test_who_lets_go_of_a_peer_that_was_gone_keeps_nobody_from_its_successor(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question waits as long as it may; the peer can have restarted when it gives up."""
    asked: SimpleQueue[str] = SimpleQueue()

    def gone(host: str, port: int, lease_id: str, *more: Any) -> peer.Asked:
        asked.put(lease_id)
        return peer.Asked(reason=Reason.TIMEOUT, address=(host, port))

    monkeypatch.setattr(questions.peer, "confirm", gone)
    for _ in range(3):
        bare._questions.let_go(SOURCE, 5)
    bare._questions._leavers.shutdown(wait=True)
    assert not bare._questions.is_silent(SOURCE)
    assert asked.qsize() == 1, "nor do the others of its turns keep the thread"


def test_a_confirm_that_fails_is_not_said_twice(bare: Bare) -> None:
    hold(bare)
    bare._pop_done_transfers(bare._recving_transfers)
    confirm(bare, peer.Asked(reason=Reason.HOLD_LOST))
    bare._pop_done_transfers(bare._recving_transfers)
    time.sleep(0.05)
    assert bare.confirmed.get(timeout=5) and bare.confirmed.empty()


def test_an_engine_that_was_met_elsewhere_is_met_where_it_answers(bare: Bare) -> None:
    """Two engines of one id: HOLD would be about one's memory, and the READ of the other's."""
    bare._addresses["d"] = ("10.0.0.2", 5600)
    hold(bare)
    assert bare.cleaned == ["d"]
    assert bare.nixl_wrapper.posted == []
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    assert len(bare.nixl_wrapper.posted) == 1


def test_a_restarted_engine_is_met_anew(bare: Bare) -> None:
    """Same id, same address, another process: its old agent would read dead memory."""
    bare._agents["d"] = {0: b"before"}
    hold(bare)
    assert bare.cleaned == ["d"]
    assert bare.nixl_wrapper.posted == []
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    assert len(bare.nixl_wrapper.posted) == 1


def test_an_engine_that_is_being_read_from_is_not_forgotten(bare: Bare) -> None:
    """NIXL still writes with its agent; what was held by another process is computed instead."""
    hold(bare)
    bare.nixl_wrapper.states = ["PROC"] * 9
    bare._pop_done_transfers(bare._recving_transfers)
    bare._order("r2", ORDER)
    arrived(bare._questions.holds, "r2")
    bare._held("r2", peer.Asked(hold=answer(agents=[b"two"])))
    assert bare.cleaned == []
    assert bare._reads["r2"].lost is Reason.PEER_GONE


@pytest.mark.parametrize(
    ("address", "agent"),
    [(("10.0.0.2", 5600), b"one"), ((SOURCE.host, SOURCE.port), b"another")],
    ids=["address", "process"],
)
def test_a_handshake_that_ends_with_another_process_reads_nothing(
    bare: Bare, address: tuple[str, int], agent: bytes
) -> None:
    """Two engines of one id at the same moment, or a restart between HOLD and handshake."""
    bare._cleanup_remote_engine("d")
    hold(bare)
    bare.meets("d", address, agent)
    assert bare.nixl_wrapper.posted == []
    assert bare._reads["r"].lost is Reason.PEER_GONE


def test_a_failed_handshake_is_lost(bare: Bare) -> None:
    bare._cleanup_remote_engine("d")
    hold(bare)
    bare.handshakes[-1].set_exception(RuntimeError("refused"))
    bare._advance()
    assert bare._reads["r"].lost is Reason.PEER_GONE
    assert bare.lost() == ({7, 8, 9}, {"r"})


def test_hold_and_handshake_together_are_bounded(bare: Bare) -> None:
    """A peer may answer HOLD and then be silent; what it says afterwards comes too late."""
    bare._cleanup_remote_engine("d")
    hold(bare)
    time.sleep(TIMEOUT_S)
    bare._advance()
    assert bare._reads["r"].lost is Reason.TIMEOUT
    assert bare.lost() == ({7, 8, 9}, {"r"})
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    assert bare.nixl_wrapper.posted == []
    assert bare.lost() == (set(), set()), "reported once"


def test_a_late_answer_to_hold_is_not_read(bare: Bare) -> None:
    asked = arrived(bare._questions.holds)
    time.sleep(TIMEOUT_S)
    bare._advance()
    assert bare.finish()[0] == {"r"}
    bare._questions.holds.put(("r", asked))
    bare._advance()
    assert bare.nixl_wrapper.posted == []


def given_up(bare: Bare) -> None:
    """The READ of request r takes longer than its bound."""
    bare._pace = Pace(least_s=0.1)
    hold(bare)
    bare.nixl_wrapper.states = ["PROC"] * 3
    assert bare.finish()[0] == set()
    time.sleep(0.2)
    bare._advance()


def test_a_read_that_takes_too_long_is_given_up(bare: Bare) -> None:
    given_up(bare)
    assert bare._reads["r"].lost is Reason.TIMEOUT
    done, report = bare.finish()
    assert done == {"r"}
    assert report is not None
    assert report.outcomes["r"].lost is Reason.TIMEOUT
    assert report.writers == {"r": 1}, "NIXL may still write"
    assert bare.nixl_wrapper.released == 0


def test_a_read_that_was_given_up_is_watched_until_it_has_ended(bare: Bare) -> None:
    given_up(bare)
    bare.finish()
    assert bare.finish()[1] is None, "still under way"
    done, report = bare.finish()
    assert done == set(), "the request was reported once"
    assert report is not None and report.writers == {"r": -1}
    assert bare.nixl_wrapper.released == 1


def test_a_read_that_was_given_up_and_then_failed_has_ended_too(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up(bare)
    bare.finish()

    def disconnected(handle: int) -> str:
        raise RuntimeError("remote disconnected")

    monkeypatch.setattr(bare.nixl_wrapper, "check_xfer_state", disconnected)
    report = bare.finish()[1]
    assert report is not None and report.writers == {"r": -1}


def test_an_unanswered_confirm_is_lost(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(bare)
    bare._pop_done_transfers(bare._recving_transfers)
    time.sleep(TIMEOUT_S)
    bare._advance()
    assert bare._reads["r"].lost is Reason.TIMEOUT
    assert bare.finish()[0] == {"r"}
    confirm(bare)
    assert bare.finish() == (set(), None), "an answer that comes too late"


def test_an_engine_that_was_met_with_another_size_is_met_anew(bare: Bare) -> None:
    """Params of an earlier handover may have lied about its tensor parallelism."""
    bare.info.remote_tp_size = 2
    hold(bare)
    assert bare.cleaned == ["d"]
    assert bare.nixl_wrapper.posted == []
    bare.info.remote_tp_size = 1
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    assert len(bare.nixl_wrapper.posted) == 1


def test_sizes_in_params_do_not_reach_the_handshake(bare: Bare) -> None:
    source = parse_source(
        {
            "lease_id": SOURCE.lease_id,
            "remote_engine_id": SOURCE.engine_id,
            "remote_host": SOURCE.host,
            "remote_port": SOURCE.port,
            "prefix_proof": PROOF.to_params(),
            "tp_size": 64,
            "dcp_size": 9,
            "pp_size": 1024,
        }
    )
    assert isinstance(source, Source)
    bare._order("r2", replace(ORDER, source=source))
    meta = bare._recving_metadata["r2"]
    assert (meta.tp_size, meta.dcp_size, meta.pp_size) == (0, 1, 1)
    bare._held("r2", peer.Asked(hold=answer()))
    assert meta.tp_size == 1


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
    arrived(bare._questions.holds)

    def explode(*args: Any) -> peer.Asked:
        raise RecursionError("a hostile answer")

    monkeypatch.setattr(questions.peer, "hold", explode)
    bare._order("r", ORDER)
    hold(bare)
    assert bare._reads["r"].lost is Reason.PEER_GONE


def test_a_silent_peer_is_not_asked_again_at_once(bare: Bare) -> None:
    arrived(bare._questions.holds)
    silent = peer.Asked(reason=Reason.TIMEOUT, address=(SOURCE.host, SOURCE.port))
    bare._questions.holds.put(("r", silent))
    bare._advance()
    bare.lost()
    bare._order("r2", ORDER)
    assert bare._reads["r2"].lost is Reason.PEER_GONE
    assert bare._questions.holds.empty()
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


@pytest.mark.parametrize(
    ("local", "remote", "fits"),
    [
        ([[1, 2]], [[5, 6]], True),
        ([[1, 2]], [[4, 5, 6]], True),
        ([[1, 2]], [[5]], False),
        ([[1, 2]], [[5, 100]], False),
        ([[1, 2]], [], False),
    ],
)
def test_a_handover_whose_params_do_not_fit_fails_by_itself(
    bare: Bare, local: Any, remote: Any, fits: bool
) -> None:
    """Params come with a request; the base asserts what they say, which would end the engine."""
    spec = SimpleNamespace(remote_rank=0, local_block_ids=local, remote_block_ids=remote)
    bare._recving_metadata["handover"] = SimpleNamespace(local_block_ids=local)
    bare._recving_transfers["handover"] = []
    bare._read_blocks(spec, "d", "handover", "x", 1, 2, 1)
    assert bare.nixl_wrapper.notifications == ([b"x:1"] if fits else [])
    assert ("handover" in bare.lost()[1]) is not fits


def test_fewer_blocks_than_are_needed_do_not_fit_with_context_parallelism_either(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        NixlPullConnectorWorker, "_read_blocks", lambda *_: pytest.fail("the base asserts it")
    )
    bare.dcp_size = bare.info.remote_dcp_size = 2
    spec = SimpleNamespace(remote_rank=0, local_block_ids=[[1, 2]], remote_block_ids=[[5]])
    bare._recving_metadata["handover"] = SimpleNamespace(local_block_ids=[[1, 2]])
    bare._read_blocks(spec, "d", "handover", "x", 1, 2, 1)
    assert "handover" in bare.lost()[1]


def test_an_engine_is_not_forgotten_while_a_read_from_it_is_confirmed(bare: Bare) -> None:
    """Else what the read-back still needs to know of it is gone when CONFIRM is answered."""
    hold(bare)
    assert bare.finish()[0] == set()
    bare._order("r2", ORDER)
    arrived(bare._questions.holds, "r2")
    bare._held("r2", peer.Asked(hold=answer(agents=[b"two"])))
    assert bare.cleaned == []
    assert bare._reads["r2"].lost is Reason.PEER_GONE
    confirm(bare)
    assert "r" in bare.finish()[0]


def test_a_question_that_nobody_has_asked_yet_blames_nobody(bare: Bare) -> None:
    """It may have waited behind those for a dead peer."""
    arrived(bare._questions.holds)
    time.sleep(TIMEOUT_S)
    bare._advance()
    assert bare._reads["r"].lost is Reason.TIMEOUT
    assert not bare._questions.is_silent(SOURCE)


def test_a_late_answer_says_that_the_peer_is_there(bare: Bare) -> None:
    address = (SOURCE.host, SOURCE.port)
    arrived(bare._questions.holds)
    bare._questions.not_heard(address)
    time.sleep(TIMEOUT_S)
    bare._advance()
    bare._questions.holds.put(("r", peer.Asked(hold=answer(), address=address)))
    bare._advance()
    assert not bare._questions.is_silent(SOURCE)


def test_a_transfer_that_cannot_be_released_ends_no_engine(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int) -> None:
        raise RuntimeError("in use")

    given_up(bare)
    monkeypatch.setattr(bare.nixl_wrapper, "release_xfer_handle", refuse)
    for _ in range(4):
        bare.finish()
    assert bare._given_up.engines() == set()


class Slow(FakeNixl):
    """Takes a READ over only when it may; `taken` says in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.taken: list[str] = []
        self.refuses = False

    def transfer(self, handle: int) -> None:
        self.taken.append(threading.current_thread().name)
        assert self.may.wait(5)
        if self.refuses:
            raise RuntimeError("not now")


@pytest.fixture
def slow(bare: Bare) -> Slow:
    """P is to read so many blocks that they are posted aside, and NIXL takes its time."""
    nixl = bare.nixl_wrapper = Slow()
    bare._poster = Poster(nixl, lambda: None, shared=True)
    count = INLINE + 1
    local = tuple(range(10, 10 + count))
    bare._reads["r"].order = replace(ORDER, first_block=0, local_block_ids=local)
    bare._recving_metadata["r"].local_block_ids = (list(local),)
    bare._recving_metadata["r"].local_physical_block_ids = (list(local),)
    bare.dst_num_blocks = {"d": 1000, "p": 1000}
    arrived(bare._questions.holds)
    bare._held("r", peer.Asked(hold=answer(block_ids=list(range(40, 40 + count)))))
    return nixl


def ended(bare: Bare, seconds: float = 5.0) -> None:
    """Wait until the thread has done with what it was given."""
    end = time.monotonic() + seconds
    while not all(post.ended for posts in bare._poster._posts.values() for post in posts):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_long_read_is_posted_in_another_thread_and_the_step_goes_on(
    bare: Bare, slow: Slow
) -> None:
    assert bare.finish()[0] == set(), "it is not done before NIXL has it"
    assert bare._is("r", _State.READING)
    assert "d" in bare.busy_engines()
    slow.states = ["PROC"]
    slow.may.set()
    ended(bare)
    assert slow.taken == [name for name in slow.taken if name.startswith("bidir_post")] != []
    assert bare._pop_done_transfers(bare._recving_transfers) == set(), "not taken up yet"
    assert bare._is("r", _State.READING)
    bare.finish()
    assert bare._is("r", _State.READING), "NIXL is at it"
    bare.finish()
    assert bare._is("r", _State.CONFIRMING)
    confirm(bare)
    assert "r" in bare.finish()[0]
    assert bare.lost() == (set(), set())


def test_a_long_read_that_nixl_refuses_is_computed(bare: Bare, slow: Slow) -> None:
    slow.refuses = True
    slow.may.set()
    ended(bare)
    done, report = bare.finish()
    assert done == {"r"}
    assert report is not None and report.outcomes["r"].lost is Reason.TRANSFER_FAILED
    assert slow.released == 1


@pytest.mark.parametrize("refuses", [False, True])
def test_a_read_given_up_before_nixl_has_it_keeps_its_blocks_until_it_has_ended(
    bare: Bare, slow: Slow, refuses: bool
) -> None:
    slow.refuses = refuses
    bare._reads["r"].deadline = 0.0
    bare._advance()
    _, report = bare.finish()
    assert report is not None and report.outcomes["r"].lost is Reason.TIMEOUT
    assert report.writers == {"r": 1}
    assert "d" in bare.busy_engines()
    _, report = bare.finish()
    assert report is None, "NIXL may still begin to write"
    slow.states = [] if refuses else ["PROC", "DONE"]
    slow.may.set()
    end = time.monotonic() + 5
    while report is None or not report.writers:
        report = bare.finish()[1]
        assert time.monotonic() < end
    assert report.writers == {"r": -1}
    assert "d" not in bare.busy_engines()


def test_an_engine_that_is_read_from_is_not_evicted(bare: Bare, slow: Slow) -> None:
    bare._engine_ttl = 100.0
    long_ago = time.perf_counter() - 1000.0
    bare._engine_last_active = {"d": long_ago, "gone": long_ago}
    bare._evict_stale_engines()
    assert bare.cleaned == ["gone"]
    slow.may.set()


RATE_MB_S = 1000.0


def known(bare: Bare, engine_id: str, rate: float) -> None:
    """A probe has found that the link moves so many MB/s."""
    bare._probes.links.measured(engine_id, rate, time.monotonic())


def order_that_computes_in(bare: Bare, seconds: float | None) -> ReadBack:
    """A read-back whose tokens take so long to compute; it is of 0.003 MB."""
    return replace(ORDER, compute_s=seconds)


@pytest.mark.parametrize(
    ("compute_s", "lost"),
    [(None, None), (1.0, None), (1e-6, Reason.SLOW_LINK)],
    ids=["unknown", "slow to compute", "fast to compute"],
)
def test_what_is_computed_sooner_is_not_read(
    bare: Bare, compute_s: float | None, lost: Reason | None
) -> None:
    known(bare, "d", RATE_MB_S)
    bare._order("r2", order_that_computes_in(bare, compute_s))
    assert bare._reads["r2"].lost is lost
    if lost:
        assert "r2" in bare.lost()[1], "and nobody is asked"


def test_a_slow_peer_is_looked_at_again_from_time_to_time(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(bare, "d", RATE_MB_S)
    for number in range(3):
        bare._order(f"s{number}", order_that_computes_in(bare, 1e-6))
    assert bare._probes.started == [], "it has just been measured"
    later = time.monotonic() + 3600
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        bare._order("s3", order_that_computes_in(bare, 1e-6))
        bare._order("s4", order_that_computes_in(bare, 1e-6))
    assert bare._probes.started == ["d"], "once, until that has ended"
    known(bare, "d", 1e9)
    bare._order("s5", order_that_computes_in(bare, 1e-6))
    assert bare._reads["s5"].lost is None


def test_a_peer_of_unknown_speed_is_measured_beside_the_first_read(bare: Bare) -> None:
    hold(bare)
    assert bare._probes.started == ["d"]
    assert bare._reads["r"].lost is None


def test_a_read_that_took_longer_than_computing_has_its_link_measured(bare: Bare) -> None:
    known(bare, "d", 1e9)
    bare._reads["r"].order = order_that_computes_in(bare, 0.001)
    hold(bare)
    assert bare._probes.started == []
    bare._reads["r"].posted -= 1.0
    bare._probes.links._links["d"].probed = -1e9
    bare.finish()
    assert bare._probes.started == ["d"]


def test_a_read_that_is_given_up_has_its_link_measured(bare: Bare) -> None:
    known(bare, "d", 1e9)
    hold(bare)
    bare._probes.links._links["d"].probed = -1e9
    bare._reads["r"].deadline = 0.0
    bare._advance()
    assert bare._probes.started == ["d"]


def test_on_a_gpu_a_prompt_that_takes_long_waits_until_its_peer_is_met(bare: Bare) -> None:
    bare.nixl_memory_type = "VRAM"
    bare.forget("d")
    bare._reads["r"].order = order_that_computes_in(bare, 10.0)
    hold(bare)
    assert bare._is("r", _State.MEETING)
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    assert bare._is("r", _State.READING)


@pytest.mark.parametrize("compute_s", [None, 1.0])
def test_on_a_gpu_a_prompt_is_computed_while_its_peer_is_met(
    bare: Bare, compute_s: float | None
) -> None:
    """Meeting a peer over a slow link takes as long as many prompts do."""
    bare.nixl_memory_type = "VRAM"
    bare.forget("d")
    bare._reads["r"].order = order_that_computes_in(bare, compute_s)
    hold(bare)
    assert bare._reads["r"].lost is Reason.MEETING
    assert len(bare.handshakes) == 1
    assert "d" in bare._to_be_measured
    bare.finish()
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    known(bare, "d", 1e9)
    bare._order("r2", ORDER)
    arrived(bare._questions.holds, "r2")
    bare._held("r2", peer.Asked(hold=answer()))
    assert bare._is("r2", _State.READING)


def test_where_it_waits_a_slow_link_is_found_before_the_first_read(bare: Bare) -> None:
    bare.forget("d")
    bare._reads["r"].order = order_that_computes_in(bare, 1e-6)
    hold(bare)
    assert bare._is("r", _State.MEETING)
    known(bare, "d", RATE_MB_S)
    bare.meets("d", (SOURCE.host, SOURCE.port), b"one")
    assert bare._reads["r"].lost is Reason.SLOW_LINK
    assert bare.nixl_wrapper.posted == []


def test_on_a_gpu_a_peer_that_cannot_be_met_is_gone(bare: Bare) -> None:
    """Not met for the first time again and again."""
    bare.nixl_memory_type = "VRAM"
    bare.forget("d")
    hold(bare)
    assert bare._reads["r"].lost is Reason.MEETING
    for name, met, reason in (
        ("r2", False, Reason.PEER_GONE),
        ("r3", False, Reason.PEER_GONE),
        ("r4", True, Reason.MEETING),
    ):
        if met:
            bare.handshakes[-1].set_result(None)  # and it was forgotten since
        else:
            bare.handshakes[-1].set_exception(RuntimeError("compatibility hash mismatch"))
        bare._order(name, ORDER)
        arrived(bare._questions.holds, name)
        bare._held(name, peer.Asked(hold=answer()))
        assert bare._reads[name].lost is reason


def test_a_slow_peer_that_restarts_is_met_anew(bare: Bare) -> None:
    """Where its link cannot be timed any more, it is asked: and is found to be another process."""
    arrived(bare._questions.holds)
    known(bare, "d", RATE_MB_S)
    bare._order("r2", order_that_computes_in(bare, 1e-6))
    assert bare._reads["r2"].lost is Reason.SLOW_LINK
    bare._probes.links.failed("d", time.monotonic())
    bare._order("r3", order_that_computes_in(bare, 1e-6))
    arrived(bare._questions.holds, "r3")
    bare._held("r3", peer.Asked(hold=answer(agents=[b"two"])))
    assert bare.cleaned == ["d"]
    assert len(bare.handshakes) == 1


def test_a_slow_peer_that_cannot_be_timed_and_is_the_same_stays_off(bare: Bare) -> None:
    arrived(bare._questions.holds)
    known(bare, "d", RATE_MB_S)
    bare._order("r2", order_that_computes_in(bare, 1e-6))
    bare._probes.links.failed("d", time.monotonic())
    bare._order("r3", order_that_computes_in(bare, 1e-6))
    arrived(bare._questions.holds, "r3")
    bare._held("r3", peer.Asked(hold=answer()))
    assert bare._reads["r3"].lost is Reason.SLOW_LINK
    assert bare.nixl_wrapper.posted == []


def test_what_has_not_been_handed_to_nixl_when_it_is_given_up_never_is(
    bare: Bare, slow: Slow
) -> None:
    bare._reads["r2"] = replace(bare._reads["r"])
    post = Post("r2", "d", 0)
    bare._poster.post(post, Descriptors(1, list(range(INLINE + 1)), 2, list(range(INLINE + 1))))
    assert bare._poster.give_up("r2") == [post]
    slow.may.set()
    ended(bare)
    end = time.monotonic() + 5
    while not post.ended:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert post.handle is None
    assert len(slow.posted) == 1
