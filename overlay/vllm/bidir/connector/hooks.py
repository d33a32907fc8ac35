# SPDX-License-Identifier: Apache-2.0
"""What patches of the base call: one line there, the decision here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.peers import OPTION, check_host, check_shape

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request


def select_connector(connector_cls: Any, kv_transfer_config: KVTransferConfig) -> Any:
    """Our connector for NixlConnector with `bidirectional_kv_xfer`; else the one chosen."""
    if kv_transfer_config.kv_connector not in ("NixlConnector", "NixlPullConnector"):
        return connector_cls
    if not kv_transfer_config.get_from_extra_config("bidirectional_kv_xfer", False):
        return connector_cls
    from vllm.bidir.connector.connector import BidirConnector
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # MultiConnector finds its children's metrics by the name of their class.
    name = BidirConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, BidirConnector.__module__, name)
    return BidirConnector


def end_kept_turns(connector: Any) -> None:
    """Before the prefix cache is reset or weights change; a no-op for other connectors."""
    for one in (connector, *getattr(connector, "_connectors", ())):
        end = getattr(one, "end_kept_turns", None)
        if end is not None:
            end()


def recomputes_failed_load(request: Request) -> bool:
    """Whether a failed load of this request is a lost read-back.

    Reading back is an optimisation: whatever `kv_load_failure_policy` says about loads that a
    request depends on, a turn is never worse off for having tried it.
    """
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def check_kv_peers(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """Refuse params that are malformed, or name a host outside the option `kv_peers`.

    ValueError becomes a 400. Behind this point the engine core reads them without a net.
    """
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    config = vllm_config.kv_transfer_config
    if transfer is None or config is None:
        return
    check_shape(transfer)
    check_host(config.get_from_extra_config(OPTION, None), transfer.get("remote_host"))
