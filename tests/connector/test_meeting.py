"""Whom a worker has met: a silent peer delays nobody, and one that restarted is met anew."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.bidir.connector import peer
from vllm.bidir.connector.agents import digest
from vllm.bidir.connector.greeting import Greeting
from vllm.bidir.connector.meeting import MeetingWorker
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

ADDRESS = ("10.0.0.1", 5600)


class Bare(MeetingWorker):
    """The worker's own logic and the base's bookkeeping of handshakes, without NIXL."""

    def __init__(self) -> None:
        # As the real constructor leaves it, whatever the base's own pool is.
        transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
        base: Any = SimpleNamespace(kv_transfer_config=transfer)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NixlPullConnectorWorker, "__init__", lambda self, *rest: None)
            self._handshake_initiation_executor = ThreadPoolExecutor(1)
            self.nixl_wrapper, self.nixl_memory_type = None, "DRAM"
            self.kv_cache_layout = "LBHNC"
            super().__init__(base, "p", base)
        self.world_size, self.block_size, self._physical_blocks_per_logical_kv_block = 1, 16, 1
        self.block_len_per_layer = self.block_stride_per_layer = [1000]
        self._handshake_lock = threading.RLock()
        self._handshake_futures: dict[str, Future[Any]] = {}
        self._remote_agents: dict[str, Any] = {}
        self._engine_clock_offset: dict[str, float] = {}
        self._engine_last_active: dict[str, float] = {}
        self._engine_ttl = 0
        self._recving_transfers: dict[str, list[int]] = {}
        self._recving_metadata: dict[str, Any] = {}
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._is_hma_required = False
        self.kv_cache_config: Any = SimpleNamespace(
            transfer_groups=["one"], kv_cache_groups=["one"]
        )
        info = SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1)
        self.transfer_topo: Any = SimpleNamespace(
            get_engine_info=lambda engine: info,
            block_size_ratio=lambda size: 1,
            unregister_remote_engine=lambda engine: None,
        )
        plan = SimpleNamespace(all_source_ranks=(0,), rank_offset_factor=0)
        self.engine_id, self.tp_mappings = "p", defaultdict(lambda: plan)
        self.dst_xfer_side_handles: dict[str, Any] = {}
        self.kv_caches_base_addr: dict[str, Any] = {}
        self.dst_num_blocks: dict[str, int] = {}
        self.silent = threading.Event()

    def _hear_greeting(self, *_: Any) -> None:
        """There is no side channel."""

    def shutdown(self) -> None:
        self.silent.set()
        self._handshake_initiation_executor.shutdown(wait=True)

    def __del__(self) -> None:
        """The base's would release what was never made."""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Bare()

    def shake(self: Bare, host: str, port: int, size: int, engine: str, *more: Any) -> Any:
        if engine.startswith("silent"):
            made.silent.wait(20)
            raise RuntimeError("no answer")
        metadata = SimpleNamespace(
            engine_id=engine,
            agent_metadata=f"{engine}@{host}".encode(),
            block_size=16,
            physical_blocks_per_logical_kv_block=1,
            kv_caches_base_addr=[0],
            block_lens=[1000],
            block_strides=[1000],
            num_blocks=10,
            device_id=0,
            kv_cache_layout="BLNHC",
        )
        return {(0, 0): self.add_remote_agent(metadata, 0, size, 1)}, 0.0

    entered = threading.Lock()

    def add(self: Bare, *rest: Any) -> str:
        assert entered.acquire(blocking=False), "NIXL is entered by one handshake at a time"
        time.sleep(0.01)
        entered.release()
        return "agent"

    monkeypatch.setattr(NixlPullConnectorWorker, "_nixl_handshake", shake)
    monkeypatch.setattr(NixlPullConnectorWorker, "add_remote_agent", add)

    def forget(self: Bare, engine_id: str, **more: Any) -> None:
        del self._remote_agents[engine_id]

    monkeypatch.setattr(NixlPullConnectorWorker, "_cleanup_remote_engine", forget)
    yield made
    made.shutdown()


def meet(bare: Bare, engine: str, address: tuple[str, int] = ADDRESS) -> None:
    handshake = bare._ensure_handshake(engine, *address, 1)
    assert handshake is not None
    handshake.result(timeout=5)


def test_silent_peers_delay_no_other_peers_handshake(bare: Bare) -> None:
    for number in range(10):
        bare._ensure_handshake(f"silent {number}", *ADDRESS, 1)
    meet(bare, "d")
    assert bare.is_met("d", ADDRESS, [digest(b"d@10.0.0.1")])


def test_handshakes_enter_nixl_one_after_the_other(bare: Bare) -> None:
    under_way = [bare._ensure_handshake(f"d{number}", *ADDRESS, 1) for number in range(8)]
    for handshake in under_way:
        assert handshake is not None
        handshake.result(timeout=5)


def test_an_engine_is_known_by_address_and_agents(bare: Bare) -> None:
    meet(bare, "d")
    assert not bare.is_met("d", ("10.0.0.2", 5600), [digest(b"d@10.0.0.1")])
    assert not bare.is_met("d", ADDRESS, [digest(b"another process")])
    assert not bare.is_met("d", ADDRESS, [])
    assert not bare.is_met("nobody", ADDRESS, [digest(b"d@10.0.0.1")])


def order(engine: str, agents: list[bytes] | None, address: tuple[str, int] = ADDRESS) -> Any:
    """A handover from this engine; its params name these agents."""
    remote = SimpleNamespace(engine_id=engine, host=address[0], port=address[1])
    named = {} if agents is None else {"r": tuple(agents)}
    return SimpleNamespace(reqs_to_recv={"r": SimpleNamespace(remote=remote)}, agents=named)


@pytest.fixture
def base(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the base reads; it meets whom it does not know yet, and waits for them."""
    read: list[str] = []

    def start(self: Bare, metadata: Any) -> None:
        for name, meta in metadata.reqs_to_recv.items():
            if meta.remote.engine_id not in self._remote_agents:
                meet(self, meta.remote.engine_id, (meta.remote.host, meta.remote.port))
            self._read_blocks_for_req(name, meta)

    def read_blocks(self: Bare, name: str, meta: Any) -> None:
        read.append(meta.remote.host)

    def fail(self: Bare, name: str, handle: Any) -> None:
        self._failed_recv_reqs.put(name)

    monkeypatch.setattr(NixlPullConnectorWorker, "start_load_kv", start)
    monkeypatch.setattr(NixlPullConnectorWorker, "_read_blocks_for_req", read_blocks)
    monkeypatch.setattr(NixlPullConnectorWorker, "_handle_failed_transfer", fail)
    return read


def test_a_restarted_prefill_node_is_met_anew_before_a_handover(
    bare: Bare, base: list[str]
) -> None:
    meet(bare, "p2")
    bare._agents["p2"] = {0: digest(b"before the restart")}
    bare.start_load_kv(order("p2", [digest(b"p2@10.0.0.1")]))
    assert base == ["10.0.0.1"]
    assert bare.is_met("p2", ADDRESS, [digest(b"p2@10.0.0.1")])


def test_a_handover_of_a_process_that_is_gone_is_not_read_from_its_successor(
    bare: Bare, base: list[str]
) -> None:
    """The blocks that it names are the old process's."""
    meet(bare, "p2")
    bare.start_load_kv(order("p2", [digest(b"before the restart")]))
    assert base == []
    assert bare._failed_recv_reqs.get_nowait() == "r"
    assert bare._named == {}


def test_a_handover_of_another_engine_of_the_same_id_is_not_read_from_the_first(
    bare: Bare, base: list[str]
) -> None:
    """The first is being read from, so that it cannot be forgotten now."""
    meet(bare, "p2")
    bare._recving_transfers["r0"] = [1]
    bare._recving_metadata["r0"] = SimpleNamespace(remote=SimpleNamespace(engine_id="p2"))
    bare.start_load_kv(order("p2", [digest(b"p2@10.0.0.2")], ("10.0.0.2", 5600)))
    assert base == []
    assert bare._failed_recv_reqs.get_nowait() == "r"


def test_a_process_is_the_same_under_each_name_of_its_host(bare: Bare, base: list[str]) -> None:
    """Each router names P as it reaches it itself."""
    meet(bare, "p2")
    bare.start_load_kv(order("p2", [digest(b"p2@10.0.0.1")], ("p.example", 5600)))
    assert base == ["p.example"] and bare._failed_recv_reqs.empty()


def test_a_handover_whose_engine_was_forgotten_meanwhile_fails_by_itself(
    bare: Bare, base: list[str]
) -> None:
    meta = order("p2", None).reqs_to_recv["r"]
    bare._read_blocks_for_req("r", meta)
    assert base == []
    assert bare._failed_recv_reqs.get_nowait() == "r"


def test_a_handover_that_names_no_agents_is_the_bases_own(bare: Bare, base: list[str]) -> None:
    """From a stock prefill node."""
    bare.start_load_kv(order("p2", None))
    assert base == ["10.0.0.1"]


def test_an_engine_is_not_forgotten_while_it_is_read_from(bare: Bare) -> None:
    meet(bare, "d")
    bare._recving_transfers["r"] = [1]
    bare._recving_metadata["r"] = SimpleNamespace(remote=SimpleNamespace(engine_id="d"))
    assert not bare.forget("d")
    assert "d" in bare._remote_agents
    bare._recving_transfers.clear()
    assert bare.forget("d")
    assert bare.forget("d"), "it is forgotten already"


def test_an_engine_binds_claims_if_the_process_that_was_met_says_so(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet(bare, "p2")
    agent = digest(b"p2@10.0.0.1")
    for binds in (True, False, True):
        monkeypatch.setattr(peer, "greeting", lambda *_, said=binds: Greeting(agent, said))
        MeetingWorker._hear_greeting(bare, ADDRESS, "p2", [(0, 0)])
        assert bare.binds_claims("p2") is binds
    bare.forget("p2")
    assert not bare.binds_claims("p2")


def test_an_engine_that_is_only_told_something_says_for_itself_whether_it_binds(
    bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last of its pipeline's ranks, as agents are remembered."""
    asked: list[Any] = []

    def greeting(host: str, port: int, ask: bytes, timeout_s: float) -> Greeting:
        asked.append((host, port, *msgspec.msgpack.decode(ask)))
        return Greeting(b"any", True)

    monkeypatch.setattr(peer, "greeting", greeting)
    MeetingWorker._hear_greeting(bare, ADDRESS, "p2", [(0, 1), (1, 1)])
    assert asked == [(*ADDRESS, b"get_meta_msg", 1, 1)]
    assert bare.binds_claims("p2")
