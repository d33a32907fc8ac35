"""A router that serves ever new conversations takes no more memory than at first."""

from __future__ import annotations

import os

from tests.router.router_process import router
from tools.bench.router.engines import Engines
from tools.bench.router.load import Through, fill
from tools.bench.router.memory import resident_mb

KEPT = 500
# Until pools, caches and the allocator have what they need.
AT_FIRST = 3_000
CONVERSATIONS = int(os.environ.get("BIDIR_ROUTER_CONVERSATIONS", "9000"))
MOST_MB = 1.5


async def test_the_process_does_not_grow_as_conversations_come_and_go() -> None:
    """All of them leased by D; what is not kept any more is given back."""
    engines = Engines(100, 60.0)
    limit = ("--max-conversations", str(KEPT))
    async with router(engines.prefill, engines.decode, *limit) as (port, pid):
        await fill(lambda: Through(port), AT_FIRST, 16)
        before = resident_mb(pid)
        await fill(lambda: Through(port), CONVERSATIONS, 16)
        after = resident_mb(pid)
    assert after - before < MOST_MB, f"{before:.1f} MB after {AT_FIRST}, {after:.1f} at the end"
