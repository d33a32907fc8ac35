# SPDX-License-Identifier: Apache-2.0
"""Which node a turn goes to. One small class for each policy; `base` says what one is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm.bidir.router.nodes.policies.affinity import PrefixAffine
from vllm.bidir.router.nodes.policies.base import Ask, Policy, pick
from vllm.bidir.router.nodes.policies.load import LeastLoaded, LeastTokens, Sticky

__all__ = ["DECODE", "PREFILL", "Ask", "Policy", "pick"]

# By the name that options give them; the first is the default.
PREFILL: Mapping[str, Callable[[], Policy]] = {
    "least-tokens": LeastTokens,
    "prefix-affine": PrefixAffine,
    "round-robin": Policy,
}
DECODE: Mapping[str, Callable[[], Policy]] = {
    "sticky": Sticky,
    "least-loaded": LeastLoaded,
    "round-robin": Policy,
}
