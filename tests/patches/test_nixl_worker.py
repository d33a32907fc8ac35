"""What the base's pull worker reports when something did not go as planned, and what it keeps.

A real NixlPullConnectorWorker without NIXL: transfers, notifications and handshakes are played by
the tests, its clock is theirs too.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, pull_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import TPMapping

BLOCKS = ([7, 8],)
NOTHING: tuple[set[str], set[str]] = (set(), set())


class FakeNixl:
    """Transfers are numbered from 1; `states` says what each is in, a missing one cannot start."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.posted = 0
        self.released: list[int] = []
        self.notified: list[bytes] = []
        self.arrived: list[bytes] = []

    def make_prepped_xfer(self, *arguments: Any, **more: Any) -> int:
        self.posted += 1
        return self.posted

    def transfer(self, handle: int) -> None:
        if handle not in self.states:
            raise RuntimeError("the peer is gone")

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> Any:
        return SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1)

    def release_xfer_handle(self, handle: int) -> None:
        assert handle not in self.released
        self.released.append(handle)

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        self.notified.append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        arrived, self.arrived = self.arrived, []
        return {"peer": arrived}


class Bare(NixlPullConnectorWorker):
    """The worker's own logic; a request of this rank reads from two ranks of engine "p".

    `taken` are the requests whose KV was taken over from the buffer that it arrived in.
    """

    def __init__(self) -> None:
        self.engine_id, self.tp_rank, self.pcp_rank, self.dcp_size = "d", 0, 0, 1
        self.nixl_wrapper: Any = FakeNixl()
        self.xfer_stats = NixlKVConnectorStats()
        self.use_host_buffer = True
        self.use_mla = self._has_mamba = self._is_hma_required = False
        self.enable_permute_local_kv = self.enable_heterogeneous_attn_post_process = False
        self._bidirectional_kv_xfer_enabled = False
        self._physical_blocks_per_logical_kv_block = 1
        self._lease_extension, self._engine_ttl = 20, 0.0
        self._reqs_to_send, self._reqs_to_process = {}, set()
        self.consumer_notification_counts_by_req = defaultdict(int)
        self.expected_consumer_notifications_by_req = {}
        self._recving_metadata, self._recving_transfers = {}, defaultdict(list)
        self._invalid_block_ids, self._failed_recv_reqs = queue.Queue(), queue.Queue()
        self._ready_requests = queue.Queue()
        self._handshake_lock, self._handshake_futures = threading.RLock(), {}
        self._handshake_initiation_executor = ThreadPoolExecutor(1)
        self._engine_last_active, self._engine_clock_offset = {}, {}
        self._remote_agents = {"p": {(0, 0): "p0", (0, 1): "p1"}}
        self.tp_mappings = {"p": TPMapping(((0, 1),), (0, 1), {0: 0, 1: 1}, 0)}
        self.kv_cache_config: Any = SimpleNamespace(transfer_groups=[None])
        self.src_xfer_handles_by_tp_ratio = {(-2, 16): [10, 11]}
        self.dst_xfer_side_handles = defaultdict(dict, {"p": {0: 20, 1: 21}})
        self.dst_num_blocks = {"p": 100, "d": 100}
        remote = SimpleNamespace(
            remote_tp_size=2,
            remote_dcp_size=1,
            remote_block_size=16,
            remote_physical_blocks_per_logical=1,
        )
        self.transfer_topo: Any = SimpleNamespace(
            get_engine_info=lambda engine: remote,
            tp_ratio=lambda tp_size: -2,
            block_size_ratio=lambda size: 1,
        )

        self.taken: list[str] = []

    def shutdown(self) -> None:
        self._handshake_initiation_executor.shutdown(wait=True)

    def _compute_desc_ids(self, block_ids: Any, **more: Any) -> Any:
        return [block for group in block_ids for block in group]

    def sync_recved_kv_to_device(self, req_id: str, meta: Any) -> None:
        self.taken.append(req_id)

    def _nixl_handshake(self, *arguments: Any) -> Any:
        raise ConnectionError("nobody answers")

    def receive(self, request_id: str, blocks: Any = BLOCKS) -> None:
        """One engine step with the scheduler's order to read `blocks` for a request."""
        metadata = NixlConnectorMetadata()
        metadata.add_new_req_to_recv(
            request_id,
            blocks,
            {
                "remote_block_ids": ([40, 41],),
                "remote_engine_id": "p",
                "remote_request_id": "there",
                "remote_host": "10.0.0.1",
                "remote_port": 5600,
                "tp_size": 2,
            },
        )
        self.start_load_kv(metadata)

    def keep(self, terms: dict[str, float]) -> None:
        """One engine step that keeps each request's blocks until the time given."""
        metadata = NixlConnectorMetadata()
        metadata.reqs_in_batch, metadata.reqs_to_send = set(terms), dict(terms)
        self.start_load_kv(metadata)

    def renew(self, request_ids: Iterable[str]) -> None:
        """A peer's heartbeat arrives."""
        self.nixl_wrapper.arrived.append(b"HB:" + ",".join(request_ids).encode())


@pytest.fixture
def worker() -> Any:
    made = Bare()
    yield made
    made.shutdown()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`clock.now` is what the worker reads as the time."""
    made = SimpleNamespace(now=0.0)
    stand_in = SimpleNamespace(perf_counter=lambda: made.now)
    monkeypatch.setattr(base_worker, "time", stand_in)
    monkeypatch.setattr(pull_worker, "time", stand_in)
    return made


############################################################
# Leases
############################################################


def test_a_lease_ends_at_its_time_though_an_older_one_was_renewed(
    worker: Bare, clock: SimpleNamespace
) -> None:
    worker.keep({"renewed": 30.0, "left": 31.0})
    clock.now = 25.0
    worker.renew(["renewed"])
    assert worker.get_finished() == NOTHING
    clock.now = 31.0
    assert worker.get_finished() == ({"left"}, set())
    clock.now = 44.9
    assert worker.get_finished() == NOTHING
    clock.now = 45.0
    assert worker.get_finished() == ({"renewed"}, set())
    assert not worker._reqs_to_send and not worker._reqs_to_process


def test_a_short_lease_ends_at_its_time_though_a_longer_one_is_older(
    worker: Bare, clock: SimpleNamespace
) -> None:
    """An engine that prefills and decodes keeps turns for minutes and handovers for seconds."""
    worker.keep({"turn": 480.0})
    worker.keep({"handover": 30.0, "later": 40.0})
    clock.now = 30.0
    assert worker.get_finished() == ({"handover"}, set())


############################################################
# Several reads of one request
############################################################


def test_a_request_is_reported_failed_once_and_after_its_last_read(worker: Bare) -> None:
    """What is reported may be given to another request, which the other read would overwrite."""
    nixl = worker.nixl_wrapper
    nixl.states = {1: "PROC", 2: "PROC"}
    worker.receive("r")
    assert nixl.posted == 2
    nixl.states[1] = "ERR"
    for _ in range(2):
        assert worker.get_finished() == NOTHING
    nixl.states[2] = "DONE"
    assert worker.get_finished() == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == {7, 8}
    assert worker.taken == [], "what came is not used"
    assert worker.get_finished() == NOTHING
    assert sorted(nixl.released) == [1, 2]
    assert not worker._recving_metadata and not worker._recving_transfers


def test_reads_that_fail_in_different_steps_are_reported_once(worker: Bare) -> None:
    nixl = worker.nixl_wrapper
    nixl.states = {1: "PROC", 2: "ERR"}
    worker.receive("r")
    assert worker.get_finished() == NOTHING
    nixl.states[1] = "ERR"
    assert worker.get_finished() == (set(), {"r"})
    assert worker.get_finished() == NOTHING


def test_a_read_that_could_not_start_waits_for_the_one_that_did(worker: Bare) -> None:
    nixl = worker.nixl_wrapper
    nixl.states = {2: "PROC"}
    worker.receive("r")
    assert worker.get_finished() == NOTHING
    nixl.states[2] = "DONE"
    assert worker.get_finished() == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == {7, 8}
    assert worker.get_finished() == NOTHING


def test_a_failed_request_does_not_hold_back_another(worker: Bare) -> None:
    nixl = worker.nixl_wrapper
    nixl.states = {1: "ERR", 2: "PROC", 3: "ERR", 4: "DONE"}
    worker.receive("slow")
    worker.receive("other", ([9],))
    assert worker.get_finished() == (set(), {"other"})
    nixl.states[2] = "DONE"
    assert worker.get_finished() == (set(), {"slow"})


def test_reads_that_all_succeed_are_reported_together(worker: Bare) -> None:
    nixl = worker.nixl_wrapper
    nixl.states = {1: "DONE", 2: "PROC"}
    worker.receive("r")
    assert worker.get_finished() == NOTHING
    nixl.states[2] = "DONE"
    assert worker.get_finished() == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.taken == ["r"]


def test_blocks_that_no_read_is_needed_for_are_reported(worker: Bare) -> None:
    """The scheduler waits for every rank, also for one whose share of the blocks is empty."""
    worker.tp_mappings["p"] = TPMapping(((),), (0, 1), {}, 0)
    worker.receive("r")
    assert worker.nixl_wrapper.posted == 0
    assert len(worker.nixl_wrapper.notified) == 2
    assert worker.get_finished() == (set(), {"r"})


############################################################
# Requests that only tell P to free its blocks
############################################################


def fail_handshake(worker: Bare, blocks: Any) -> None:
    worker._remote_agents.clear()
    worker.receive("r", blocks)
    worker.shutdown()  # returns when the handshake and all that follows from it is over


@pytest.mark.parametrize("blocks", [(), [], ([],)], ids=str)
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_request_without_blocks_survives_a_failed_handshake(
    worker: Bare, hybrid: bool, blocks: Any
) -> None:
    """It runs, or is gone already: to the scheduler, a receive of it would be a fatal error."""
    worker._is_hma_required = hybrid
    fail_handshake(worker, blocks)
    assert worker.get_finished() == NOTHING
    assert worker.get_block_ids_with_load_errors() == set()
    assert not worker._recving_metadata


def test_a_request_without_blocks_leaves_nothing_behind(worker: Bare) -> None:
    worker.receive("r", ())
    assert worker.nixl_wrapper.notified == [b"there:1"] * 2
    assert worker.get_finished() == NOTHING
    assert not worker._recving_metadata


def test_a_request_with_blocks_is_reported_failed_after_a_failed_handshake(worker: Bare) -> None:
    fail_handshake(worker, BLOCKS)
    assert worker.get_finished() == (set(), {"r"})
    assert worker.get_block_ids_with_load_errors() == {7, 8}
    assert worker.get_finished() == NOTHING
