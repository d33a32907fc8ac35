# SPDX-License-Identifier: Apache-2.0
"""How long NIXL's progress thread waits between two looks at its links.

NIXL's Python agent has it wait 0 µs: a thread that takes a whole core from start on, in each
worker, whether anything moves or not. The agent's own configuration has a field for it, which its
Python class sets to 0 just before it makes the agent; nothing outside is asked. So while a worker
makes its agent, the constructor that takes this configuration is stood in for by one that fills the
field in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.logger import init_logger
from vllm.platforms import current_platform

logger = init_logger(__name__)


# On a CPU a link wakes the thread by itself. GPU memory has no such link: there a READ of 8,000
# tokens took 52 to 57 ms when the thread never waited, and 59 to 62 ms when it waited 100 µs (one
# H200, two engines), so that there it waits only if asked to.
CPU_DELAY_US = 100


def delay_us(asked: int | None) -> int:
    """Microseconds to wait: what the option asks, else what costs no latency here."""
    if asked is not None:
        return asked
    return CPU_DELAY_US if current_platform.is_cpu() else 0


@contextmanager
def waiting_between_looks(agent_class: Any, microseconds: int) -> Iterator[None]:
    """Agents of `agent_class` (NIXL's `nixl_agent`) made in this block wait so long; 0: not at all.

    Where NIXL looks otherwise than it did in 1.4, it is left as it is, with one warning.
    """
    module = sys.modules.get(getattr(agent_class, "__module__", ""))
    bindings: Any = getattr(module, "nixlBind", None)
    make = getattr(bindings, "nixlAgent", None)
    if microseconds == 0:
        yield
        return
    if make is None:
        logger.warning("NIXL's progress thread is left as it is: its agent is made in another way")
        yield
        return

    def made_to_wait(name: str, config: Any) -> Any:
        config.pthrDelay = microseconds
        return make(name, config)

    bindings.nixlAgent = made_to_wait
    try:
        yield
    finally:
        bindings.nixlAgent = make
