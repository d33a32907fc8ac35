"""Leases, by arbitrary sequences of what can happen to them, against what must always be true."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from vllm.bidir.connector.leases import LeaseOptions, Leases

OPTIONS = LeaseOptions(duration_s=15.0, most_s=100.0, hold_s=30.0, budget=100)


class Model(RuleBasedStateMachine):
    """`kept` is what the pool would say: blocks of a request that have not been given back."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.leases = Leases(OPTIONS, lambda: self.now)
        self.kept: dict[str, Sequence[int]] = {}
        self.must_end: dict[str, float] = {}
        self.last: dict[str, float] = {}
        # By the reader's token.
        self.held: dict[str, dict[int, float]] = {}
        self.readers = 0
        self.released: set[str] = set()
        self.lapsing: set[str] = set()
        self.wanted = self.minted = 0
        self.counts = dict.fromkeys(
            ("granted", "renewals", "refused", "reclaimed", "expired", "released", "reset"), 0
        )

    def blocks(self) -> set[int]:
        return {block for blocks in self.kept.values() for block in blocks}

    def is_held(self, request: str) -> bool:
        return any(end > self.now for end in self.held[request.removeprefix("r-")].values())

    def freed(self, requests: list[str]) -> None:
        for request in requests:
            assert request in self.kept, "freed twice"
            assert not self.is_held(request), "freed under a hold"
            del self.kept[request]

    def stands(self, lease: str) -> bool:
        return (
            f"r-{lease}" in self.kept
            and lease not in self.released
            and self.must_end[lease] > self.now
        )

    @rule(target=ids, first=st.integers(0, 150), count=st.integers(1, 120))
    def finish(self, first: int, count: int) -> str:
        """Turns of one conversation share blocks."""
        lease, blocks = f"d0-{self.minted}", range(first, first + count)
        self.minted += 1
        missing = len(self.blocks() | set(blocks)) - OPTIONS.budget
        assert self.leases.grant(lease, f"r-{lease}", blocks) is (missing <= 0)
        if missing <= 0:
            self.counts["granted"] += 1
            self.kept[f"r-{lease}"] = blocks
            self.must_end[lease] = self.now + OPTIONS.duration_s
            self.last[lease] = self.now + OPTIONS.most_s
            self.held[lease] = {}
            return lease
        self.counts["refused"] += 1
        if len(set(blocks) - self.blocks()) <= OPTIONS.budget:
            self.wanted = max(self.wanted, missing)
        return lease

    @rule(lease=ids)
    def renew(self, lease: str) -> None:
        """Where room was missing, the oldest are not prolonged any more."""
        found = 0
        for request, blocks in self.kept.items():
            if found >= self.wanted:
                break
            self.lapsing.add(request.removeprefix("r-"))
            found += len(blocks)
        self.wanted = 0
        stands = self.stands(lease)
        renewed, lost = self.leases.renew([lease, "unknown"])
        assert lost == ([] if stands else [lease]) + ["unknown"]
        if stands and lease not in self.lapsing:
            self.counts["renewals"] += 1
            self.must_end[lease] = min(self.now + OPTIONS.duration_s, self.last[lease])
        assert renewed == ({lease: self.must_end[lease] - self.now} if stands else {})

    @rule(lease=ids)
    def release(self, lease: str) -> None:
        there = f"r-{lease}" in self.kept and lease not in self.released
        assert self.leases.release([lease, lease, "unknown"]) == ([lease] if there else [])
        if there:
            self.counts["released"] += 1
            self.released.add(lease)

    @rule(lease=ids)
    def hold(self, lease: str) -> None:
        stands = self.stands(lease)
        self.readers += 1
        assert self.leases.stands(lease) is stands
        assert self.leases.hold(lease, self.readers) is stands
        if stands:
            self.held[lease][self.readers] = self.now + OPTIONS.hold_s

    @rule(lease=ids, which=st.integers(0, 3))
    def confirm(self, lease: str, which: int) -> None:
        """A reader ends its own hold, however late, and no other's."""
        holds = self.held.get(lease, {})
        token = list(holds)[which] if which < len(holds) else -1
        self.leases.done(lease, token)
        if f"r-{lease}" in self.kept:
            holds.pop(token, None)

    @rule(seconds=st.floats(0.0, 40.0))
    def time_goes_by(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def an_idle_engine_looks_when_it_is_told_to(self) -> None:
        """A tick after the first lease is over at the latest, and none is left that is."""
        left = self.leases.seconds_left()
        assert (left is None) is (not self.kept)
        if left is None:
            return
        over = min(self.over_at(request) for request in self.kept)
        assert self.now + left <= max(over, self.now) + OPTIONS.tick_s
        assert left > 0 or over <= self.now, "it would step for nothing"
        self.now += left
        self.tick()

    def over_at(self, request: str) -> float:
        lease = request.removeprefix("r-")
        ends = 0.0 if lease in self.released else self.must_end[lease]
        return max([ends, *self.held[lease].values()])

    @rule()
    def tick(self) -> None:
        """None that is not over, and all that have been for a tick."""
        due = {request for request in self.kept if self.over_at(request) <= self.now}
        late = {one for one in due if self.over_at(one) + OPTIONS.tick_s <= self.now}
        ended = self.leases.over()
        assert late <= set(ended) <= due and len(ended) == len(set(ended))
        self.freed(ended)
        self.counts["expired"] += sum(
            request.removeprefix("r-") not in self.released for request in ended
        )

    @rule(blocks=st.integers(1, 80))
    def pressure(self, blocks: int) -> None:
        before, order = len(self.blocks()), list(self.kept)
        most = self.leases.reclaimable()
        ended = self.leases.reclaim(blocks)
        self.freed(ended)
        assert before - len(self.blocks()) >= min(most, blocks)
        self.counts["reclaimed"] += sum(
            request.removeprefix("r-") not in self.released for request in ended
        )
        free = [request for request in order if not self.is_held(request)]
        assert ended == free[: len(ended)], "the oldest first"
        assert before - len(self.blocks()) >= blocks or ended == free, "there was more to give"

    @rule()
    def reset(self) -> None:
        ended = self.leases.end_all()
        assert sorted(ended) == sorted(self.kept)
        self.counts["reset"] += len(ended)
        self.kept.clear()

    @invariant()
    def adds_up(self) -> None:
        totals = self.leases.totals()
        assert totals.blocks == len(self.blocks()) <= totals.budget == OPTIONS.budget
        counts = self.counts
        for name in ("renewals", "refused", "reclaimed", "expired", "released"):
            assert getattr(totals, name) == counts[name], name
        released = sum(f"r-{lease}" not in self.kept for lease in self.released)
        gone = counts["granted"] - len(self.kept)
        # One that was released may have been there when all were ended.
        ended = counts["reclaimed"] + counts["expired"] + released
        assert ended <= gone <= ended + counts["reset"]
        assert totals.leases == len(self.leases) == len(self.kept)
        assert totals.holds == sum(
            end > self.now
            for request in self.kept
            for end in self.held[request.removeprefix("r-")].values()
        )


TestLeases = Model.TestCase
TestLeases.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_a_newcomer_gets_the_room_of_the_oldest_that_is_not_read() -> None:
    """A full budget is not taken for ever by those who came first and renew."""
    now = 0.0
    leases = Leases(OPTIONS, lambda: now)
    for name in ("old", "middle", "young"):
        assert leases.grant(name, name, range(len(leases) * 30, len(leases) * 30 + 30))
    assert not leases.grant("new", "new", range(200, 230))
    now = 5.0
    renewed, _ = leases.renew(["young", "middle", "old"])
    assert renewed == {"young": 15.0, "middle": 15.0, "old": 10.0}
    now = 15.0
    assert leases.over() == ["old"]
    assert leases.grant("new", "new", range(200, 230))


def test_a_turn_that_no_budget_could_keep_costs_nobody_a_lease() -> None:
    leases = Leases(OPTIONS, lambda: 0.0)
    assert leases.grant("old", "old", range(10))
    assert not leases.grant("huge", "huge", range(1000, 1101))
    assert leases.renew(["old"]) == ({"old": 15.0}, [])
    assert leases.totals().renewals == 1


def test_a_late_reader_ends_no_other_readers_hold() -> None:
    """Its own has run out meanwhile."""
    now = 0.0
    leases = Leases(OPTIONS, lambda: now)
    assert leases.grant("one", "one", range(10))
    assert leases.hold("one", 1)
    while now < 30.0:
        now += 10.0
        leases.renew(["one"])
    assert leases.hold("one", 2)
    leases.done("one", 1)
    now = 50.0
    assert leases.over() == [], "the second one reads until 60"
    leases.done("one", 2)
    assert leases.over() == ["one"]
