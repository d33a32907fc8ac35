"""The base release's read-back, by token count: the control that must be found wrong.

Under a name of its own, which `select_connector` leaves alone.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector


class CountingConnector(NixlPullConnector):
    """Reads as many tokens as were kept, whatever they are."""
