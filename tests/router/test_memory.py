"""What is remembered of a conversation takes little, and does not grow as conversations change."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
from vllm.bidir.router.clients.request import TurnRequest, parse_request
from vllm.bidir.router.conversations.conversations import Bounds, Conversations
from vllm.bidir.router.conversations.identity import Identities
from vllm.bidir.router.conversations.leases import Leases
from vllm.bidir.router.telemetry.metrics import Metrics

from tests.router.conftest import MakeSetup, until
from tests.router.fake_engine import d_params
from tests.router.fake_leases import lease_id
from tests.router.sizes import Sizes, sizes_of

CHAT = "/v1/chat/completions"
COUNT = 5_000
# At least; the tables double, and are half empty after that.
MOST_BYTES = 640


@dataclass
class Book:
    """All that a router remembers, without the router. `nodes` keep turns, each in its turn."""

    limit: int
    params: int = 0
    nodes: int = 3

    def __post_init__(self) -> None:
        self.leases = Leases(Metrics())
        bounds = Bounds(self.limit, self.params, idle_timeout=1e9)
        self.kept = Conversations(bounds, self.leases, time.monotonic)
        self.identities = Identities(2 * self.limit)

    def turn(self, number: int, name: str | None = None) -> None:
        """One conversation's first turn, which a name or its message tells from others."""
        headers = {} if name is None else {"X-Session-ID": name}
        place = self.identities.find("tenant", _request(f"hello {number}"), headers)
        assert place is not None
        node = f"node-{number % self.nodes}"
        lease = {"lease_id": lease_id(number), "lease_duration": 15.0 + number % 2}
        self.kept.put(self.identities.settle(place).key, d_params(1) | lease, node)

    def take_ended(self) -> None:
        """As the heartbeat does."""
        for number in range(self.nodes):
            self.leases.of(f"node-{number}").take_ended()

    def sizes(self) -> Sizes:
        """Of all that is remembered."""
        return sizes_of(self.kept, self.identities)


def _request(text: str) -> TurnRequest:
    body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % text.encode()
    return parse_request(CHAT, body)


@pytest.mark.parametrize("named", [True, False])
def test_a_leased_conversation_takes_half_a_kilobyte(named: bool) -> None:
    book = Book(COUNT)
    before = book.sizes().bytes
    for number in range(COUNT):
        book.turn(number, str(number) if named else None)
    assert len(book.kept) == len(book.leases) == COUNT
    assert (book.sizes().bytes - before) / COUNT < MOST_BYTES


def test_params_take_what_they_may_and_no_more() -> None:
    limit = 1 << 20
    book = Book(COUNT, params=limit)
    for number in range(COUNT):
        book.turn(number)
    said = book.kept.params_bytes
    assert limit * 0.9 < said <= limit
    with_params = book.sizes().bytes
    without = Book(COUNT)
    for number in range(COUNT):
        without.turn(number)
    assert 0.9 * said < with_params - without.sizes().bytes < 1.2 * said


def test_nothing_grows_as_conversations_come_and_go() -> None:
    """100,000 of them, some hundred at a time, by name and without, one turn or several."""
    book = Book(500, params=100_000)

    def churn(numbers: range) -> Sizes:
        for number in numbers:
            book.turn(number, f"agent-{number // 3}" if number % 2 else None)
            if not number % 64:
                book.take_ended()
        book.take_ended()
        return book.sizes()

    before, after = churn(range(5_000)), churn(range(5_000, 100_000))
    assert len(book.kept) <= 500 and len(book.leases) <= 500 and len(book.identities) <= 1_000
    # Of some kinds a few more or fewer, as the end of a batch falls.
    changed = {
        name: (before.objects[name], count)
        for name, count in after.objects.items()
        if abs(count - before.objects[name]) > 0.02 * before.objects[name] + 4
    }
    assert changed == {}
    assert abs(after.bytes - before.bytes) < 0.1 * before.bytes
    for number in range(book.nodes):
        book.kept.leave_node(f"node-{number}")
    book.take_ended()
    assert len(book.leases) == 0 and book.kept.params_bytes == 0


async def test_nothing_grows_in_a_router_that_serves(make_setup: MakeSetup) -> None:
    """Whatever a request leaves behind, anywhere, would be there 450 times more."""
    setup = await make_setup(max_conversations=50, max_kept_params=20_000)
    setup.decode[0].leases.duration_s = 60.0

    def all_are_given_back() -> bool:
        return not setup.router.leases.of(setup.router.decode.nodes[0].name).ended

    async def serve(numbers: range) -> None:
        for number in numbers:
            status, _ = await setup.ask(conversation_id=f"c{number}", stream=bool(number % 2))
            assert status == 200
        for engine in (*setup.prefill, *setup.decode):
            engine.asked.clear()
            engine.headers.clear()
        await until(lambda: setup.metric("bidir_router_leases") <= 50)
        await until(all_are_given_back)
        # Those of the last call stay at hand until the next: let them be few.
        await setup.ask(conversation_id=f"last of {numbers}")
        await until(all_are_given_back)
        setup.decode[0].leases.calls.clear()
        setup.decode[0].leases.gone.clear()

    await serve(range(150))
    before = sizes_of(setup.router)
    await serve(range(150, 600))
    after = sizes_of(setup.router)
    grown = {name: more for name, more in (after.objects - before.objects).items() if more > 100}
    # Objects tell of anything left behind; bytes of what grows within one, and they come and go
    # with connections and their buffers.
    assert grown == {} and after.bytes < 1.3 * before.bytes
    assert setup.metric("bidir_router_conversations") <= 50
    assert 0 < setup.metric("bidir_router_params_bytes") <= 20_000
