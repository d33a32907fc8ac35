"""READs that only time a link: what they find, and what is left of them in NIXL."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from vllm.bidir.connector import touch as module
from vllm.bidir.connector.posting import Descriptors
from vllm.bidir.connector.touch import (
    ENOUGH_MB_S,
    LAST_MB,
    READS,
    TIGHT,
    Unfinished,
    measure,
    touch,
)
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

READ = Descriptors("own", [0, 0], "theirs", [3, 3])
NEVER = math.inf


class Clock:
    """Time that goes by while someone waits, and a microsecond with each look at it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Agent:
    """NIXL, whose READs take the seconds that `takes` says, one after the other, or as long as they
    take at `rate` MB/s.

    `wait_s` goes by before each look returns, as when another thread has Python's lock; `fails`
    names the call that raises, for all READs but the first `after`; `state` is what they end in.
    """

    clock: Clock
    takes: list[float] = field(default_factory=list)
    rate: float = 0.0
    wait_s: float = 0.0
    posting_s: float = 0.0
    fails: str = ""
    after: int = 0
    state: str = "DONE"
    on_look: Callable[[], None] = lambda: None
    emulated: bool = False
    sizes: list[float] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    _ends: dict[int, float] = field(default_factory=dict)

    def sized(self, megabytes: float) -> tuple[list[Descriptors], float]:
        self.sizes.append(megabytes)
        return [READ], megabytes

    def _takes(self, handle: int) -> float:
        return self.sizes[-1] / self.rate if self.rate else self.takes[handle]

    def _may_fail(self, call: str, handle: int) -> None:
        if self.fails == call and handle >= self.after:
            raise RuntimeError(f"{call}: NIXL_ERR_REMOTE_DISCONNECT")

    def make_prepped_xfer(self, operation: str, *lists: Any) -> int:
        assert (operation, *lists) == ("READ", "own", [0, 0], "theirs", [3, 3])
        handle = len(self.made)
        self._may_fail("make_prepped_xfer", handle)
        self.made.append(handle)
        return handle

    def transfer(self, handle: int) -> str:
        self._may_fail("transfer", handle)
        self.clock.now += self.posting_s
        takes = self._takes(handle)
        if self.emulated:
            self.clock.now += takes
            takes = 0.0
        self._ends[handle] = self.clock.now + takes
        return "PROC" if takes > 0 else self.state

    def check_xfer_state(self, handle: int) -> str:
        assert handle not in self.released
        self.on_look()
        self._may_fail("check_xfer_state", handle)
        # What NIXL says is as of when it was asked; the answer may be waited for.
        found = "PROC" if self.clock.now < self._ends[handle] else self.state
        self.clock.now += self.wait_s
        return found

    def release_xfer_handle(self, handle: int) -> None:
        self._may_fail("release_xfer_handle", handle)
        self.released.append(handle)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def unfinished() -> Unfinished:
    return Unfinished()


def measured(agent: Agent, unfinished: Unfinished, timeout_s: float = 10.0) -> float | None:
    """The rate of READs of which one has ended in time, MB/s."""
    found = measure(agent, "d", agent.sized, unfinished, timeout_s)
    assert found is None or found.finished
    return None if found is None else found.megabytes_per_s


def test_a_touch_waits_until_it_is_done(clock: Clock, unfinished: Unfinished) -> None:
    busy: list[set[str]] = []
    agent = Agent(clock, [1.0], on_look=lambda: busy.append(unfinished.engines()))
    before = clock.now
    assert touch(agent, "d", [READ], unfinished, 10.0)
    assert clock.now - before >= 1.0
    assert (agent.made, agent.released) == ([0], [0])
    assert set(map(frozenset, busy)) == {frozenset({"d"})}
    assert unfinished.engines() == set()


def test_who_opens_the_way_has_the_agent_for_itself_until_it_is_open(
    clock: Clock, unfinished: Unfinished
) -> None:
    """And not longer: a peer that is silent then delays no other peer's handshake."""
    agent, entry, held = Agent(clock, [1.0]), threading.Lock(), []
    transfer, check = agent.transfer, agent.check_xfer_state
    agent.transfer = lambda handle: (held.append(entry.locked()), transfer(handle))[1]
    agent.check_xfer_state = lambda handle: (held.append(entry.locked()), check(handle))[1]
    assert touch(agent, "d", [READ], unfinished, 10.0, entry)
    assert held[0] is True
    assert set(held[1:]) == {False}


def test_a_touch_that_takes_too_long_is_kept_until_nixl_has_ended_it(
    clock: Clock, unfinished: Unfinished
) -> None:
    agent = Agent(clock, [NEVER])
    before = clock.now
    assert not touch(agent, "d", [READ], unfinished, 2.0)
    assert 2.0 <= clock.now - before < 2.1
    assert agent.released == []
    assert unfinished.engines() == {"d"}
    asked: list[Any] = []
    unfinished.sweep(lambda handle: not asked.append(handle))
    assert (asked, unfinished.engines()) == ([0], {"d"})
    unfinished.sweep(lambda handle: False)
    assert (len(unfinished), unfinished.engines()) == (0, set())


def test_a_sweep_keeps_those_that_still_run(unfinished: Unfinished) -> None:
    for engine_id, handle in [("d", 0), ("e", 1), ("d", 2)]:
        unfinished.add(engine_id, handle)
    unfinished.sweep(lambda handle: handle == 2)
    assert (len(unfinished), unfinished.engines()) == (1, {"d"})


@pytest.mark.parametrize(
    ("call", "released"), [("make_prepped_xfer", []), ("transfer", [0]), ("check_xfer_state", [0])]
)
def test_a_broken_link_leaves_nothing_behind(
    clock: Clock, unfinished: Unfinished, call: str, released: list[int]
) -> None:
    touched = Agent(clock, [0.1], fails=call)
    assert not touch(touched, "d", [READ], unfinished, 10.0)
    assert touched.released == released
    agent = Agent(clock, [0.1] * READS, fails=call)
    assert measured(agent, unfinished) is None
    assert agent.released == released
    assert (unfinished.engines(), len(unfinished)) == (set(), 0)


def test_the_bytes_have_come_though_nixl_does_not_release_it(
    clock: Clock, unfinished: Unfinished
) -> None:
    assert touch(Agent(clock, [0.1], fails="release_xfer_handle"), "d", [READ], unfinished, 10.0)
    assert unfinished.engines() == set()


def test_a_link_that_breaks_has_no_rate(clock: Clock, unfinished: Unfinished) -> None:
    agent = Agent(clock, [0.01] * READS, fails="check_xfer_state", after=1, wait_s=0.02)
    assert measured(agent, unfinished) is None
    assert agent.released == [0, 1]


@pytest.mark.parametrize("takes", [0.0, 0.1])
def test_a_state_that_is_an_error_is_no_success(
    clock: Clock, unfinished: Unfinished, takes: float
) -> None:
    agent = Agent(clock, [takes], state="ERR")
    assert not touch(agent, "d", [READ], unfinished, 10.0)
    assert agent.released == [0]
    assert measured(Agent(clock, [takes], state="ERR"), unfinished) is None


RATES = [10.0, 390.0, 1_000.0, 6_000.0, 30_000.0, 200_000.0]


@pytest.mark.parametrize("wait_s", [0.0, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("rate", RATES)
def test_no_link_looks_faster_than_it_is(
    clock: Clock, unfinished: Unfinished, rate: float, wait_s: float
) -> None:
    """However long a thread waits for Python's lock: one that waits misses how long it took."""
    found = measured(Agent(clock, rate=rate, wait_s=wait_s), unfinished)
    assert found is not None and found <= 1.001 * rate


@pytest.mark.parametrize("wait_s", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("rate", RATES)
def test_waiting_for_pythons_lock_makes_no_link_slow(
    clock: Clock, unfinished: Unfinished, rate: float, wait_s: float
) -> None:
    """It is read from for longer, until the wait is a small part of it."""
    found = measured(Agent(clock, rate=rate, wait_s=wait_s), unfinished)
    waited = LAST_MB / (LAST_MB / rate + 2 * wait_s + 1e-3)
    assert found is not None and found >= 0.9 * min(rate / TIGHT, waited)


@pytest.mark.parametrize("rate", [200.0, 390.0, 1_000.0])
def test_a_slow_link_is_not_read_from_for_long(
    clock: Clock, unfinished: Unfinished, rate: float
) -> None:
    agent = Agent(clock, rate=rate, wait_s=0.02)
    before = clock.now
    assert measured(agent, unfinished) is not None
    assert clock.now - before < 0.8
    assert agent.made == agent.released
    assert unfinished.engines() == set()


def test_a_link_that_does_its_work_while_nixl_is_told_is_timed_too(
    clock: Clock, unfinished: Unfinished
) -> None:
    found = measured(Agent(clock, rate=390.0, emulated=True), unfinished)
    assert found == pytest.approx(390.0, rel=0.02)


def test_a_fast_link_is_read_from_no_more_than_is_needed(
    clock: Clock, unfinished: Unfinished
) -> None:
    agent = Agent(clock, rate=10 * ENOUGH_MB_S)
    found = measured(agent, unfinished)
    assert found is not None and found >= ENOUGH_MB_S
    assert agent.sizes[-1] < LAST_MB


def test_of_a_read_that_does_not_end_the_rate_is_the_most_it_can_be(
    clock: Clock, unfinished: Unfinished
) -> None:
    agent = Agent(clock, [NEVER])
    found = measure(agent, "d", agent.sized, unfinished, 2.0)
    assert found is not None and not found.finished
    assert found.megabytes_per_s == pytest.approx(agent.sizes[0] / 2.0, rel=0.01)
    assert (agent.made, agent.released) == ([0], [])
    assert unfinished.engines() == {"d"} and len(unfinished) == 1


def test_a_later_read_that_does_not_end_is_not_taken_for_more_than_it_may_be(
    clock: Clock, unfinished: Unfinished
) -> None:
    """The peer may have stood still for a moment; links.py waits for a second one."""
    agent = Agent(clock, [0.01, NEVER], wait_s=0.02)
    found = measure(agent, "d", agent.sized, unfinished, 2.0)
    assert found is not None and not found.finished
    assert found.megabytes_per_s == pytest.approx(agent.sizes[0] / 2.0, rel=0.1)
    assert agent.released == [0]


def test_ranks_are_read_from_together(clock: Clock, unfinished: Unfinished) -> None:
    """It is as long as the longest takes."""
    agent = Agent(clock, [0.4, 0.1, 0.3] * READS)
    before = clock.now
    assert touch(agent, "d", [READ, READ, READ], unfinished, 10.0)
    assert 0.4 <= clock.now - before < 0.5
    assert sorted(agent.released) == [0, 1, 2]
    agent.made.clear()
    agent.released.clear()
    found = measure(agent, "d", lambda wanted: ([READ] * 3, 40.0), unfinished, 10.0)
    assert found is not None and found.megabytes_per_s == pytest.approx(100.0, rel=0.05)


@pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
def test_a_rank_that_fails_leaves_the_others_to_nixl(
    clock: Clock, unfinished: Unfinished, call: str
) -> None:
    agent = Agent(clock, [NEVER, 0.1], fails=call, after=1)
    assert not touch(agent, "d", [READ, READ], unfinished, 10.0)
    assert agent.released == [1]
    assert (len(unfinished), unfinished.engines()) == (1, {"d"})


def test_a_rank_in_error_is_no_success_though_another_never_ends(
    clock: Clock, unfinished: Unfinished
) -> None:
    agent = Agent(clock, [NEVER, 0.1], state="ERR")
    assert measure(agent, "d", lambda wanted: ([READ] * 2, 40.0), unfinished, 1.0) is None
    assert (agent.released, len(unfinished)) == ([1], 1)


def test_where_blocks_do_not_pair_nothing_is_read(clock: Clock, unfinished: Unfinished) -> None:
    agent = Agent(clock)
    assert measure(agent, "d", lambda megabytes: None, unfinished, 1.0) is None
    assert agent.made == []
    assert unfinished.engines() == set()


def test_an_engine_is_busy_before_its_thread_has_started(unfinished: Unfinished) -> None:
    unfinished.enter("d")
    unfinished.enter("d")
    unfinished.leave("d")
    assert unfinished.engines() == {"d"}
    unfinished.leave("d")
    assert unfinished.engines() == set()


def test_closing_ends_the_wait_and_hands_over_what_runs(unfinished: Unfinished) -> None:
    looked = threading.Event()
    agent = Agent(Clock(), [NEVER], on_look=looked.set)
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.append(measured(agent, unfinished, 60.0)))
    thread.start()
    assert looked.wait(10)
    before = time.monotonic()
    assert unfinished.close(10.0) == [0]
    thread.join(10)
    assert time.monotonic() - before < 5
    assert found == [None]
    assert (agent.released, unfinished.engines()) == ([], set())
    assert not touch(agent, "d", [READ], unfinished, 10.0)
    assert agent.made == [0], "nothing is begun any more"


def test_closing_does_not_wait_for_ever(unfinished: Unfinished) -> None:
    unfinished.enter("d")
    assert unfinished.close(0.01) == []


############################################################
# NIXL itself
############################################################

BLOCK_BYTES, BLOCKS = 1 << 20, 8


class Side:
    """An agent with blocks in main memory."""

    def __init__(self, value: int) -> None:
        config = nixl_agent_config(num_threads=1, capture_telemetry=True)
        self.nixl = NixlWrapper(str(uuid.uuid4()), config)
        self.memory = torch.full((BLOCKS, BLOCK_BYTES), value, dtype=torch.uint8)
        self.memory += torch.arange(BLOCKS, dtype=torch.uint8)[:, None]
        region = (self.memory.data_ptr(), self.memory.numel(), 0, "")
        self.registered = self.nixl.get_reg_descs([region], "DRAM")
        self.nixl.register_memory(self.registered, backends=["UCX"])

    def prepare(self, agent: str, of: Side) -> Any:
        blocks = np.zeros((BLOCKS, 3), dtype=np.uint64)
        blocks[:, 0] = of.memory.data_ptr() + np.arange(BLOCKS, dtype=np.uint64) * BLOCK_BYTES
        blocks[:, 1] = BLOCK_BYTES
        return self.nixl.prep_xfer_dlist(agent, self.nixl.get_xfer_descs(blocks, "DRAM"))


def test_nixl_reads_and_nothing_is_left_in_it() -> None:
    p, d = Side(10), Side(100)
    agent = p.nixl.add_remote_agent(d.nixl.get_agent_metadata())
    own, theirs = p.prepare("NIXL_INIT_AGENT", p), p.prepare(agent, d)
    made: list[Any] = []
    make = p.nixl.make_prepped_xfer
    p.nixl.make_prepped_xfer = lambda *lists: (made.append(make(*lists)), made[-1])[1]
    unfinished = Unfinished()

    ids = np.asarray([0], dtype=np.int32)
    assert touch(p.nixl, "d", [Descriptors(own, ids, theirs, ids + 5)], unfinished, 10.0)
    assert torch.all(p.memory[0] == 105)
    assert torch.equal(p.memory[1:, 0], torch.arange(11, 18, dtype=torch.uint8)), "no other block"

    repeated = np.repeat(ids, 64)
    pairs = Descriptors(own, repeated, theirs, repeated + 3)
    megabytes = len(repeated) * BLOCK_BYTES / 1e6
    rate = measure(p.nixl, "d", lambda wanted: ([pairs], megabytes), unfinished, 10.0)
    assert rate is not None and rate.finished and rate.megabytes_per_s > 1.0
    assert torch.all(p.memory[0] == 103)
    assert 2 <= len(made) <= 1 + 5 * READS
    # NIXL's handles know whether they were released.
    assert all(handle._released for handle in made)
    assert unfinished.engines() == set()

    p.nixl.release_dlist_handle(theirs)
    p.nixl.remove_remote_agent(agent)
    assert measure(p.nixl, "d", lambda wanted: ([pairs], 1.0), unfinished, 10.0) is None
    assert not touch(p.nixl, "d", [pairs], unfinished, 10.0)
    assert unfinished.engines() == set()
    p.nixl.release_dlist_handle(own)
    for side in (p, d):
        side.nixl.deregister_memory(side.registered)
