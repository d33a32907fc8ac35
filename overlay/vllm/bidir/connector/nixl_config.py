# SPDX-License-Identifier: Apache-2.0
"""What NIXL's agent is told when a worker makes it, and NIXL's Python class does not ask.

How long the progress thread waits between two looks at its links: the class says 0 µs, a thread
that takes a whole core from start on, in each worker, whether anything moves or not. And that
several threads may use the agent at once: the class says that none but one will.

The agent's own configuration has a field for each, which the class fills in just before it makes
the agent. So while a worker makes its agent, the constructor that takes this configuration is stood
in for by one that corrects it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


@dataclass
class Configured:
    """What has become of it. `shared`: several threads may use the agents that were made."""

    shared: bool = False


@contextmanager
def configured(agent_class: Any, progress_delay_us: int) -> Iterator[Configured]:
    """Agents of `agent_class` (NIXL's `nixl_agent`) made in this block wait so long (0: not at
    all) between two looks, and may be shared by threads.

    Where NIXL looks otherwise than it did in 1.4, it is left as it is, with one warning.
    """
    module = sys.modules.get(getattr(agent_class, "__module__", ""))
    bindings: Any = getattr(module, "nixlBind", None)
    make = getattr(bindings, "nixlAgent", None)
    # Readers of the agent's lists of peers and memory run side by side; who changes one waits.
    modes = getattr(module, "nixl_thread_sync_t", None)
    mode = getattr(modes, "NIXL_THREAD_SYNC_RW", None)
    made = Configured()
    if make is None or mode is None:
        logger.warning(
            "NIXL's agent is left as it is, for it is made in another way: its progress thread "
            "never rests, and READs are posted in the engine's step"
        )
        yield made
        return

    def make_configured(name: str, config: Any) -> Any:
        config.syncMode = mode.value
        if progress_delay_us:
            config.pthrDelay = progress_delay_us
        agent = make(name, config)
        made.shared = True
        return agent

    bindings.nixlAgent = make_configured
    try:
        yield made
    finally:
        bindings.nixlAgent = make
