# SPDX-License-Identifier: Apache-2.0
"""The options of read-back, from `kv_connector_extra_config`: checked at start, read in one place.

A value that cannot be meant is refused before the engine serves; it would otherwise show as a
read-back that never happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.peers import OPTION as PEERS
from vllm.bidir.connector.peers import check_peers

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

SWITCH = "bidirectional_kv_xfer"
TIMEOUT = "read_back_timeout"
DEFAULT_TIMEOUT_S = 2.0
PROGRESS_DELAY = "nixl_progress_delay"
TTL = "decoder_kv_blocks_ttl"
LEASE = "decoder_kv_lease_duration"
LEASE_BUDGET = "decoder_kv_lease_budget"
DEFAULT_LEASE_BUDGET = 0.5
HOLD = "decoder_kv_hold_duration"
DEFAULT_HOLD_S = 30.0
_LONGEST_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Options:
    """`timeout_s`: seconds for HOLD and handshake together, and for CONFIRM; also the shortest
    bound of a READ. `progress_delay_us`: microseconds that NIXL's progress thread waits between
    two looks at its links; 0: it never waits, as NIXL has it; None: as the platform does best.
    `lease_s`: seconds that D keeps a finished turn without renewal; None: as long as `ttl_s`, which
    is the longest in any case. `lease_budget`: share of D's blocks that leases keep at most.
    `hold_s`: seconds that one reader may pin a leased turn."""

    timeout_s: float = DEFAULT_TIMEOUT_S
    progress_delay_us: int | None = None
    lease_s: float | None = None
    lease_budget: float = DEFAULT_LEASE_BUDGET
    hold_s: float = DEFAULT_HOLD_S
    ttl_s: float = 480.0


def is_on(config: KVTransferConfig) -> bool:
    """Whether `bidirectional_kv_xfer` is set; ValueError for what is neither true nor false."""
    value = config.get_from_extra_config(SWITCH, False)
    if not isinstance(value, bool):
        raise ValueError(f"{SWITCH} must be true or false, not {value!r}")
    return value


def read_options(config: KVTransferConfig) -> Options:
    """ValueError, naming the option and what it may be, for what contradicts read-back."""
    if config.kv_connector == "NixlPushConnector":
        raise ValueError(
            f"{SWITCH} needs a decode node that reads (NixlConnector); NixlPushConnector's "
            "prefill node writes, and nothing could be read back. Choose one of the two."
        )
    if config.kv_role not in ("kv_producer", "kv_consumer", "kv_both"):
        raise ValueError(
            f"{SWITCH} needs kv_role kv_producer, kv_consumer or kv_both, not {config.kv_role!r}"
        )
    check_peers(config.get_from_extra_config(PEERS, None))
    _number(config, "kv_recompute_threshold", 64, least=0, unit="tokens")
    _number(config, "kv_lease_duration", 30, least=0, above=True)
    delay = config.get_from_extra_config(PROGRESS_DELAY, None)
    return Options(
        _number(config, TIMEOUT, DEFAULT_TIMEOUT_S, least=0, above=True),
        None if delay is None else int(_number(config, PROGRESS_DELAY, 0, least=0, unit="µs")),
        *_leases(config),
    )


def _leases(config: KVTransferConfig) -> tuple[float | None, float, float, float]:
    """Lease, budget, hold and longest time of a kept turn."""
    ttl_s = _number(config, TTL, 480, least=0, above=True)
    budget = _share(config, LEASE_BUDGET, DEFAULT_LEASE_BUDGET)
    hold_s = _number(config, HOLD, DEFAULT_HOLD_S, least=0, above=True)
    if config.get_from_extra_config(LEASE, None) is None:
        for name in (LEASE_BUDGET, HOLD):
            if config.get_from_extra_config(name, None) is not None:
                raise ValueError(f"{name} needs {LEASE}: without it there are no leases")
        return None, budget, hold_s, ttl_s
    lease_s = _number(config, LEASE, 0, least=0, above=True)
    if lease_s > ttl_s:
        raise ValueError(
            f"{LEASE} ({lease_s:g} s) must not exceed {TTL} ({ttl_s:g} s), the longest that a turn "
            "is kept however often it is renewed"
        )
    return lease_s, budget, hold_s, ttl_s


def _number(
    config: KVTransferConfig,
    name: str,
    default: float,
    least: float,
    above: bool = False,
    unit: str = "seconds",
) -> float:
    value: Any = config.get_from_extra_config(name, default)
    whole = unit != "seconds"
    kind = int if whole else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or not least <= value  # nor anything that compares with nothing
        or (above and value == least)
        or (not whole and value > _LONGEST_S)
    ):
        noun = f"a whole number of {unit}" if whole else unit
        relation = "above" if above else "of at least"
        raise ValueError(f"{name} must be {noun} {relation} {least:g}, not {value!r}")
    return float(value)


def _share(config: KVTransferConfig, name: str, default: float) -> float:
    value: Any = config.get_from_extra_config(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ValueError(f"{name} must be a share above 0 and at most 1, not {value!r}")
    return float(value)
