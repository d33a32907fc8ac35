# SPDX-License-Identifier: Apache-2.0
"""What patches of the base call: one line there, the decision here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.bidir.connector.options import is_on, read_options
from vllm.bidir.connector.peers import OPTION, check_host, check_shape
from vllm.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllm.bidir.connector.scheduler import BidirScheduler
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request


def select_connector(connector_cls: Any, kv_transfer_config: KVTransferConfig) -> Any:
    """Our connector for NixlConnector with `bidirectional_kv_xfer`; else the one chosen."""
    if kv_transfer_config.kv_connector == "NixlPushConnector" and is_on(kv_transfer_config):
        read_options(kv_transfer_config)  # says why not
    if kv_transfer_config.kv_connector not in ("NixlConnector", "NixlPullConnector"):
        return connector_cls
    if not is_on(kv_transfer_config):
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


def weights_changed(connector: Any, weight_version: str) -> None:
    """The engine's weights have been updated in place; a no-op for other connectors."""
    ours = our_scheduler(connector)
    if ours is not None:
        ours.weights_changed(weight_version)


def recomputes_failed_load(request: Request) -> bool:
    """Whether a failed load of this request is a lost read-back.

    Reading back is an optimisation: whatever `kv_load_failure_policy` says about loads that a
    request depends on, a turn is never worse off for having tried it.
    """
    params = request.kv_transfer_params
    return bool(params and params.get("do_remote_decode"))


def our_scheduler(connector: Any) -> BidirScheduler | None:
    """The scheduler's side of our connector, also when it is one of several."""
    for one in (connector, *getattr(connector, "_connectors", ())):
        scheduler = getattr(one, "connector_scheduler", None)
        if hasattr(scheduler, "recomputes_elsewhere"):
            return scheduler
    return None


def recomputes_elsewhere(connector: Any, request: Request) -> bool:
    """Whether a failed load's own blocks must not be used to compute its tokens.

    A READ that was given up may still write into them.
    """
    ours = our_scheduler(connector)
    return ours is not None and ours.recomputes_elsewhere(request.request_id)


def loads_kv(connector: Any, config: KVTransferConfig) -> bool:
    """Whether loads fill blocks of this engine, unordered against a step that still runs."""
    return config.is_kv_consumer or our_scheduler(connector) is not None


def resting_requests(connector: Any) -> int:
    """How many finished requests only wait for their reader, and need no step of the engine.

    Beside other connectors none rests: what those are about to do is theirs to know.
    """
    rest = getattr(getattr(connector, "connector_scheduler", None), "rest", None)
    return 0 if rest is None else len(rest)


def idle_seconds(scheduler: Any) -> float | None:
    """How long an engine without work may wait for a request; None: as long as it takes."""
    connector = getattr(scheduler, "connector", None)
    rest = getattr(getattr(connector, "connector_scheduler", None), "rest", None)
    return None if rest is None else rest.seconds_left()


def check_kv_peers(vllm_config: VllmConfig, params: SamplingParams) -> None:
    """`check_kv_transfer_params` for a request's sampling parameters."""
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    if transfer is not None:
        check_kv_transfer_params(vllm_config, transfer)


def check_kv_transfer_params(vllm_config: VllmConfig, transfer: object) -> None:
    """Refuse params that are malformed, or name a host outside the option `kv_peers`.

    Behind this point the engine core reads them without a net. Raises VLLMValidationError, the
    only kind of error that the server answers with 400.
    """
    config = vllm_config.kv_transfer_config
    if config is None:
        return
    try:
        check_shape(transfer)
        assert isinstance(transfer, dict)  # as just checked
        check_host(config.get_from_extra_config(OPTION, None), transfer.get("remote_host"))
    except ValueError as error:
        raise VLLMValidationError(str(error)) from error
